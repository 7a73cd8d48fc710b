"""A reader who leaves, or a terminal that lacks a character, costs lines and no training."""

from __future__ import annotations

import shlex
import sys

import pytest
from fixtures.cli_runner import TINY, UNTRACKED, CliRunner


@pytest.mark.parametrize(
    ("line", "env"),
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
    line: tuple[str, ...], env: dict[str, str], run_cli: CliRunner
) -> None:
    command = shlex.join([sys.executable, "-m", "scalewise", "train", *line])
    shell = f"{{ {command}; echo code $? >&2; }} | head -1"
    ended = run_cli.start_process(["sh", "-c", shell], env).wait()
    assert ended.err.splitlines()[-1] == "code 0", ended.failure_report
    assert "Traceback" not in ended.transcript
    folder = ended.folder
    for job in folder.jobs if line[0] == "-m" else [folder]:
        assert job.status["status"] == "ok"
        assert job.checkpoints[-1] == 8
        assert (job.path / "report.html").is_file()
