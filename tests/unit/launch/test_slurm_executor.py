"""The Slurm executor: requests, rejections and controllers without answer."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalewise.commands.train import TrainCommand
from scalewise.config.app import run_command
from scalewise.errors import ConfigError, ScalewiseError
from scalewise.launch import executor, exit_reports, slurm, slurm_cli
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import JobSpec
from scalewise.launch.outcomes import Outcome
from scalewise.run_config import RunConfig
from scalewise.run_files import write_json

H100 = "model=decoder_nano hardware=h100 precision=bf16_mixed parallelism=fsdp parallelism.shards="


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """The default options of ``hydra/launcher=slurm``."""
    from omegaconf import OmegaConf

    from scalewise.config.launchers import LAUNCHERS

    node = OmegaConf.structured(LAUNCHERS["slurm"]())
    defaults: Any = OmegaConf.to_container(node, resolve=False)
    return {**defaults, "submitit_folder": str(tmp_path / "slurm")}


def engine(options: dict[str, Any]) -> Any:
    return executor.build_executor(
        {key: value for key, value in options.items() if not key.startswith("_")}
    )


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cluster that accepts every job and then does not list it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "squeue", "scontrol", "scancel"):
        (folder / name).write_text("#!/bin/sh\n")
    (folder / "sbatch").write_text("#!/bin/sh\necho Submitted batch job $$\n")
    for file in folder.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "SETTLING_S", 0.0)
    return folder


def flags(folder: Path) -> list[dict[str, str]]:
    """Flags of each submitted script, in order of submission."""
    scripts = sorted(folder.glob("slurm/*_submission.sh"), key=lambda path: path.stat().st_mtime_ns)
    return [
        dict(re.findall(r"#SBATCH --([\w-]+)(?:=(.*))?", p.read_text()))
        for p in scripts
        if p.name[0] != "."
    ]


def test_slurm_places_ranks_on_nodes(
    options: dict[str, Any], sbatch: Path, compose: Callable[..., RunConfig], tmp_path: Path
) -> None:
    runs = [compose(*f"{H100}{ranks}".split(), check_machine=False) for ranks in (8, 16)]
    tasks = [SweepTask(n, JobSpec(run), tmp_path / str(n)) for n, run in enumerate(runs)]
    settings = {
        "gpus_per_node": 8,
        "partition": "a b",
        "setup": ["module load cuda"],
        "mem_gb": 64,
        "timeout_min": 90,
        "additional_parameters": {"mail-type": "BEGIN"},
        "array_parallelism": 3,
    }
    results = list(engine(options | settings).iter_results(tasks, lambda task: None))
    assert [result.status for _, result in results] == ["failed", "failed"]
    assert "unknown to Slurm" in results[0][1].reason
    small_job_flags, large_job_flags = flags(tmp_path)
    assert (
        small_job_flags["nodes"],
        small_job_flags["ntasks-per-node"],
        small_job_flags["array"],
    ) == ("1", "8", "0%1")
    assert (
        large_job_flags["nodes"],
        large_job_flags["ntasks-per-node"],
        large_job_flags["array"],
    ) == ("2", "8", "1%1")
    expected = {"gpus-per-node": "8", "partition": "'a b'", "mem": "64GB", "time": "90"}
    assert expected.items() <= large_job_flags.items()
    assert large_job_flags["mail-type"] == "BEGIN"
    assert "requeue" in large_job_flags
    text = next((tmp_path / "slurm").glob("[0-9]*_submission.sh")).read_text()
    assert "\nmodule load cuda\n" in text
    assert "-m scalewise.commands.slurm_task" in text
    assert ".pkl" not in text


def test_slurm_requests_devices(
    options: dict[str, Any], sbatch: Path, compose: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = compose(*f"{H100}16 hardware.devices_per_node=4".split(), check_machine=False)
    list(
        engine(options).iter_results(
            [SweepTask(0, JobSpec(run), tmp_path / "0")], lambda task: None
        )
    )
    (job_flags,) = flags(tmp_path)
    assert (job_flags["nodes"], job_flags["ntasks-per-node"], job_flags["gpus-per-node"]) == (
        "4",
        "4",
        "4",
    )


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        ("parallelism=fsdp parallelism.shards=3", {"nodes": 2}, "3 ranks cannot be divided evenly"),
        ("", {"gpus_per_node": 2}, "the run uses the CPU"),
        ("launch.timeout=60", {}, "set hydra.launcher.timeout_min"),
        ("launch.max_restarts=1", {}, "Slurm, which requeues jobs"),
    ],
)
def test_slurm_rejects_invalid_settings(
    overrides: str,
    changes: dict[str, Any],
    message: str,
    options: dict[str, Any],
    sbatch: Path,
    compose: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    task = SweepTask(0, JobSpec(compose(*overrides.split(), check_machine=False)), tmp_path / "0")
    with pytest.raises(ConfigError, match=re.escape(message)):
        next(engine(options | changes).iter_results([task], lambda task: None))
    assert not (tmp_path / "slurm").exists()


def test_slurm_job_cancelled_while_pending(
    options: dict[str, Any],
    sbatch: Path,
    compose: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder of a resumed sweep may contain files of an earlier job."""
    monkeypatch.setattr(
        slurm_cli, "job_facts", lambda job: {"JobState": "CANCELLED", "ExitCode": "0:0"}
    )
    (tmp_path / "0").mkdir()
    write_json(tmp_path / "0" / "status.json", {"status": "ok", "reason": "", "exit_code": 0})
    task = SweepTask(0, JobSpec(compose()), tmp_path / "0")
    ((_, result),) = engine(options).iter_results([task], lambda task: None)
    assert (result.status, result.exit_code) == ("interrupted", 143)
    assert "CANCELLED" in result.reason
    assert result.folder == tmp_path / "0-2"


