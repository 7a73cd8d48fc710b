"""Output of the grades of a sweep of cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from scalewise.console import print_lines
from scalewise.expectations import CaseOutcome, Expectation
from scalewise.plain_console import get_console, styled_text
from scalewise.planner.plan import Plan
from scalewise.reports import grading, records
from scalewise.reports.grading import GradedCase
from scalewise.reports.records import SweepRecord
from scalewise.sweep_question import UNKNOWN


def grade_sweep_folder(folder: Path) -> dict[str, bool]:
    """Print the grades of a sweep of cases; return whether each case is as expected, by name."""
    record = records.read_record(folder)
    cases = grading.grade_sweep(record) if isinstance(record, SweepRecord) else []
    print_grades(cases, record.answer if isinstance(record, SweepRecord) else "")
    return {case.name: case.passed for case in cases}


def grade_plans(
    expectations: Mapping[str, Expectation], outcomes: Mapping[str, CaseOutcome], answer: str
) -> dict[str, bool]:
    """Print the grades of plans; return whether each case is as expected, by name."""
    cases = grading.grade_plans(expectations, outcomes)
    print_grades(cases, answer, planned=True)
    return {case.name: case.passed for case in cases}


def plan_outcome(plan: Plan) -> CaseOutcome:
    """Outcome that a plan predicts; it has no loss."""
    step_s = plan.step_time.seconds if plan.step_time else None
    return CaseOutcome(plan.fit.status.value, float(plan.fit.peak), step_s)


def print_grades(cases: Sequence[GradedCase], answer: str, *, planned: bool = False) -> None:
    """Print a table with one graded case per line, how many are as expected, and the answer."""
    numbers = grading.grade_table(cases, planned=planned)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(numbers.corner)
    for head in numbers.heads:
        is_number = head in ("peak memory", "step time", "change")
        table.add_column(head, justify="right" if is_number else "left", overflow="fold")
    for case, (name, cells) in zip(cases, numbers.rows, strict=True):
        result = styled_text((cells[-1], "green" if case.passed else "red"))
        table.add_row(name, *cells[:-1], result)
    get_console().print(table)
    print_lines("", grading.summary_line(cases).capitalize())
    if answer and any(case.outcome is not None for case in cases):
        text = grading.answer_text(answer, cases, predicted=planned)
        if not planned:
            print_lines(f"Answer: {text}", grading.hypothesis_line(cases))
        elif UNKNOWN not in text:  # a plan predicts no loss
            print_lines(f"Predicted answer: {text}")
