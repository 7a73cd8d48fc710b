"""Templates of the answer of a sweep of cases."""

from __future__ import annotations

import pytest

from scalewise.config.labs import find_labs
from scalewise.expectations import CaseOutcome
from scalewise.sweep_question import answer_issues, format_answer
from scalewise.units import GIB

OUTCOMES = {
    "base": CaseOutcome("ok", 2.0 * GIB, 1.0, 4.0),
    "small": CaseOutcome("ok", 1.5 * GIB, 0.25, 4.02),
    "large": CaseOutcome("out_of_memory"),
    "n1": CaseOutcome("ok", loss=4.0, parameters=1e6),
    "n10": CaseOutcome("ok", loss=4.0 * 10**-0.5, parameters=1e7),
    "n100": CaseOutcome("ok", loss=0.4, parameters=1e8),
    "twin": CaseOutcome("ok", loss=4.1, parameters=1e6),
    "other_twin": CaseOutcome("ok", loss=4.2, parameters=1e6),
}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("", ""),
        ("It fits.", "It fits."),
        ("{small.memory} of {base.memory}", "1.50 GiB of 2.00 GiB"),
        ("{small.memory / base}, {small.time / base}", "75%, 25%"),
        ("{small.time}, {small.loss}, {large.status}", "250 ms, 4.0200, out_of_memory"),
        ("{large.memory}, {absent.loss}", "unknown, unknown"),
        ("{base.time / large}, {large.time / base}", "unknown, unknown"),
        ("{exponent: n1, n10, n100}", "-0.500 (95% interval -0.500 to -0.500)"),
        ("{exponent: n1, n10, large}, {exponent: n1, n10, absent}", "unknown, unknown"),
        ("{exponent: n1, twin, other_twin}", "unknown"),
        (
            "{loss gap: small / base, twin / n1}",
            "+1.500% (95% interval -11.206% to +14.206%)",
        ),
        ("{loss gap: small / base, large / base}", "unknown"),
        ("{loss gap: small / base, twin / absent}", "unknown"),
    ],
)
def test_answer_has_values_of_the_outcomes(answer: str, text: str) -> None:
    assert [*answer_issues(answer, [*OUTCOMES, "absent"])] == []
    assert format_answer(answer, OUTCOMES) == text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (["a"], "is not a text"),
        ("{small}", "is not a value of a case"),
        ("{small.size}", "is not a value of a case"),
        ("{small.status / base}", "is not a value of a case"),
        ("{small.memory.__class__}", "is not a value of a case"),
        ("{smal.memory}", "smal is no case"),
        ("{small.memory / bas}", "bas is no case"),
        ("{exponent: n1, n10, n10000}", "n10000 is no case"),
        ("{exponent: n1, n10}", "at least 3 cases"),
        ("{exponent: n1; n10}", "is not a value of a case"),
        ("{loss gap: small / bas, twin / n1}", "bas is no case"),
        ("{loss gap: small / base}", "at least 2 cases"),
        ("{loss gap: small / base, small / n1}", "at least 2 cases"),
        ("{loss gap: small, base}", "is not a value of a case"),
    ],
)
def test_invalid_answer_is_rejected(answer: object, words: str) -> None:
    (issue,) = answer_issues(answer, OUTCOMES)
    assert issue.key == "hydra.sweeper.answer"
    assert words in issue.reason


def test_every_lab_has_an_answer() -> None:
    assert [name for name, lab in find_labs().items() if not lab.answer] == []
