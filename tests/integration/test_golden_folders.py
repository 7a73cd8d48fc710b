"""Golden test: folders of version 0.1.0 are resumed, reported, evaluated and exported.

``tests/golden/sweep`` is the sweep of ``SWEEP_COMMAND`` without pages and earlier checkpoints.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fixtures.cli_runner import CliRunner, RunDir
from fixtures.golden import GOLDEN_DIR
from fixtures.job_runner import JobRunner

from scalewise import cli

SWEEP_COMMAND = (
    *("-m", "experiment=smoke", "data=synthetic", "adapter=none,lora", "parallelism=single,fsdp"),
    *("trainer.max_steps=4", "trainer.log_every=1", "trainer.validate_every=2", "tracking=none"),
    *("model.vocabulary=64", "model.width=16", "model.heads=2", "model.kv_heads=2"),
    *("model.layers=2", "model.feedforward=32", "model.context=16", "data.sequence=16"),
    *("schedule.warmup_steps=2", "checkpoint.every=2", "hydra.sweep.dir=sweep"),
)
LONGER_RUN = ("trainer.max_steps=6", "schedule=constant")


@pytest.fixture
def sweep(tmp_path: Path) -> RunDir:
    """Copy of the golden sweep in the current folder."""
    shutil.copytree(GOLDEN_DIR / "sweep", tmp_path / "sweep")
    return RunDir(tmp_path / "sweep")


def test_golden_sweep_has_nothing_left_to_run(sweep: RunDir, run_cli: CliRunner) -> None:
    before = sweep.content
    result = run_cli(*SWEEP_COMMAND, "resume_sweep=sweep").assert_ok()
    assert "4 of 4 jobs have ended" in result.out
    after = RunDir(sweep.path).content
    weights = [path for path in before if path.suffix in {".safetensors", ".pt"}]
    assert weights
    assert all(after[path] == before[path] for path in weights)


@pytest.mark.parametrize("number", range(4))
def test_golden_run_resumes(number: int, sweep: RunDir, run_job: JobRunner) -> None:
    golden_job = sweep.jobs[number]
    resumed = run_job.without_defaults(
        *golden_job.status["overrides"], *LONGER_RUN, resume=golden_job.checkpoint(4)
    )
    assert resumed.status["resumed_from"]
    assert resumed.steps == [1, 2, 3, 4, 5, 6]
    assert resumed.column("train/loss")[:4] == golden_job.column("train/loss")
    full_run = run_job.without_defaults(*golden_job.status["overrides"], *LONGER_RUN)
    for key in ("train/loss", "val/loss"):
        assert resumed.column(key)[-1] == pytest.approx(full_run.column(key)[-1], rel=1e-2), key


def test_golden_sweep_is_read_by_every_command(
    sweep: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(sweep.path.parent)
    paths = [str(run.path) for run in sweep.jobs]
    assert cli.main(["status", str(sweep.path)]) == 0
    assert capsys.readouterr().out.count("ok") >= len(paths)
    assert cli.main(["report", str(sweep.path)]) == 0
    assert "4.15" in (sweep.path / "report.html").read_text("utf-8")
    assert cli.main(["plan", "explain", *paths[:2]]) == 0
    for run in sweep.jobs:
        assert cli.main(["evaluate", str(run.path)]) == 0, run.path
        (evaluation,) = json.loads((run.path / "evaluation.json").read_text("utf-8")).values()
        assert evaluation["loss"] == pytest.approx(run.column("val/loss")[-1], rel=1e-5), run.path
    assert cli.main(["export", paths[0], "to=out"]) == 0
    assert Path("out", "model.safetensors").is_file()
