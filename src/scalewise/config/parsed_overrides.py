"""Overrides that Hydra parsed: their values, the axes of a search, and the jobs of a grid."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import islice
from math import ceil, prod
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
)

from scalewise import typed_override
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.expectations import SweepCase, parse_cases
from scalewise.hpo.space import Axis, ChoiceAxis, IntervalAxis, job_count_issues
from scalewise.sweep_question import answer_issues


def sweep_overrides(params: Mapping[str, object], zipped: Mapping[str, object]) -> list[str]:
    """Convert the axes of a sweep file to overrides.

    Args:
        params: Axes of the grid, combined with each other.
        zipped: Axes that vary together.

    Raises:
        ConfigError: A key is in both, or its values are not a string or a number.
    """
    issues = [
        ConfigIssue(f"zip.{key}", zipped[key], "is also in params", "remove one of the two")
        for key in zipped
        if key in params
    ]
    for key, values in (*params.items(), *zipped.items()):
        if not isinstance(values, str | int | float):
            fix = "write the values as one string: 'a,b,c'"
            issues.append(ConfigIssue(key, values, "is not a string of values", fix))
    if issues:
        raise ConfigError(issues)
    return [f"{key}={values}" for key, values in (*params.items(), *zipped.items())]


def expand_jobs(
    file_overrides: Sequence[str],
    cli_overrides: Sequence[str],
    zipped_keys: Sequence[str],
    loader: ConfigLoader,
) -> list[list[str]]:
    """Expand a grid into the overrides of each job; the last axis varies fastest.

    Args:
        file_overrides: Overrides of the sweep file.
        cli_overrides: Overrides of the command line; they replace file overrides of the same key.
        zipped_keys: Keys of ``file_overrides`` whose values vary together.
        loader: Hydra's config loader.

    Raises:
        ConfigError: An axis has no values, or zipped axes have different lengths.
    """
    parser = OverridesParser.create(config_loader=loader)
    file_axes = {
        override.get_key_element(): override
        for override in parser.parse_overrides([*file_overrides])
    }
    cli_axes = {
        override.get_key_element(): override
        for override in parser.parse_overrides([*cli_overrides])
    }
    zipped = [key for key in file_axes if key in zipped_keys and key not in cli_axes]
    issues: list[ConfigIssue] = []
    counts = {key: bounded_count(override) for key, override in {**file_axes, **cli_axes}.items()}
    num_jobs = prod(n for key, n in counts.items() if key not in zipped)
    num_jobs *= max((counts[key] for key in zipped), default=1)
    if issues := list(job_count_issues("", "", num_jobs)):
        raise ConfigError(issues)
    values = {
        key: _sweep_override(override, issues)
        for key, override in {**file_axes, **cli_axes}.items()
    }
    if not issues and zipped:
        issues += _unequal_zip_issues({key: values[key] for key in zipped})
    if issues:
        raise ConfigError(issues)
    axes = [
        [[line] for line in overrides] for key, overrides in values.items() if key not in zipped
    ]
    if zipped:
        rows = zip(*(values[key] for key in zipped), strict=True)
        axes.append([list(row) for row in rows])
    return [list(itertools.chain(*parts)) for parts in itertools.product(*axes)]


def expand_cases(
    cases: object,
    only: object,
    answer: object,
    cli_overrides: Sequence[str],
    loader: ConfigLoader,
) -> tuple[list[SweepCase], list[list[str]]]:
    """Cases of ``hydra/sweeper=cases``, and the overrides of the job of each.

    The name of a case becomes the name of its run. Raises ``ConfigError`` if a case or the template
    of the answer is invalid, or if the command line varies a key or sets one that cases set.
    """
    parsed_cases, issues = parse_cases(cases, only)
    issues += answer_issues(answer, cases if isinstance(cases, Mapping) else ())
    axes, fixed_overrides = read_axes(cli_overrides, loader)
    fix = "remove it, or edit the cases in the file of the sweep"
    issues += [ConfigIssue(axis.key, "", "is varied by a sweep of cases", fix) for axis in axes]
    case_keys = typed_override.override_keys(it for case in parsed_cases for it in case.overrides)
    issues += [
        ConfigIssue(key, "", "is set by cases of the sweep", fix)
        for key in sorted(typed_override.override_keys(fixed_overrides) & (case_keys | {"name"}))
    ]
    if issues:
        raise ConfigError(issues)
    jobs = [
        [*fixed_overrides, typed_override.override("name", case.name), *case.overrides]
        for case in parsed_cases
    ]
    return parsed_cases, jobs


def count(override: Override) -> int:
    """Number of values of an override, without listing them.

    Raises ``ConfigError`` for an infinite range.
    """
    value = override.value() if override.is_sweep_override() else None
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return 1  # the length of a glob is not known here
    key, value_text = override.get_key_element(), override.get_value_string()
    start, stop, step = (Decimal(number or 0) for number in (value.start, value.stop, value.step))
    if not (start.is_finite() and stop.is_finite() and step.is_finite() and step):
        fix = "write range(first,end,step) with a step other than 0"
        raise ConfigError.for_key(key, value_text, "is an infinite range", fix)
    return max(0, ceil((stop - start) / step))


def bounded_count(override: Override) -> int:
    """Like :func:`count`, but raises ``ConfigError`` for more values than a sweep may have jobs."""
    number = count(override)
    if issues := list(
        job_count_issues(override.get_key_element(), override.get_value_string(), number)
    ):
        raise ConfigError(issues)
    return number


def _sweep_override(override: Override, issues: list[ConfigIssue]) -> list[str]:
    """List an override once per value."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key, value_text = override.get_key_element(), override.get_value_string()
    if not override.is_discrete_sweep():
        reason, fix = "is not a list of values", "write a,b,c or range(first,end,step)"
        issues.append(ConfigIssue(key, value_text, reason, fix))
        return []
    overrides = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not overrides:
        issues.append(ConfigIssue(key, value_text, "has no values", "write a,b,c"))
    return overrides


