"""Grades of sweeps of cases, and their section in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures.report_pages import text_of, words
from fixtures.run_folders import make_sweep, out_of_memory, plan_record, strategy_job

from scalewise.expectations import CaseOutcome, Expectation
from scalewise.reports import grading, records
from scalewise.reports.html_report import write_page
from scalewise.reports.records import SweepRecord

CASES = ("large", "small", "absent")
FIELDS: dict[str, dict[str, Any]] = {
    "large": {"expect": {"status": "out_of_memory"}, "plan": "out_of_memory"},
    "small": {"expect": {"peak_memory_gib": [0.0, 1e-6]}, "plan": "fits"},
    "absent": {"expect": {}, "plan": ""},
}


def _job(number: int, values: dict[str, Any]) -> dict[str, Any] | None:
    if values["name"] == "absent":
        return None
    if values["name"] == "large":
        return out_of_memory(plan=plan_record(4.6, 1.4, 4.25))
    return strategy_job(number, {"parallelism": "single", "precision": "fp32"})


@pytest.fixture
def sweep_folder(tmp_path: Path) -> Path:
    return make_sweep(
        tmp_path / "sweep",
        {"name": list(CASES)},
        _job,
        cases=FIELDS,
        hypothesis="The large run does not fit.",
        answer="The large run is {large.status} at {large.memory}, the absent one {absent.status}.",
    )


def test_cases_are_graded_by_name(sweep_folder: Path) -> None:
    sweep = records.read_record(sweep_folder)
    assert isinstance(sweep, SweepRecord)
    large, small, absent = grading.grade_sweep(sweep)
    assert (large.name, large.passed, large.predicted_status) == ("large", True, "out_of_memory")
    assert not small.passed
    assert small.outcome is not None
    assert small.outcome.parameters == 162_000_000
    assert "is not in [0, 1e-06] GiB" in small.unmet[0]
    assert (absent.unmet, absent.outcome) == (("not run",), None)
    assert grading.summary_line([large, small, absent]) == "1 of 3 cases as expected"


def test_changes_skip_cases_without_numbers() -> None:
    outcomes = {
        "a": CaseOutcome("fits", 100.0, 1.0),
        "b": CaseOutcome("out_of_memory"),
        "c": CaseOutcome("borderline", 50.0, 2.0),
    }
    expectations = {name: Expectation() for name in outcomes}
    cases = grading.grade_plans(expectations, outcomes)
    assert [case.passed for case in cases] == [True, False, True]
    table = grading.grade_table(cases, planned=True)
    changes = [(cells[3], cells[5]) for _, cells in table.rows]
    assert changes == [("", ""), ("", ""), ("\u221250.0%", "+100.0%")]


def test_report_begins_with_the_grades(sweep_folder: Path) -> None:
    source = text_of(write_page(sweep_folder))
    assert source.index('<section id="expectations">') < source.index('<section id="overview">')
    assert "Expectations. 1 of 3 cases as expected" in words(source)
    assert "fail: not run" in words(source)


def test_report_ends_with_the_answer(sweep_folder: Path) -> None:
    source = text_of(write_page(sweep_folder))
    assert source.index('<section id="failed">') < source.index('<section id="answer">')
    assert source.index('<section id="answer">') < source.index('<section id="reproduce">')
    text = words(source)
    assert "Hypothesis: The large run does not fit." in text
    assert "Answer. The large run is out_of_memory at unknown, the absent one unknown." in text
    assert "The hypothesis did not hold: 1 of 3 cases as expected; small: peak memory" in text


def test_predicted_answer_has_the_planned_values(sweep_folder: Path) -> None:
    sweep = records.read_record(sweep_folder)
    assert isinstance(sweep, SweepRecord)
    cases = grading.grade_sweep(sweep)
    text = grading.answer_text(sweep.answer, cases, predicted=True)
    assert text == "The large run is out_of_memory at 4.60 GiB, the absent one unknown."
