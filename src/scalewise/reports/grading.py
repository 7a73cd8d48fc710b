"""Grades of a sweep of cases: expected, predicted and measured outcome of each case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scalewise import sweep_question
from scalewise.expectations import CaseOutcome, Expectation, unmet_expectations
from scalewise.reports import number_format
from scalewise.reports.compare import (
    LOSS,
    PEAK,
    PREDICTED_PEAK,
    PREDICTED_STEP,
    STEP,
    VALIDATION_LOSS,
    measured_value,
)
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
    prediction: CaseOutcome
    """Predicted outcome; its loss is unknown."""
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
        name: _measured_outcome(run) for name, run in runs.items() if run.status != "not_run"
    }
    return [
        GradedCase(
            name,
            expectation,
            fit_statuses.get(name, ""),
            outcomes.get(name),
            CaseOutcome(
                fit_statuses.get(name, ""),
                runs[name].predicted.get(PREDICTED_PEAK),
                runs[name].predicted.get(PREDICTED_STEP),
            )
            if name in runs
            else CaseOutcome(fit_statuses.get(name, "")),
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
            outcomes.get(name, CaseOutcome("")),
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


def answer_text(answer: str, cases: Sequence[GradedCase], *, predicted: bool = False) -> str:
    """Answer to the question of the cases, with their measured or predicted values.

    ``answer``: template of :func:`scalewise.sweep_question.format_answer`.
    """
    outcomes = {case.name: case.prediction if predicted else case.outcome for case in cases}
    known = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
    return sweep_question.format_answer(answer, known)


def hypothesis_line(cases: Sequence[GradedCase]) -> str:
    """Whether the hypothesis of the cases held, in a sentence without its period."""
    unmet = [f"{case.name}: {'; '.join(case.unmet)}" for case in cases if not case.passed]
    if not unmet:
        return f"The hypothesis held: {summary_line(cases)}"
    return f"The hypothesis did not hold: {summary_line(cases)}; {'; '.join(unmet)}"


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
        bullets=(f"Hypothesis: {sweep.hypothesis}",) * bool(sweep.hypothesis),
    )


def answer_section(sweep: SweepRecord) -> ReportSection | None:
    """Section with the answer of a sweep of cases; None if the sweep has no template of it."""
    cases = grade_sweep(sweep)
    if not cases or not sweep.answer:
        return None
    answer = answer_text(sweep.answer, cases)
    return ReportSection("answer", "Answer", answer, (), bullets=(hypothesis_line(cases),))


def _measured_outcome(run: RunRecord) -> CaseOutcome:
    loss = measured_value(run, VALIDATION_LOSS)
    return CaseOutcome(
        run.status,
        measured_value(run, PEAK),
        measured_value(run, STEP),
        measured_value(run, LOSS) if loss is None else loss,
        run.summary.parameters if run.summary else None,
    )


def _number_and_change(
    number: float | None, base: float | None, template: Callable[[float], str]
) -> list[str]:
    if number is None:
        return [number_format.MISSING, ""]
    return [template(number), number_format.format_error(number / base - 1) if base else ""]
