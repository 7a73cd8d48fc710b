"""Diagnosis of a command line that Hydra rejects: every config issue with a suggested fix.

Hydra stops at its first error, so each override of a rejected command line is checked by itself.
For malformed text Hydra and OmegaConf raise many exception types, hence the broad excepts.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError

from scalewise import typed_override
from scalewise.config import paths
from scalewise.config.hydra_policy import hydra_session
from scalewise.config.launchers import launcher_issues
from scalewise.config.parse import LEAK_FIX, LEAK_REASON, parse_run, unresolved_issue
from scalewise.config.parsed_overrides import (
    display_value,
    override_key,
    override_text,
    override_values,
)
from scalewise.config.value_issues import first_sentence, value_issues
from scalewise.errors import (
    ConfigError,
    ConfigIssue,
    ScalewiseError,
    did_you_mean,
    format_value,
    suggested_option,
)
from scalewise.redaction import contains_secret
from scalewise.typed_override import shell_word

GRAMMAR = "write group=option or group.key=value, and quote values with spaces"
_HOME_PATH = re.compile(r"(?<=[=\[,])~[^\[\](){},:=\"'\\]*/[^\[\](){},:=\"'\\]*")
"""Paths from a home folder, which Hydra requires to be quoted."""


def translate_hydra_error(
    error: Exception,
    overrides: Sequence[str],
    *,
    check_machine: bool = True,
    remote_launchers: Collection[str] = (),
) -> Exception:
    """Convert an exception of Hydra to a ``ConfigError``; a ``ConfigError`` is completed.

    Args:
        error: The exception.
        overrides: Overrides of the command line and of a sweep file.
        check_machine: Whether the run is also validated against this machine.
        remote_launchers: Launchers whose runs are not validated against this machine.
    """
    if isinstance(error, ScalewiseError) and not isinstance(error, ConfigError):
        return error
    issues = diagnose_overrides(
        overrides, check_machine=check_machine, remote_launchers=remote_launchers
    )
    reported = error.issues if isinstance(error, ConfigError) else ()
    if "multirun" in str(error):
        issues += [c for text in overrides for c in _sweep_issues(_parse_override(text, []))]
    unique = {str(issue): issue for issue in (*issues, *reported)}
    return ConfigError(unique.values() or [_issue_from_error(error, overrides)])


def _issue_from_error(error: Exception, overrides: Sequence[str]) -> ConfigIssue:
    """Config issue of an exception of Hydra, with its key if it is known."""
    key = getattr(error, "full_key", None)
    if not (isinstance(error, InterpolationResolutionError) and key):
        return ConfigIssue("", "", first_sentence(error))
    values = {key.lstrip("+"): value for key, _, value in (it.partition("=") for it in overrides)}
    return unresolved_issue(key, values.get(key, "${...}"), error)


def _sweep_issues(override: Override | None) -> Iterator[ConfigIssue]:
    if override is not None and override.is_sweep_override():
        fix = "add -m for a sweep, or quote a string with a comma"
        yield ConfigIssue(
            override_key(override),
            display_value(override),
            "has several values, for one run",
            fix,
        )


def unparsable_overrides(overrides: Iterable[object]) -> Iterator[ConfigIssue]:
    """Yield issues of texts that are not overrides, or that contain a secret."""
    for text in overrides:
        if not isinstance(text, str):
            yield ConfigIssue("", "", f"an override is a string, not {text!r}", GRAMMAR)
        elif text.startswith("-"):
            reason = f"{text!r} is a flag of the command line, not an override"
            yield ConfigIssue("", "", reason, "remove it")
        elif any("\ud800" <= character <= "\udfff" for character in text):
            yield ConfigIssue("", "", f"the override {text!a} is not valid UTF-8", "retype it")
        elif contains_secret(text):
            key, _, value = text.partition("=")
            yield ConfigIssue(key, value, LEAK_REASON, LEAK_FIX)


def diagnose_overrides(
    overrides: Iterable[str],
    *,
    check_machine: bool = True,
    remote_launchers: Collection[str] = (),
) -> list[ConfigIssue]:
    """List the issues of these overrides: first of each override, then between groups."""
    override_list = list(overrides)
    if issues := list(unparsable_overrides(override_list)):
        return issues
    with hydra_session() as loader:
        parsed = [o for text in override_list if (o := _parse_override(text, issues)) is not None]
        groups = [o for o in parsed if _option_names(override_key(o), loader)]
        valid = [o for o in groups if not _extend(issues, _choice_issue(o, loader))]
        values = [o for o in parsed if o not in groups]
        if issues and not valid and not values:
            return issues
        config, compatible = _compose_compatible(
            [o for o in valid if not o.is_sweep_override()], issues
        )
        if config is None:
            return issues
        valid = [o for o in values if not _extend(issues, value_issues(o, config, loader))]
        _extend(issues, _hydra_issues(valid, compatible))
        if any(issue.key in paths.PRESETS for issue in issues):
            return issues  # the values of the preset are missing
        is_remote = config.hydra.runtime.choices["hydra/launcher"] in remote_launchers
        check_machine = check_machine and not is_remote
        try:
            parse_run(config, (), override_list, check_machine=check_machine)
        except ConfigError as error:
            issues += error.issues
    return issues


def _parse_override(text: str, issues: list[ConfigIssue]) -> Override | None:
    """Parse an override; add an issue and return None, or one with its paths quoted, if invalid."""
    override = _try_parse(text)
    if override is None:
        key, _, value = text.partition("=")
        quoted = _HOME_PATH.sub(r"'\g<0>'", text)
        override = _try_parse(quoted)
        if override is None:
            quoted = typed_override.override(key, value)
        is_rejected = override is None and _is_rejected(quoted)
        fix = GRAMMAR if is_rejected else f"write {shell_word(quoted)}"
        issues.append(ConfigIssue("", "", f"cannot parse the override '{format_value(text)}'", fix))
    return override


def _try_parse(text: str) -> Override | None:
    try:
        override = OverridesParser.create().parse_override(text)
    except Exception:  # the parser raises several types
        return None
    return override if override_key(override).strip("./@ ") else None


def _is_rejected(override: str) -> bool:
    """Return whether an override of the defaults is rejected."""
    try:
        config = compose("config", overrides=[override], return_hydra_config=True)
        parse_run(config, (), [override], check_machine=False)
    except Exception:  # Hydra raises many types for malformed overrides
        return True
    return False


def _option_names(group: str, loader: ConfigLoader) -> list[str]:
    try:
        options = loader.get_group_options(group)
    except (OSError, ValueError):  # not a valid file name
        return []
    if group.split("/")[0] not in (*paths.GROUPS, *paths.PRESETS):
        return options
    subgroups = loader.list_groups(group)
    return options + [
        f"{name}/{leaf}" for name in subgroups for leaf in _option_names(f"{group}/{name}", loader)
    ]


def _compose_compatible(
    groups: Sequence[Override], issues: list[ConfigIssue]
) -> tuple[DictConfig | None, list[str]]:
    """Compose the choices that are compatible; return the config and their overrides."""
    compatible = [override_text(override) for override in groups]
    config = _try_compose(compatible)
    if not isinstance(config, Exception):
        return config, compatible
    compatible, config = [], _try_compose([])
    distinct = {override_text(override): override for override in groups}
    for text, override in sorted(
        distinct.items(), key=lambda it: override_key(it[1]) in paths.PRESETS
    ):
        result = _try_compose([*compatible, text])
        if isinstance(result, Exception):
            issues.append(_issue_from_conflict(override, result, compatible))
            if choices := _choices_of(override, compatible):
                compatible = [*choices, *compatible]
                config = _try_compose(compatible)
        else:
            compatible, config = [*compatible, text], result
    return (None if isinstance(config, Exception) else config), compatible


def _issue_from_conflict(
    override: Override, error: Exception, compatible_overrides: Sequence[str]
) -> ConfigIssue:
    """Config issue of a choice that cannot be composed with the compatible ones.

    An experiment or sweep that sets keys of an option conflicts with other options.
    """
    if isinstance(error, MissingConfigException) and override_key(override) in paths.PRESETS:
        return _missing_option_issue(override, error)
    key = getattr(error.__context__, "full_key", None) or ""
    for choice in compatible_overrides if override_key(override) in paths.PRESETS else ():
        if key.startswith(choice.lstrip("+").partition("=")[0].replace("/", ".") + "."):
            reason = f"sets keys that {choice} lacks, such as {key}"
            fix = f"remove it, or choose another {override_key(override)}"
            return ConfigIssue(override_key(override), display_value(override), reason, fix)
    if isinstance(error.__context__, ConfigKeyError) and override_key(override) in paths.PRESETS:
        return _unknown_key_issue(override, error.__context__)
    fix = "set 'callbacks=[]'" if override_key(override) == "callbacks" else "remove it"
    return ConfigIssue(override_key(override), display_value(override), first_sentence(error), fix)


def _unknown_key_issue(preset: Override, error: ConfigKeyError) -> ConfigIssue:
    """Config issue of a key that does not exist, in the file of an experiment or sweep."""
    key, name = str(error.full_key), str(error.key)
    node_type = error.object_type
    fields = dataclasses.fields(node_type) if dataclasses.is_dataclass(node_type) else ()
    fix = did_you_mean(name, [field.name for field in fields])
    if "." in name:
        parts = name.split(".")
        fix = f"write it in nested form, {': {'.join(parts)}: VALUE{'}' * (len(parts) - 1)}"
    reason = f"its file sets {format_value(key)}, which is no key of the config"
    return ConfigIssue(override_key(preset), display_value(preset), reason, fix)


def _missing_option_issue(preset: Override, error: MissingConfigException) -> ConfigIssue:
    """Config issue of an option that does not exist, chosen by an experiment or sweep."""
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    reason = f"no such option, chosen by {override_text(preset)}"
    if group == "hydra/launcher":
        return dataclasses.replace(next(launcher_issues(name)), reason=reason)
    return ConfigIssue(group, name, reason, suggested_option(group, name, error.options or ()))


def _choices_of(override: Override, compatible_overrides: Sequence[str]) -> list[str]:
    """Options that an experiment or sweep chooses, so that their keys exist."""
    config = (
        _try_compose([override_text(override)]) if override_key(override) in paths.PRESETS else None
    )
    if not isinstance(config, DictConfig):
        return []
    choices = OmegaConf.select(config, "hydra.runtime.choices")
    chosen_groups = {line.partition("=")[0] for line in compatible_overrides}
    return [
        f"{group}={choices[group]}" for group in paths.CLOSED_GROUPS if group not in chosen_groups
    ]


def _hydra_issues(
    overrides: Sequence[Override], compatible_overrides: Sequence[str]
) -> Iterator[ConfigIssue]:
    """Yield Hydra's errors of overrides that passed the other checks."""
    single = [o for o in overrides if not o.is_sweep_override()]
    if not single or not isinstance(
        _try_compose([*compatible_overrides, *map(override_text, single)]), Exception
    ):
        return
    for override in single:
        result = _try_compose([*compatible_overrides, override_text(override)])
        if isinstance(result, Exception):
            yield ConfigIssue(
                override_key(override),
                display_value(override),
                first_sentence(result),
                "remove it",
            )


