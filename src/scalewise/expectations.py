"""Expectations of the cases of a sweep, and their comparison with what was planned or measured.

A case of ``hydra/sweeper=cases`` has a name, its overrides and its expectations.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from scalewise.errors import EXIT_CODES, ConfigIssue, did_you_mean, format_value
from scalewise.units import GIB, format_bytes, format_seconds

STATUSES = tuple(EXIT_CODES)
PLAN_STATUSES = ("fits", "out_of_memory", "host_out_of_memory")


def format_loss(loss: float) -> str:
    """Return a loss with four decimals."""
    return f"{loss:.4f}"


_COMPARED: Mapping[str, tuple[str, str, Callable[[float], str]]] = {
    "less_memory_than": ("peak memory", "peak_bytes", format_bytes),
    "memory_ratio": ("peak memory", "peak_bytes", format_bytes),
    "faster_than": ("step time", "step_s", format_seconds),
    "time_ratio": ("step time", "step_s", format_seconds),
    "lower_loss_than": ("loss", "loss", format_loss),
    "loss_within": ("loss", "loss", format_loss),
}
"""Noun, attribute of ``CaseOutcome`` and formatter of each compared value, by key."""


@dataclass(frozen=True)
class Expectation:
    """Expected outcome of a case; a plan is checked in everything but its loss."""

    status: str = "ok"
    """Status of the run: ok, out_of_memory, failed, timeout."""
    predicted: str = ""
    """Fit status of the plan: fits, out_of_memory, host_out_of_memory; empty: that of ``status``.
    A plan that is ``borderline`` counts as ``fits``."""
    peak_memory_gib: tuple[float, float] | None = None
    """Lowest and highest peak memory of a rank, in GiB; null: any."""
    less_memory_than: str = ""
    """Case whose peak memory must be higher; empty: none."""
    faster_than: str = ""
    """Case whose step time must be higher; empty: none."""
    loss_within: Mapping[str, float] = field(default_factory=dict)
    """Largest relative difference of the loss from that of a case, by case."""
    lower_loss_than: str = ""
    """Case whose loss must be higher; empty: none."""
    memory_ratio: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest peak memory relative to that of a case, by case."""
    time_ratio: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest step time relative to that of a case, by case."""

    @property
    def plan_status(self) -> str:
        """Expected fit status of the plan."""
        return self.predicted or ("fits" if self.status == "ok" else self.status)

    @property
    def compared_cases(self) -> Iterator[tuple[str, str]]:
        """Key and name of each case with which this one is compared."""
        for key in ("less_memory_than", "faster_than", "lower_loss_than"):
            if case := getattr(self, key):
                yield key, case
        for key in ("loss_within", "memory_ratio", "time_ratio"):
            yield from ((key, case) for case in getattr(self, key))

    @property
    def text(self) -> str:
        """The expectation in one line."""
        parts = [self.status]
        if self.predicted:
            parts.append(f"plan {self.predicted}")
        if self.peak_memory_gib is not None:
            low, high = self.peak_memory_gib
            parts.append(f"{low:g} to {high:g} GiB")
        parts += [f"less memory than {self.less_memory_than}"] * bool(self.less_memory_than)
        parts += [f"faster than {self.faster_than}"] * bool(self.faster_than)
        parts += [
            f"loss of {case} \u00b1{100 * share:g}%" for case, share in self.loss_within.items()
        ]
        parts += [f"lower loss than {self.lower_loss_than}"] * bool(self.lower_loss_than)
        for noun, ratios in (("memory", self.memory_ratio), ("step time", self.time_ratio)):
            parts += [
                f"{low:g} to {high:g} x {noun} of {case}" for case, (low, high) in ratios.items()
            ]
        return ", ".join(parts)

    def as_dict(self) -> dict[str, object]:
        """Values that differ from the defaults, for ``sweep.json``."""
        default = Expectation()
        return {key: value for key, value in asdict(self).items() if value != getattr(default, key)}


@dataclass(frozen=True)
class SweepCase:
    """Case of a sweep."""

    name: str
    """Name, which is also the name of its run."""
    overrides: tuple[str, ...] = ()
    """Overrides of the case."""
    expect: Expectation = field(default_factory=Expectation)
    """Expected outcome."""


@dataclass(frozen=True)
class CaseOutcome:
    """What a plan predicts for a case, or what its run measured."""

    status: str
    """Status of the run, or fit status of the plan."""
    peak_bytes: float | None = None
    """Peak memory of the rank that needs most, in bytes."""
    step_s: float | None = None
    """Step time in seconds."""
    loss: float | None = None
    """Last validation loss; the last training loss of a run that does not validate."""
    parameters: float | None = None
    """Parameters of the model."""


def unmet_expectations(
    name: str, expectation: Expectation, outcomes: Mapping[str, CaseOutcome], *, planned: bool
) -> list[str]:
    """Reasons why case ``name`` does not meet its expectations; empty if it does.

    Args:
        name: Name of the case.
        expectation: Its expectations.
        outcomes: Outcomes by case; comparisons with cases that are not listed are left out.
        planned: Whether the outcomes are plans, which have no loss, and not always a step time.
    """
    outcome = outcomes.get(name)
    if outcome is None:
        return ["not run"]
    expected = expectation.plan_status if planned else expectation.status
    if outcome.status != expected:
        return [f"{outcome.status}, expected {expected}"]
    reasons = []
    if (limits := expectation.peak_memory_gib) is not None:
        peak = outcome.peak_bytes
        if peak is None or not limits[0] * GIB <= peak <= limits[1] * GIB:
            reasons.append(f"peak memory {_text(peak, format_bytes)} is not in {_list(limits)} GiB")
    for key, case in expectation.compared_cases:
        noun, attribute, unit = _COMPARED[key]
        other = outcomes.get(case)
        if other is None or (attribute == "loss" and planned):
            continue
        own, base = getattr(outcome, attribute), getattr(other, attribute)
        if planned and (own is None or base is None):  # the hardware profile lacks a rate
            continue
        own_text, base_text = _text(own, unit), f"{_text(base, unit)} of {case}"
        if key == "loss_within":
            share = expectation.loss_within[case]
            if own is None or base is None or not abs(own - base) <= share * abs(base):
                reasons.append(f"loss {own_text} is not within {100 * share:g}% of {base_text}")
        elif key in ("memory_ratio", "time_ratio"):
            low, high = getattr(expectation, key)[case]
            if own is None or base is None or not low * base <= own <= high * base:
                reasons.append(f"{noun} {own_text} is not {low:g} to {high:g} x {base_text}")
        elif own is None or base is None or not own < base:
            reasons.append(f"{noun} {own_text} is not below {base_text}")
    return reasons


def parse_cases(cases: object, only: object = None) -> tuple[list[SweepCase], list[ConfigIssue]]:
    """Cases of ``hydra.sweeper.cases``, and its config issues.

    ``only``: name or names of the cases to run; null: all.
    """
    key = "hydra.sweeper.cases"
    if not isinstance(cases, Mapping) or not cases:
        fix = f"set '+{key}={{NAME: {{overrides: KEY=VALUE, expect: {{status: ok}}}}}}'"
        return [], [ConfigIssue(key, cases, "must be a mapping of names to cases", fix)]
    issues: list[ConfigIssue] = []
    parsed = [_parse_case(f"{key}.{name}", str(name), case, issues) for name, case in cases.items()]
    names = [case.name for case in parsed]
    for case in parsed:
        issues += [
            ConfigIssue(f"{key}.{case.name}.expect.{field_name}", other, "is not another case")
            for field_name, other in case.expect.compared_cases
            if other not in names or other == case.name
        ]
    selected = names if only is None else [only] if isinstance(only, str) else only
    if not isinstance(selected, Sequence):
        return [], [*issues, ConfigIssue("hydra.sweeper.only", only, "is not a list of cases")]
    for name in selected:
        if name not in names:
            fix = did_you_mean(str(name), names)
            issues.append(ConfigIssue("hydra.sweeper.only", name, "is not a case", fix))
    return [case for case in parsed if case.name in selected], issues


def _parse_case(key: str, name: str, case: object, issues: list[ConfigIssue]) -> SweepCase:
    entries = case if isinstance(case, Mapping) else {}
    if not isinstance(case, Mapping):
        issues.append(ConfigIssue(key, case, "must be a mapping with overrides and expect"))
    issues += [
        ConfigIssue(f"{key}.{entry}", entries[entry], "no such key", "use overrides and expect")
        for entry in entries
        if entry not in ("overrides", "expect")
    ]
    text = entries.get("overrides", "")
    overrides: list[str] = []
    try:
        overrides = shlex.split(text)
    except (ValueError, AttributeError):  # an unclosed quote, or not a string
        reason, fix = "is not a line of overrides", "write them as on the command line: 'A=1 B=2'"
        issues.append(ConfigIssue(f"{key}.overrides", text, reason, fix))
    expectation = parse_expectation(f"{key}.expect", entries.get("expect") or {}, issues)
    return SweepCase(name, tuple(overrides), expectation)


def parse_expectation(key: str, values: object, issues: list[ConfigIssue]) -> Expectation:
    """Expectation of plain values; adds the issues of its keys to ``issues``."""
    names = [entry.name for entry in fields(Expectation)]
    if not isinstance(values, Mapping):
        issues.append(ConfigIssue(key, values, f"must be a mapping with {', '.join(names)}"))
        return Expectation()
    checked: dict[str, Any] = {}
    for name, value in values.items():
        entry = f"{key}.{name}"
        if name not in names:
            issues.append(ConfigIssue(entry, value, "no such key", did_you_mean(str(name), names)))
        elif (reason := _value_issue(str(name), value)) is not None:
            issues.append(ConfigIssue(entry, format_value(value), reason))
        else:
            checked[str(name)] = _checked_value(str(name), value)
    return Expectation(**checked)


def _checked_value(name: str, value: Any) -> object:
    if name == "peak_memory_gib":
        return tuple(value)
    if name in ("memory_ratio", "time_ratio"):
        return {case: tuple(limits) for case, limits in value.items()}
    return value


def _value_issue(name: str, value: object) -> str | None:
    """Reason for which a value of an expectation is rejected; None if it is valid."""
    allowed = {"status": STATUSES, "predicted": PLAN_STATUSES}.get(name)
    if allowed is not None:
        return None if value in allowed else f"must be one of {', '.join(allowed)}"
    if name == "peak_memory_gib":
        return None if _is_range(value) else "must be [LOWEST, HIGHEST]"
    if name in ("memory_ratio", "time_ratio"):
        is_valid = isinstance(value, Mapping) and all(map(_is_range, value.values()))
        return None if is_valid else "must map cases to ranges: {CASE: [0.4, 0.6]}"
    if name == "loss_within":
        shares = value.values() if isinstance(value, Mapping) else (None,)
        is_valid = all(isinstance(share, int | float) and share > 0 for share in shares)
        return None if is_valid else "must map cases to relative differences: {CASE: 0.02}"
    return None if isinstance(value, str) else "must be the name of a case"


def _is_range(value: object) -> bool:
    numbers = value if isinstance(value, list | tuple) else ()
    is_pair = len(numbers) == 2 and all(isinstance(it, int | float) for it in numbers)
    return is_pair and numbers[0] <= numbers[1]


def _text(value: float | None, template: Any) -> str:
    return "unknown" if value is None else str(template(value))


def _list(limits: tuple[float, float]) -> str:
    return f"[{limits[0]:g}, {limits[1]:g}]"
