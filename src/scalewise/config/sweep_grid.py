"""The axes of a sweep: from lines with several values each to the lines of every job."""

import itertools
from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import ceil, prod

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hpo.space import job_count_issues


def sweep_overrides(params: Mapping[str, object], zipped: Mapping[str, object]) -> list[str]:
    """Returns the axes of a sweep's file as they would be typed.

    ``params`` are crossed, ``zipped`` go together. Raises ``ConfigError`` for a key in both, and
    for values that are no text or number.
    """
    issues = [
        ConfigIssue(f"zip.{key}", zipped[key], "is in params too", "leave one of the two out")
        for key in zipped
        if key in params
    ]
    for key, values in (*params.items(), *zipped.items()):
        if not isinstance(values, str | int | float):
            fix = "write its values as one text: 'a,b,c'"
            issues.append(ConfigIssue(key, values, "is no text of values", fix))
    if issues:
        raise ConfigError(issues)
    return [f"{key}={values}" for key, values in (*params.items(), *zipped.items())]


def expand_jobs(
    file_overrides: Sequence[str],
    cli_overrides: Sequence[str],
    zipped_keys: Sequence[str],
    loader: ConfigLoader,
) -> list[list[str]]:
    """Returns the overrides of every job, in order: the last axis varies fastest.

    ``file_overrides`` are the lines of the sweep's file, ``cli_overrides`` those of the command
    line, which take
    the place of a filed line of the same key. Of the filed, the keys in ``zipped_keys`` vary
    together,
    value by value. Raises ``ConfigError`` for an axis without values, or pairs that do not match.
    """
    parser = OverridesParser.create(config_loader=loader)
    own = {
        override.get_key_element(): override
        for override in parser.parse_overrides([*file_overrides])
    }
    given = {
        override.get_key_element(): override
        for override in parser.parse_overrides([*cli_overrides])
    }
    together = [key for key in own if key in zipped_keys and key not in given]
    issues: list[ConfigIssue] = []
    counts = {key: bounded_count(override) for key, override in {**own, **given}.items()}
    crossed = prod(n for key, n in counts.items() if key not in together)
    crossed *= max((counts[key] for key in together), default=1)
    if issues := list(job_count_issues("", "", crossed)):
        raise ConfigError(issues)
    values = {key: _sweep_override(override, issues) for key, override in {**own, **given}.items()}
    if not issues and together:
        issues += _unequal_zip_issues({key: values[key] for key in together})
    if issues:
        raise ConfigError(issues)
    axes = [[[line] for line in found] for key, found in values.items() if key not in together]
    if together:
        rows = zip(*(values[key] for key in together), strict=True)
        axes.append([list(row) for row in rows])
    return [list(itertools.chain(*parts)) for parts in itertools.product(*axes)]


def count(override: Override) -> int:
    """Returns how many values a sweep gives a key, which are not listed for it.

    Raises ``ConfigError`` for a range that never ends.
    """
    value = override.value() if override.is_sweep_override() else None
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return 1  # a glob has as many as there are files
    key, shown = override.get_key_element(), override.get_value_string()
    start, stop, step = (Decimal(number or 0) for number in (value.start, value.stop, value.step))
    if not (start.is_finite() and stop.is_finite() and step.is_finite() and step):
        fix = "write range(first,end,step) with a step other than 0"
        raise ConfigError.for_key(key, shown, "is a range that never ends", fix)
    return max(0, ceil((stop - start) / step))


def bounded_count(override: Override) -> int:
    """Returns :func:`count`; raises ``ConfigError`` for more values than a sweep has jobs."""
    found = count(override)
    if issues := list(
        job_count_issues(override.get_key_element(), override.get_value_string(), found)
    ):
        raise ConfigError(issues)
    return found


def _sweep_override(override: Override, issues: list[ConfigIssue]) -> list[str]:
    """Returns an override with each of its values, as lines."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key, shown = override.get_key_element(), override.get_value_string()
    if not override.is_discrete_sweep():
        reason, fix = "is no list of values", "write a,b,c or range(first,end,step)"
        issues.append(ConfigIssue(key, shown, reason, fix))
        return []
    found = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not found:
        issues.append(ConfigIssue(key, shown, "names no value", "write a,b,c"))
    return found


def _unequal_zip_issues(values: Mapping[str, Sequence[str]]) -> list[ConfigIssue]:
    """Returns a complaint where the keys of a zip have unlike numbers of values."""
    counts = {key: len(found) for key, found in values.items()}
    if len(set(counts.values())) == 1:
        return []
    told = ", ".join(f"{key} {count}" for key, count in counts.items())
    reason = f"paired values need equal numbers: {told}"
    return [ConfigIssue("hydra.sweeper.zip", list(counts), reason, "give each key as many")]
