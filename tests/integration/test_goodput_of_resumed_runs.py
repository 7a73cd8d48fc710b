"""Goodput of runs that are killed and resume: lost time by cause, in report and summary."""

from __future__ import annotations

import pytest
from fixtures.cli_runner import RunDir
from fixtures.job_runner import JobRunner

from scalewise.goodput import compute_goodput, read_attempts
from scalewise.reports import html_report

OVERRIDES = ("checkpoint.every=2", "trainer.log_every=1", "trainer.validate_every=4")
KILL = ("+inject=kill", "callbacks.inject.step=7", "+callbacks.inject.once=true")


def assert_two_attempts(run: RunDir) -> None:
    """Assert the goodput of a run that was killed after step 7 and resumed from step 6."""
    first, second = read_attempts(run.path)
    assert (first[-1].start_step, first[-1].step) == (0, 7)
    assert (second[-1].start_step, second[-1].step) == (6, 8)
    goodput = compute_goodput([first, second])
    assert goodput is not None
    assert 0 < goodput.fraction < 1
    for cause in ("start", "validation", "checkpoint", "repeated"):
        assert goodput.lost_s[cause] > 0, cause
    seventh = first[-1].steps_s - next(line for line in first if line.step == 6).steps_s
    assert goodput.lost_s["repeated"] == pytest.approx(seventh)
    # Step times of the slowest rank differ from the wall time of rank 0.
    wall = second[-1].recorded - first[-1].started
    assert goodput.wall_s == pytest.approx(wall, rel=0.2)
    recorded = run.summary["goodput"]
    assert recorded["attempts"] == 2
    assert recorded["fraction"] == pytest.approx(goodput.fraction)
    assert "in two attempts" in html_report.write_page(run.path).read_text("utf-8")


@pytest.mark.parametrize(
    "kind", [(), pytest.param(("parallelism=fsdp",), marks=pytest.mark.exhaustive)]
)
def test_goodput_of_a_restarted_run(kind: tuple[str, ...], run_job: JobRunner) -> None:
    run = run_job(*OVERRIDES, *KILL, *kind, "launch.max_restarts=1")
    assert run.status["attempts"] == 2
    assert_two_attempts(run)


def test_goodput_of_a_run_that_resumes_in_another_folder(run_job: JobRunner) -> None:
    killed = run_job(*OVERRIDES, *KILL, status="failed")
    resumed = run_job(*OVERRIDES, "resume=last")
    assert resumed.path != killed.path
    assert_two_attempts(resumed)
    (only,) = read_attempts(killed.path)
    assert only[-1].step == 7
