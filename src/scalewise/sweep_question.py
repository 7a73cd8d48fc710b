"""Question, hypothesis and answer of a sweep of cases."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalewise.confidence_interval import MIN_VALUES, mean_interval
from scalewise.errors import ConfigIssue, did_you_mean
from scalewise.expectations import CaseOutcome, format_loss
from scalewise.power_law import MIN_POINTS, fit_power_law
from scalewise.units import format_bytes, format_seconds

_VALUES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "memory": ("peak_bytes", format_bytes),
    "time": ("step_s", format_seconds),
    "loss": ("loss", format_loss),
    "status": ("status", str),
}
"""Attribute of ``CaseOutcome`` and formatter, by the name of a value in an answer."""
_FIELD = re.compile(r"\{(?P<text>[^{}]*)\}")
_VALUE = re.compile(r"(?P<case>\w+)\.(?P<name>memory|time|loss|status)( / (?P<base>\w+))?")
_EXPONENT = re.compile(r"exponent: (?P<cases>\w+(, \w+)*)")
_LOSS_GAP = re.compile(r"loss gap: (?P<pairs>\w+ / \w+(, \w+ / \w+)*)")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class SweepQuestion:
    """What a sweep is run for."""

    question: str
    """Question, the title of its report."""
    hypothesis: str = ""
    """Expected answer; empty: none."""
    answer: str = ""
    """Template of the answer, as :func:`format_answer` takes it; empty: none."""


def answer_issues(answer: object, cases: Collection[str]) -> Iterator[ConfigIssue]:
    """Yield the issues of the template of an answer; ``cases``: names of the cases."""
    key = "hydra.sweeper.answer"
    if not isinstance(answer, str):
        yield ConfigIssue(key, answer, "is not a text", "write it in quotes")
        return
    for found in _FIELD.finditer(answer):
        if fit := _EXPONENT.fullmatch(found["text"]):
            yield from _exponent_issues(found[0], fit["cases"].split(", "), cases)
            continue
        if gap := _LOSS_GAP.fullmatch(found["text"]):
            yield from _loss_gap_issues(found[0], _case_pairs(gap), cases)
            continue
        match = _VALUE.fullmatch(found["text"])
        if match is None or (match["base"] and match["name"] == "status"):
            fix = "write {CASE.memory}, {CASE.time}, {CASE.loss}, {CASE.status} or a ratio, "
            fix += "{CASE.memory / OTHER}, {exponent: CASE, CASE, CASE} or "
            fix += "{loss gap: CASE / OTHER, CASE / OTHER}"
            yield ConfigIssue(key, found[0], "is not a value of a case", fix)
            continue
        for case in (match["case"], match["base"]):
            if case and case not in cases:
                yield ConfigIssue(key, found[0], f"{case} is no case", did_you_mean(case, cases))


def _exponent_issues(text: str, fitted: list[str], cases: Collection[str]) -> Iterator[ConfigIssue]:
    key = "hydra.sweeper.answer"
    for case in fitted:
        if case not in cases:
            yield ConfigIssue(key, text, f"{case} is no case", did_you_mean(case, cases))
    if len(set(fitted)) < MIN_POINTS:
        yield ConfigIssue(key, text, f"must name at least {MIN_POINTS} cases")


def _case_pairs(gap: re.Match[str]) -> list[tuple[str, str]]:
    """Names of a case and of its base, for each pair of a loss gap."""
    pairs = (pair.split(" / ") for pair in gap["pairs"].split(", "))
    return [(case, base) for case, base in pairs]


def _loss_gap_issues(
    text: str, pairs: Sequence[tuple[str, str]], cases: Collection[str]
) -> Iterator[ConfigIssue]:
    key = "hydra.sweeper.answer"
    for case in dict.fromkeys(name for pair in pairs for name in pair):
        if case not in cases:
            yield ConfigIssue(key, text, f"{case} is no case", did_you_mean(case, cases))
    if len({case for case, _ in pairs}) < MIN_VALUES:
        yield ConfigIssue(key, text, f"must compare at least {MIN_VALUES} cases, of several seeds")


def format_answer(answer: str, outcomes: Mapping[str, CaseOutcome]) -> str:
    """Return the answer with the values of the outcomes; ``unknown`` where one is missing.

    Args:
        answer: Template. ``{CASE.memory}``, ``{CASE.time}``, ``{CASE.loss}`` and ``{CASE.status}``
            are values of a case; ``{CASE.memory / OTHER}`` is relative to another case, in percent.
            ``{exponent: CASE, CASE, CASE}`` is the exponent of the loss as a power of the number of
            parameters, with its interval. ``{loss gap: CASE / OTHER, CASE / OTHER}`` is the mean
            relative difference of losses, with its interval; each pair has a seed of its own.
        outcomes: Outcomes by case.
    """

    def replacement(found: re.Match[str]) -> str:
        if fit := _EXPONENT.fullmatch(found["text"]):
            return _format_exponent([outcomes.get(case) for case in fit["cases"].split(", ")])
        if gap := _LOSS_GAP.fullmatch(found["text"]):
            return _format_loss_gap(
                [(outcomes.get(case), outcomes.get(base)) for case, base in _case_pairs(gap)]
            )
        match = _VALUE.fullmatch(found["text"])
        if match is None:
            return found[0]
        attribute, unit = _VALUES[match["name"]]
        value = getattr(outcomes.get(match["case"]), attribute, None)
        if value in (None, "") or not match["base"]:
            return UNKNOWN if value in (None, "") else str(unit(value))
        base = getattr(outcomes.get(match["base"]), attribute, None)
        return f"{100 * value / base:.0f}%" if base else UNKNOWN

    return _FIELD.sub(replacement, answer)


def _format_exponent(outcomes: Sequence[CaseOutcome | None]) -> str:
    """Exponent of the loss as a power of the number of parameters; unknown if a case lacks one."""
    points = [(case.parameters, case.loss) for case in outcomes if case is not None]
    parameters = [number for number, _ in points if number]
    losses = [loss for _, loss in points if loss and loss > 0]
    if not len(parameters) == len(losses) == len(outcomes) or len(set(parameters)) < 2:
        return UNKNOWN
    return fit_power_law(parameters, losses).text


def _format_loss_gap(pairs: Sequence[tuple[CaseOutcome | None, CaseOutcome | None]]) -> str:
    """Mean relative difference of the losses of pairs, in percent; unknown if a case lacks one."""
    losses = [(case.loss, base.loss) for case, base in pairs if case and base]
    gaps = [100 * (loss / base - 1) for loss, base in losses if loss is not None and base]
    if len(gaps) < max(len(pairs), MIN_VALUES):
        return UNKNOWN
    gap = mean_interval(gaps)
    return f"{gap.mean:+.3f}% (95% interval {gap.low:+.3f}% to {gap.high:+.3f}%)"
