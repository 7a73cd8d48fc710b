"""Question, hypothesis and answer of a sweep of cases."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scalewise.errors import ConfigIssue, did_you_mean
from scalewise.expectations import CaseOutcome, format_loss
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
        match = _VALUE.fullmatch(found["text"])
        if match is None or (match["base"] and match["name"] == "status"):
            fix = "write {CASE.memory}, {CASE.time}, {CASE.loss}, {CASE.status} or a ratio, "
            fix += "{CASE.memory / OTHER}"
            yield ConfigIssue(key, found[0], "is not a value of a case", fix)
            continue
        for case in (match["case"], match["base"]):
            if case and case not in cases:
                yield ConfigIssue(key, found[0], f"{case} is no case", did_you_mean(case, cases))


def format_answer(answer: str, outcomes: Mapping[str, CaseOutcome]) -> str:
    """Return the answer with the values of the outcomes; ``unknown`` where one is missing.

    Args:
        answer: Template. ``{CASE.memory}``, ``{CASE.time}``, ``{CASE.loss}`` and ``{CASE.status}``
            are values of a case; ``{CASE.memory / OTHER}`` is relative to another case, in percent.
        outcomes: Outcomes by case.
    """

    def replacement(found: re.Match[str]) -> str:
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
