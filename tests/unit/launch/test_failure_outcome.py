"""Outcome of a job whose ranks ended in different ways."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from scalewise.launch import elastic, exit_reports
from scalewise.launch.outcomes import Outcome

OOM_REPORT = Outcome("out_of_memory", "CUDA out of memory", 1, ("a line",))
PEER_REPORT = Outcome("failed", "lost the connection to another rank", 1, peer_failure=True)


@pytest.mark.parametrize(
    ("signal_number", "report", "status", "reason"),
    [
        (signal.SIGABRT, OOM_REPORT, "out_of_memory", "CUDA out of memory"),
        (signal.SIGABRT, PEER_REPORT, "failed", "rank 0 was killed by SIGABRT"),
        (signal.SIGABRT, None, "failed", "rank 0 was killed by SIGABRT"),
        (signal.SIGKILL, OOM_REPORT, "failed", "rank 0 was killed by SIGKILL"),
    ],
    ids=["NCCL aborts a waiting rank", "peer failure", "no report", "killed first"],
)
def test_first_cause_is_the_outcome(
    signal_number: int, report: Outcome | None, status: str, reason: str, tmp_path: Path
) -> None:
    exit_reports.prepare_reports(tmp_path)
    if report:
        exit_reports.write_report(tmp_path, 1, report)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=-signal_number, error_file="")
    error = ChildFailedError("entry", {0: failure})
    outcome = elastic._failure_outcome(error, tmp_path, memory_kill=False)
    assert (outcome.status, outcome.reason) == (status, reason)


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (Outcome("interrupted", "SIGINT after step 3", signal_number=2), "SIGINT after step 3"),
        (Outcome("ok"), "SIGINT after the last step"),
        (None, "SIGINT before a checkpoint could be saved"),
    ],
)
def test_interrupted_job_has_the_reason_of_its_ranks(
    report: Outcome | None, reason: str, tmp_path: Path
) -> None:
    exit_reports.prepare_reports(tmp_path)
    if report:
        exit_reports.write_report(tmp_path, 0, report)
    outcome = elastic._signal_outcome(signal.SIGINT, tmp_path)
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("interrupted", reason, 130)
