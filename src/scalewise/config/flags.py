"""Hydra's command-line flags and launchers, and the overrides next to them."""

import io
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout

from hydra._internal.utils import get_args_parser

from scalewise.config.suggestions import did_you_mean
from scalewise.errors import ConfigError, ConfigIssue

ACCEPTED = (
    "cfg",
    "config_dir",
    "config_name",
    "help",
    "hydra_help",
    "info",
    "multirun",
    "package",
    "resolve",
    "run",
    "shell_completion",
)
"""Flags of Hydra that a command passes on; each other one is rejected before a file is opened."""
REJECTED = {
    "config_path": (
        "takes the place of the suite's configs, without which there is no run",
        "add a folder to them: -cd DIR",
    ),
    "experimental_rerun": (
        "unpickles a file, which runs whatever code is in it",
        "repeat a run by its overrides: report.html and status.json name its command",
    ),
    "version": ("--version of Hydra is not passed on", "scalewise --version"),
}
"""Why a flag is not accepted, and what to do."""
UNUSED = ("is not a flag of this command", "leave it out")


def overrides_first(arguments: Sequence[str]) -> list[str]:
    """Returns the overrides, then Hydra's flags with their values.

    Hydra takes overrides in one piece alone: a flag between two of them makes the rest unknown.
    """
    words = [_IdentityStr(argument) for argument in arguments]
    for place, word in enumerate(words):
        if word in ("--info", "-i") and words[place + 1 : place + 2] and "=" in words[place + 1]:
            words[place] = _IdentityStr("--info=all")  # else Hydra reads an override as its value
    overrides = split_flags(words).overrides
    flags = [word for word in words if not any(word is override for override in overrides)]
    return [*map(str, overrides), *map(str, flags)]


class _IdentityStr(str):
    """An argument that is told from an equal one by its identity."""

    __slots__ = ()


def split_flags(arguments: Sequence[str], accepted: Collection[str] = ACCEPTED) -> Namespace:
    """Returns Hydra's flags and the overrides, in any order.

    Raises ``ConfigError`` for a flag that Hydra lacks, and for each that is not ``accepted``.
    """
    parser = get_args_parser()
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            flags = parser.parse_intermixed_args(list(arguments))
    except SystemExit as error:
        if not error.code:  # Hydra's own version, by a shortened flag
            raise ConfigError.for_key("", "", *REJECTED["version"]) from error
        reason = said.getvalue().strip().rpartition("error: ")[2]
        fix = "flags are -m, --cfg job, --info, -cd DIR, and Hydra's others (--hydra-help)"
        raise ConfigError.for_key("", "", reason, fix) from error
    issues = [
        ConfigIssue(f"--{name.replace('_', '-')}", value, *REJECTED.get(name, UNUSED))
        for name, value in vars(flags).items()
        if name not in ("overrides", *accepted) and value != parser.get_default(name)
    ]
    if flags.package is not None and not flags.cfg:
        reason, fix = "shows a part of the config, without --cfg", "add --cfg job"
        issues.append(ConfigIssue("--package", flags.package, reason, fix))
    if issues:
        raise ConfigError(issues)
    return flags


def flag_help() -> list[str]:
    """Returns a line for each flag that may be given, with what Hydra says about it."""
    return [
        f"{','.join(action.option_strings):<24} {str(action.help).splitlines()[0]}"
        for action in get_args_parser()._actions
        if action.dest in ACCEPTED
    ]


def launcher_issues(launcher: str) -> Iterator[ConfigIssue]:
    """Yields a launcher of others, whose jobs would be neither validated nor recorded."""
    from hydra_plugins.scalewise_launcher import LAUNCHERS

    if launcher not in LAUNCHERS:
        reason = (
            "is not the suite's: no check before the first job starts, no record of how they end"
        )
        fix = did_you_mean(launcher, LAUNCHERS, "hydra/launcher=")
        if not fix.startswith("did you mean"):
            fix = f"choose one of hydra/launcher={', '.join(LAUNCHERS)}"
        yield ConfigIssue("hydra/launcher", launcher, reason, fix)
