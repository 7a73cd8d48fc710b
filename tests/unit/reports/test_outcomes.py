"""Report sentences about preferences."""

import pytest

from scalewise.reports import validation_outcomes
from scalewise.reports.compare import PREFERENCE_ACCURACY, ReportJob
from scalewise.reports.records import MetricSeries, RunRecord


def job(name: str, *values: float) -> ReportJob:
    steps = tuple(range(10, 10 + len(values)))
    return ReportJob(
        RunRecord(name, series={PREFERENCE_ACCURACY: MetricSeries(steps, values)}), name
    )


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([job("a", 0.6, 0.975)], "98%, above the untrained model"),
        ([job("a", 0.6), job("b", 0.9)], "60\u201390%, above the untrained model"),
        ([job("a", 0.4), job("b", 0.9)], "40\u201390%, partly above the untrained model"),
        ([job("a", 0.5)], "50%, not above the untrained model"),
    ],
)
def test_preference_report_compares_with_the_untrained_model(
    jobs: list[ReportJob], expected: str
) -> None:
    section = validation_outcomes.preference_section(jobs)
    assert section is not None
    assert section.finding == f"Preference accuracy is {expected}"
    assert [panel.title for panel in section.panels] == ["Preference accuracy"]


def test_preference_report_without_preferences_is_empty() -> None:
    assert validation_outcomes.preference_section([job("a")]) is None