def _unequal_zip_issues(values: Mapping[str, Sequence[str]]) -> list[ConfigIssue]:
    """Config issue of zipped axes with different lengths."""
    counts = {key: len(key_values) for key, key_values in values.items()}
    if len(set(counts.values())) == 1:
        return []
    lengths = ", ".join(f"{key} {count}" for key, count in counts.items())
    reason = f"zipped axes have different lengths: {lengths}"
    fix = "give each key the same number of values"
    return [ConfigIssue("hydra.sweeper.zip", list(counts), reason, fix)]


def read_axes(overrides: Sequence[str], loader: ConfigLoader) -> tuple[list[Axis], list[str]]:
    """Split overrides into axes and fixed overrides; the last override of a key wins."""
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    last = {override.get_key_element(): override for override in parsed}
    space = [_axis(key, o) for key, o in last.items() if o.is_sweep_override()]
    fixed = [
        f"{key}={o.get_value_element_as_str()}" if not o.is_delete() else str(o.input_line)
        for key, o in last.items()
        if not o.is_sweep_override()
    ]
    return space, fixed


def _axis(key: str, override: Override) -> Axis:
    value = override.value()
    if isinstance(value, IntervalSweep):
        low, high = cast(float, value.start), cast(float, value.end)
        return IntervalAxis(key, low, high, log="log" in value.tags)
    number = count(override)
    if isinstance(value, RangeSweep) and not value.shuffle and number > 1:
        first, step = cast(float, value.start), value.step
        last = type(first + step)(Decimal(first) + (number - 1) * Decimal(step))
        return IntervalAxis(key, min(first, last), max(first, last), step=abs(step))
    bounded_count(override)
    return ChoiceAxis(key, tuple(override.sweep_string_iterator()))


MAX_SWEEP_LENGTH = 100
"""Number of values of a sweep that are checked here; later every job is validated."""


def override_key(override: Override) -> str:
    """Key or config group of an override, without a package."""
    return str(override.key_or_group)


def override_text(override: Override) -> str:
    """Override as it was typed."""
    return str(override.input_line)


def display_value(override: Override) -> object:
    """Value of an override in override syntax; None if it deletes the key."""
    if override.is_delete():
        return None
    try:
        return override.get_value_string()
    except Exception:  # Hydra cannot format some values
        return override_text(override).partition("=")[2]


def override_values(override: Override) -> list[Any]:
    """Value of an override, or the first values of a sweep."""
    if not override.is_sweep_override():
        return [_plain_value(override.value())]
    try:
        bounded_count(override)  # a shuffled range is materialized
        return [
            _plain_value(value) for value in islice(override.sweep_iterator(), MAX_SWEEP_LENGTH)
        ]
    except Exception:  # a glob, an interval or an empty range: Hydra checks it
        return []


def _plain_value(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain_value(entry) for entry in value]
    if isinstance(value, dict):
        return {_plain_value(key): _plain_value(entry) for key, entry in value.items()}
    return value