def test_machine_without_slurm_is_rejected(
    options: dict[str, Any],
    compose: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    task = SweepTask(0, JobSpec(compose()), tmp_path / "0")
    with pytest.raises(ConfigError, match="sbatch is not installed"):
        next(engine(options).iter_results([task], lambda task: None))


def test_machine_without_the_extra_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'scalewise\[slurm\]'"):
        executor.build_executor({"engine": "slurm", "partition": "anything"})
    assert importlib.util.find_spec("submitit")


def test_unresponsive_slurm_controller_is_reported(
    options: dict[str, Any],
    sbatch: Path,
    compose: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm_cli, "job_states", lambda: None)
    monkeypatch.setattr(slurm, "SILENCE_S", 0.5)
    task = SweepTask(0, JobSpec(compose()), tmp_path / "0")
    with pytest.raises(ScalewiseError, match=r"has not responded .* the jobs may still run"):
        list(engine(options).iter_results([task], lambda task: None))


class TestLostJob:
    """A job that ended without a report."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "0"
        folder.mkdir()
        exit_reports.prepare_reports(folder)
        initial_status = {
            "status": "running",
            "started": "2026-01-01T00:00:00+00:00",
            "world_size": 2,
        }
        write_json(folder / "status.json", initial_status)
        (tmp_path / "7_0_0_log.err").write_text("one\ntwo\n")
        return folder

    @pytest.mark.parametrize(
        ("state", "status", "code"),
        [
            ("CANCELLED", "interrupted", 143),
            ("OUT_OF_MEMORY", "out_of_memory", 3),
            ("TIMEOUT", "timeout", 4),
            ("NODE_FAIL", "failed", 1),
            ("COMPLETED", "failed", 1),
        ],
    )
    def test_lost_job_has_the_slurm_state(
        self, state: str, status: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only the job itself reports success."""
        job_record = {"JobState": state, "ExitCode": "0:9"}
        monkeypatch.setattr(slurm_cli, "job_facts", lambda job: job_record)
        slurm.write_lost_status(folder, "7_0", folder.parent)
        record = json.loads((folder / "status.json").read_text())
        assert (record["status"], record["exit_code"]) == (status, code)
        assert f"Slurm state of job 7_0: {state}, exit code 0:9" in record["reason"]
        assert record["log_tail"] == ["one", "two"]
        assert record["seconds"] > 0

    def test_lost_job_has_the_report_of_another_rank(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slurm_cli, "job_facts", lambda job: {})
        exit_reports.write_report(folder, 1, Outcome("failed", "it broke", 1, ("here",)))
        slurm.write_lost_status(folder, "7_0", folder.parent)
        record = json.loads((folder / "status.json").read_text())
        assert record["reason"].startswith("it broke; job 7_0 is unknown")
        assert (record["rank"], record["log_tail"]) == (1, ["here"])


@pytest.mark.parametrize(
    ("launcher", "fix"),
    [
        ("ray", "choose one of hydra/launcher=scalewise"),
        ("basic", "choose one of hydra/launcher=scalewise"),
        ("submitit_slurm", "did you mean hydra/launcher=slurm"),
        ("pack", "did you mean hydra/launcher=packed"),
        ("joblib", "set hydra/launcher=packed instead"),
    ],
)
def test_other_launchers_are_rejected(
    launcher: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"is not a launcher of scalewise.*{fix}"):
        run_command(TrainCommand(()), ["-m", f"hydra/launcher={launcher}", "seed=1,2"])
    assert list(tmp_path.iterdir()) == []


def test_single_run_with_slurm_launcher_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a single run runs on this machine; add -m"):
        run_command(TrainCommand(()), ["hydra/launcher=slurm"])
    assert list(tmp_path.iterdir()) == []


def test_override_error_is_not_a_machine_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as excinfo:
        run_command(
            TrainCommand(()), ["-m", "hydra/launcher=slurm", "hardware=h100", "optimizer.lrr=1,2"]
        )
    (issue,) = excinfo.value.issues
    assert issue.key == "optimizer.lrr"
