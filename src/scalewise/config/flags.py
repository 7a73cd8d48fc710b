"""Hydra's command-line flags: parsing, accepted flags and their help."""

import io
from argparse import Namespace
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout

from scalewise.compat.hydra import get_args_parser
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
"""Flags of Hydra that commands accept."""
REJECTED = {
    "config_path": (
        "replaces the configs of scalewise, which every run requires",
        "add a folder with -cd DIR",
    ),
    "experimental_rerun": (
        "unpickles a file, which runs arbitrary code",
        "repeat a run with its command, which is in report.html and status.json",
    ),
    "version": ("--version of Hydra is not supported", "scalewise --version"),
}
"""Reason and fix of each rejected flag."""
UNUSED = ("is not a flag of this command", "remove it")


def overrides_first(arguments: Sequence[str]) -> list[str]:
    """Reorder arguments: overrides first, then Hydra's flags with their values.

    Hydra does not accept overrides after a flag that follows other overrides.
    """
    tokens = [_IdentityStr(argument) for argument in arguments]
    for index, token in enumerate(tokens):
        if token in ("--info", "-i") and tokens[index + 1 : index + 2] and "=" in tokens[index + 1]:
            # Otherwise Hydra parses the next override as the value of --info.
            tokens[index] = _IdentityStr("--info=all")
    overrides = split_flags(tokens).overrides
    flags = [token for token in tokens if not any(token is override for override in overrides)]
    return [*map(str, overrides), *map(str, flags)]


class _IdentityStr(str):
    """Argument that is compared by identity."""

    __slots__ = ()


def split_flags(arguments: Sequence[str], accepted: Collection[str] = ACCEPTED) -> Namespace:
    """Parse Hydra's flags and the overrides, in any order.

    Raises ``ConfigError`` for unknown flags and for flags that are not in ``accepted``.
    """
    parser = get_args_parser()
    output = io.StringIO()
    try:
        with redirect_stderr(output), redirect_stdout(output):
            flags = parser.parse_intermixed_args(list(arguments))
    except SystemExit as error:
        if not error.code:  # an abbreviated --version
            raise ConfigError.for_key("", "", *REJECTED["version"]) from error
        reason = output.getvalue().strip().rpartition("error: ")[2]
        fix = "use -m, --cfg job, --info, -cd DIR or another flag of --hydra-help"
        raise ConfigError.for_key("", "", reason, fix) from error
    issues = [
        ConfigIssue(f"--{name.replace('_', '-')}", value, *REJECTED.get(name, UNUSED))
        for name, value in vars(flags).items()
        if name not in ("overrides", *accepted) and value != parser.get_default(name)
    ]
    if flags.package is not None and not flags.cfg:
        reason, fix = "requires --cfg", "add --cfg job"
        issues.append(ConfigIssue("--package", flags.package, reason, fix))
    if issues:
        raise ConfigError(issues)
    return flags


def flag_help() -> list[str]:
    """Help lines of the accepted flags, with Hydra's descriptions."""
    return [
        f"{','.join(action.option_strings):<24} {str(action.help).splitlines()[0]}"
        for action in get_args_parser()._actions
        if action.dest in ACCEPTED
    ]
