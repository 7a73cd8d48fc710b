"""What a report says of preferences: beside chance, where a model begins."""

import pytest

from scalewise.reports import preferences
from scalewise.reports.compare import PREFERRED, ReportJob
from scalewise.reports.records import MetricSeries, RunRecord


def job(name: str, *values: float) -> ReportJob:
    steps = tuple(range(10, 10 + len(values)))
    return ReportJob(RunRecord(name, series={PREFERRED: MetricSeries(steps, values)}), name)


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ([job("a", 0.6, 0.975)], "in 98%, more than untrained"),
        ([job("a", 0.6), job("b", 0.9)], "in 60\u201390%, more than untrained"),
        ([job("a", 0.4), job("b", 0.9)], "in 40\u201390%, not always more than untrained"),
        ([job("a", 0.5)], "in 50%, not more than untrained"),
    ],
)
def test_the_finding_is_beside_the_untrained_model(jobs: list[ReportJob], said: str) -> None:
    section = preferences.preference_section(jobs)
    assert section is not None
    assert section.finding == f"Held-out pairs are preferred rightly {said}"
    assert [panel.title for panel in section.panels] == ["Preference accuracy"]


def test_nothing_is_said_where_nothing_was_compared() -> None:
    assert preferences.preference_section([job("a")]) is None