def _try_compose(overrides: Sequence[str]) -> DictConfig | Exception:
    try:
        return compose("config", overrides=list(overrides), return_hydra_config=True)
    except Exception as error:
        return error


def _extend(issues: list[ConfigIssue], new_issues: Iterable[ConfigIssue]) -> bool:
    new_issues = list(new_issues)
    issues += new_issues
    return bool(new_issues)


def _choice_issue(override: Override, loader: ConfigLoader) -> Iterator[ConfigIssue]:
    group, text = override_key(override), override_text(override)
    if group == "hydra/launcher":
        yield from launcher_issues(display_value(override))
        return
    if override.is_delete() or group.split("/")[0] == "hydra":
        return
    if override.package is not None:  # an option within another one
        key, options = f"{group}@{override.package}", _option_names(group, loader)
        for value in override_values(override):
            if isinstance(value, str) and value not in options:
                fix = suggested_option(group, value, options)
                yield ConfigIssue(key, value, "no such option", fix)
        return
    in_defaults = group in (*paths.GROUPS, *paths.PRESETS)
    if override.is_add() and in_defaults:
        fix = f"remove the +: {shell_word(text[1:])}"
        yield ConfigIssue(group, display_value(override), "is already chosen", fix)
        return
    if not override.is_add() and not in_defaults:
        fix = f"add a +: {shell_word('+' + text)}"
        yield ConfigIssue(group, display_value(override), "is not in the defaults list", fix)
        return
    options = _option_names(group, loader)
    for value in override_values(override):
        if isinstance(value, dict):
            continue
        if value is None or (isinstance(value, list) and group != "callbacks"):
            optional = group in paths.PRESETS
            fix = f"write {shell_word('~' + group)}" if optional else did_you_mean("", options)
            yield ConfigIssue(group, value, "requires one option", fix)
            continue
        for choice in value if isinstance(value, list) else [value]:
            if str(choice) not in options:
                yield ConfigIssue(
                    group, choice, "no such option", suggested_option(group, str(choice), options)
                )
