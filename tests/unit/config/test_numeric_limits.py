"""Impossible numbers are rejected under their key; others can be planned."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any

import pytest

from scalewise import registry
from scalewise.config import paths
from scalewise.errors import ConfigError
from scalewise.planner.plan import build_plan
from scalewise.run_config import RunConfig
from scalewise.validation.run_issues import iter_issues

FLOATS = (1e23, -1e23, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300, 0.0, 1e10)
INTEGERS = (2**63 - 1, -(2**63), -1, 0, 10**30, 2**40)
NEGATIVE_OPTIONS = {"optimizer.beta2_decay"}
"""Fields that accept negative numbers."""
REQUIRED_OVERRIDES = {
    "prefix": ("data.sequence=128",),
    "prompt": ("data.sequence=128",),
    "schedule_free": ("schedule=constant",),
    "classification": ("data=corpus_classes",),
    "grpo": ("data=reversal",),
    "fp4": ("adapter=lora",),
    "int8": ("adapter=lora",),
    "nf4": ("adapter=lora",),
}
"""Overrides that options require."""


def values_of(hint: Any) -> tuple[float, ...]:
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return (FLOATS if float in kinds else ()) + (INTEGERS if int in kinds else ())


def runs(group: str, compose: Callable[..., RunConfig]) -> Iterator[RunConfig]:
    """One run for each config class of a group that composes without files."""
    config_types: set[type] = set()
    machine = () if group == "hardware" else ("hardware=h100",)
    for name in paths.option_names(group):
        try:
            run = compose(
                f"{group}={name}", *machine, *REQUIRED_OVERRIDES.get(name, ()), check_machine=False
            )
        except ConfigError:
            continue
        if type(getattr(run, group)) not in config_types:
            config_types.add(type(getattr(run, group)))
            yield run


@pytest.mark.parametrize("group", paths.CLOSED_GROUPS)
def test_numeric_options_are_all_bounded(group: str, compose: Callable[..., RunConfig]) -> None:
    num_options = 0
    for run in runs(group, compose):
        spec = getattr(run, group)
        hints = typing.get_type_hints(type(spec))
        for entry in dataclasses.fields(spec):
            for value in values_of(hints[entry.name]):
                key = f"{group}.{entry.name}"
                changed_spec = dataclasses.replace(spec, **{entry.name: value})
                check(dataclasses.replace(run, **{group: changed_spec}), key, value)
                num_options += 1
    assert num_options or group in GROUPS_WITHOUT_NUMBERS, group


GROUPS_WITHOUT_NUMBERS = {"precision", "compile", "tracking", "plan"}
"""Groups without numeric options."""


def check(run: RunConfig, key: str, value: float) -> None:
    override = f"{key}={value}"
    run = run.resolve()
    issues = list(iter_issues(run))
    if issues:
        assert all(issue.key for issue in issues), override
        return
    assert math.isfinite(value), override
    assert value >= 0 or key in NEGATIVE_OPTIONS, override
    assert abs(value) < 2**63, override
    if run.objective.is_user_defined or run.objective.trace_only:
        return
    rejected = ""
    try:
        build_plan(run)
    except ConfigError as error:
        rejected = str(error)
    assert not rejected or key in rejected, override


@pytest.mark.parametrize(
    "override",
    [
        "launch.timeout=1e23",
        "launch.timeout=1e10",
        "launch.timeout=-1",
        "launch.timeout=.inf",
        "launch.timeout=nan",
        "launch.grace=1e23",
        "launch.memory_limit_gib=1e23",
        "launch.memory_limit_gib=-0.5",
        "launch.max_restarts=-1",
        "hardware.memory_gib=1e23",
        "model.layers=1000000000000",
        "parallelism=mesh parallelism.tensor=1000000000000",
        "callbacks.guard.factor=1e400",
    ],
)
def test_number_beyond_its_limit_is_rejected_under_its_key(
    override: str, compose: Callable[..., RunConfig]
) -> None:
    overrides = override.split()
    with pytest.raises(ConfigError) as excinfo:
        compose("experiment=smoke", *overrides)
    assert overrides[-1].partition("=")[0] in [issue.key for issue in excinfo.value.issues]


def test_numeric_limit_cases_cover_every_config_class() -> None:
    registry.import_options()
    assert set(registry.OPTIONS) >= set(paths.CLOSED_GROUPS)
