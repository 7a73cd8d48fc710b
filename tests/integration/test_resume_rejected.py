"""Invalid checkpoints are rejected with a reason before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner, RunDir
from fixtures.job_runner import JobRunner


@pytest.fixture(scope="module")
def finished_run(cli_runner_in: Callable[[str], CliRunner]) -> RunDir:
    return cli_runner_in("finished")(*UNTRACKED, "checkpoint.every=4").assert_ok().folder


@pytest.fixture
def run_copy(finished_run: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(finished_run.path, tmp_path / "earlier"))


def truncate(run: RunDir) -> None:
    (shard_file,) = (run.checkpoint(4) / "model").iterdir()
    with shard_file.open("r+b") as file:
        file.truncate(100)


def damage(run: RunDir) -> None:
    file = run.checkpoint(4) / "training.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose(run: RunDir) -> None:
    (run.checkpoint(4) / "training.pt").unlink()


def disguise(run: RunDir) -> None:
    manifest = run.checkpoint(4) / "manifest.json"
    manifest.write_text(json.dumps({"format": "somebody's"}))


@pytest.mark.parametrize(
    ("damage_checkpoint", "reason"),
    [
        (truncate, "(model/shard-00001-model-00001-of-00001.safetensors: has 100 of"),
        (damage, "is damaged (training.pt: has another checksum)"),
        (lose, "is damaged (training.pt: is missing)"),
        (disguise, "is not a scalewise checkpoint"),
    ],
)
def test_resume_rejects_an_incomplete_checkpoint(
    damage_checkpoint: Callable[[RunDir], None],
    reason: str,
    run_copy: RunDir,
    run_cli: CliRunner,
) -> None:
    damage_checkpoint(run_copy)
    result = run_cli(*UNTRACKED, f"resume={run_copy.checkpoint(4)}").assert_rejected(
        reason, "resume="
    )
    assert result.folders == []


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.width=64"], "model.width=64: the checkpoint under"),
        (["optimizer=sgd"], "optimizer=sgd: the checkpoint under"),
        (["seed=3"], "seed=3"),
        (["trainer.micro_batch=3", "trainer.global_batch=null"], "trainer.global_batch=3: the"),
        ([], "the checkpoint is at step 8 of 8"),
    ],
)
def test_resume_rejects_a_checkpoint_of_another_run(
    overrides: list[str], reason: str, finished_run: RunDir, run_cli: CliRunner
) -> None:
    overrides_line = (*UNTRACKED, *overrides, f"resume={finished_run.checkpoint(8)}")
    assert run_cli(*overrides_line).assert_rejected(reason).folders == []


def test_resume_rejects_a_folder_without_checkpoints(run_cli: CliRunner, tmp_path: Path) -> None:
    overrides = (*UNTRACKED, f"resume={tmp_path}/nowhere")
    assert run_cli(*overrides).assert_rejected("no such checkpoint folder").folders == []
    assert (
        run_cli(*UNTRACKED, "resume=last").assert_rejected("no complete checkpoint").folders == []
    )


def test_resume_skips_a_damaged_checkpoint(run_copy: RunDir, run_job: JobRunner) -> None:
    (run_copy.checkpoint(8) / "training.pt").write_bytes(b"torn")
    assert run_job(resume=run_copy.path).status["resumed_from"] == str(run_copy.checkpoint(4))
