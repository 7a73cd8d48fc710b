"""Closed pipes and missing characters lose output lines but no training step."""

from __future__ import annotations

import shlex
import sys

import pytest
from fixtures.cli_runner import TINY, UNTRACKED, CliRunner


@pytest.mark.parametrize(
    ("overrides", "env"),
    [
        pytest.param(
            (*TINY, "trainer.log_every=1"),
            {"PYTHONIOENCODING": "ascii", "WANDB_MODE": "offline"},
            id="one job, W&B, ascii",
        ),
        pytest.param(
            ("-m", *UNTRACKED, "trainer.log_every=1", "seed=1,2"),
            {},
            marks=pytest.mark.exhaustive,
            id="a sweep",
        ),
    ],
)
def test_training_continues_after_a_closed_pipe(
    overrides: tuple[str, ...], env: dict[str, str], run_cli: CliRunner
) -> None:
    command = shlex.join([sys.executable, "-m", "scalewise", "train", *overrides])
    shell = f"{{ {command}; echo code $? >&2; }} | head -1"
    result = run_cli.start_process(["sh", "-c", shell], env).wait()
    assert result.err.splitlines()[-1] == "code 0", result.failure_report
    assert "Traceback" not in result.transcript
    folder = result.folder
    for job in folder.jobs if overrides[0] == "-m" else [folder]:
        assert job.status["status"] == "ok", job
        assert job.checkpoints[-1] == 8, job
        assert (job.path / "report.html").is_file(), job
