"""Grades of a sweep of cases: expected, predicted and measured outcome of each case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scalewise.expectations import CaseOutcome, Expectation, unmet_expectations
from scalewise.reports import number_format
from scalewise.reports.compare import LOSS, PEAK, STEP, measured_value
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.reports.sections import NumbersTable, ReportSection
from scalewise.units import format_bytes, format_seconds


@dataclass(frozen=True)
class GradedCase:
    """Case of a sweep with its outcome."""

    name: str
    """Name of the case."""
    expectation: Expectation
    """Expected outcome."""
    predicted_status: str
    """Fit status of the plan; empty if unknown."""
    outcome: CaseOutcome | None
    """Measured outcome, or the plan's if nothing ran; None: not run."""
    unmet: tuple[str, ...]
    """Reasons why the case does not meet its expectations; empty if it does."""

    @property
    def passed(self) -> bool:
        """Whether the case meets its expectations."""
        return not self.unmet


def grade_runs(
    expectations: Mapping[str, Expectation],
    runs: Mapping[str, RunRecord],
    fit_statuses: Mapping[str, str],
) -> list[GradedCase]:
    """Grade the runs of cases; each mapping is by the name of the case."""
    outcomes = {
        name: CaseOutcome(
            run.status,
            measured_value(run, PEAK),
            measured_value(run, STEP),
            measured_value(run, LOSS),
        )
        for name, run in runs.items()
        if run.status != "not_run"
    }
    return [
        GradedCase(
            name,
            expectation,
            fit_statuses.get(name, ""),
            outcomes.get(name),
            tuple(unmet_expectations(name, expectation, outcomes, planned=False)),
        )
        for name, expectation in expectations.items()
    ]


def grade_plans(
    expectations: Mapping[str, Expectation], outcomes: Mapping[str, CaseOutcome]
) -> list[GradedCase]:
    """Grade the plans of cases, by the name of the case; ``borderline`` counts as ``fits``."""
    statuses = {name: outcome.status for name, outcome in outcomes.items()}
    graded = {
        name: CaseOutcome("fits", outcome.peak_bytes, outcome.step_s)
        if outcome.status == "borderline"
        else outcome
        for name, outcome in outcomes.items()
    }
    return [
        GradedCase(
            name,
            expectation,
            statuses.get(name, ""),
            outcomes.get(name),
            tuple(unmet_expectations(name, expectation, graded, planned=True)),
        )
        for name, expectation in expectations.items()
    ]


def grade_sweep(sweep: SweepRecord) -> list[GradedCase]:
    """Grade the jobs of a sweep that ran cases; empty for other sweeps."""
    return grade_runs(sweep.expectations, runs_by_case(sweep), sweep.fit_statuses)


def runs_by_case(sweep: SweepRecord) -> dict[str, RunRecord]:
    """Jobs of a sweep of cases, by the name of the case."""
    return {str(run.varied_settings.get("name", run.name)): run for run in sweep.jobs}


def grade_table(cases: Sequence[GradedCase], *, planned: bool = False) -> NumbersTable:
    """Table of graded cases; changes are relative to the case above that has a number."""
    heads = ["expected", "predicted", *([] if planned else ["happened"])]
    heads += ["peak memory", "change", "step time", "change", "result"]
    cells: list[tuple[str, tuple[str, ...]]] = []
    peak: float | None = None
    step: float | None = None
    for case in cases:
        outcome = case.outcome or CaseOutcome("not run")
        texts = [case.expectation.text, case.predicted_status or number_format.MISSING]
        texts += [] if planned else [outcome.status]
        texts += [
            *_number_and_change(outcome.peak_bytes, peak, format_bytes),
            *_number_and_change(outcome.step_s, step, format_seconds),
            "pass" if case.passed else f"fail: {'; '.join(case.unmet)}",
        ]
        peak, step = outcome.peak_bytes or peak, outcome.step_s or step
        cells.append((case.name, tuple(texts)))
    return NumbersTable("case", tuple(heads), tuple(cells))


def summary_line(cases: Sequence[GradedCase]) -> str:
    """Number of cases that meet their expectations, in a sentence without its period."""
    passed = sum(case.passed for case in cases)
    return f"{passed} of {len(cases)} case{'s' * (len(cases) != 1)} as expected"


def expectations_section(sweep: SweepRecord) -> ReportSection | None:
    """Section with the grade of each case; None if the sweep has no cases."""
    cases = grade_sweep(sweep)
    if not cases:
        return None
    return ReportSection(
        "expectations",
        "Expectations",
        summary_line(cases),
        (),
        numbers=grade_table(cases),
        explanation=("Change: relative to the case above that has a number.",),
    )


def _number_and_change(
    number: float | None, base: float | None, template: Callable[[float], str]
) -> list[str]:
    if number is None:
        return [number_format.MISSING, ""]
    return [template(number), number_format.format_error(number / base - 1) if base else ""]
