"""Which checkpoint ``resume=`` means, and which are refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from scalewise.checkpoints import store
from scalewise.errors import CheckpointError
from scalewise.launch.resume import checkpoint_for, differences
from scalewise.run import Run
from scalewise.tracking.files import write_json

Compose = Callable[..., Run]
STEPS = 100


def leave(run: Run, folder: Path, *steps: int, status: str = "interrupted") -> Path:
    """Writes what a run leaves: its config, its status and a checkpoint for each of ``steps``."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "resolved.yaml").write_text(yaml.safe_dump(run.as_dict()))
    write_json(folder / "status.json", {"status": status})
    for step in steps:
        state = {"state_dict": {"w": torch.zeros(1)}, "global_step": step}
        store.save(store.path_of(folder / "checkpoints", step), state)
    return folder


def found(run: Run, folder: Path, **where: bool) -> Path | None:
    return checkpoint_for(run, folder, STEPS, **where)


def refused(run: Run, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        found(run, folder)
    return str(caught.value)


@pytest.mark.parametrize("status", ["interrupted", "failed", "running", "timeout"])
@pytest.mark.parametrize("asked", ["last", "auto"])
def test_the_newest_run_of_the_name(
    compose: Compose, tmp_path: Path, asked: str, status: str
) -> None:
    run = compose(f"resume={asked}")
    leave(run, tmp_path / "2026-01-01_00-00-00", 50)
    newest = leave(run, tmp_path / "2026-01-02_00-00-00", 3, 7, status=status)
    assert found(run, tmp_path / "2026-01-03_00-00-00") == store.path_of(newest / "checkpoints", 7)


def test_auto_starts_anew_after_a_run_that_ended_well(compose: Compose, tmp_path: Path) -> None:
    leave(compose(), tmp_path / "2026-01-01", 50)
    done = leave(compose(), tmp_path / "2026-01-02", 60, status="ok")
    here = tmp_path / "2026-01-03"
    assert found(compose("resume=auto"), here) is None
    assert found(compose("resume=last"), here) == store.path_of(done / "checkpoints", 60)


def test_a_run_without_a_checkpoint_is_passed_over(compose: Compose, tmp_path: Path) -> None:
    older = leave(compose(), tmp_path / "2026-01-01", 5)
    leave(compose(), tmp_path / "2026-01-02")
    torn = leave(compose(), tmp_path / "2026-01-03", 9)
    os.truncate(store.path_of(torn / "checkpoints", 9) / store.WEIGHTS, 1)
    expected = store.path_of(older / "checkpoints", 5)
    assert found(compose("resume=last"), tmp_path / "2026-01-04") == expected


def test_nothing_to_go_on_from(compose: Compose, tmp_path: Path) -> None:
    here = tmp_path / "runs" / "now"
    assert found(compose(), here) is None
    assert found(compose("resume=auto"), here) is None
    assert "no whole checkpoint under" in refused(compose("resume=last"), here)


def test_the_same_job_of_the_sweep_before(compose: Compose, tmp_path: Path) -> None:
    for job in ("0", "1"):
        leave(compose(), tmp_path / "2026-01-01" / job, 3 + int(job))
    path = found(compose("resume=auto"), tmp_path / "2026-01-02" / "1", in_sweep=True)
    assert path == store.path_of(tmp_path / "2026-01-01/1/checkpoints", 4)


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/step-00000007"])
def test_a_path_is_a_run_its_checkpoints_or_one_of_them(
    compose: Compose, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = leave(compose(), tmp_path / "run", 3, 7)
    expected = store.path_of(folder / "checkpoints", 7)
    assert found(compose(f"resume='{folder / where}'"), tmp_path / "now") == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found(compose(f"resume='~/run/{where}'"), tmp_path / "now") == expected
    monkeypatch.chdir(tmp_path)
    assert found(compose(f"resume='run/{where}'"), tmp_path / "now") == expected


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "there is no such checkpoint folder"),
        (lambda path: path.write_text(""), "there is no such checkpoint folder"),
        (lambda path: path.mkdir(), "is no scalewise checkpoint"),
        (lambda path: (path / "checkpoints").mkdir(parents=True), "no whole checkpoint under"),
    ],
)
def test_a_path_that_is_none_of_these(
    compose: Compose, tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    make(tmp_path / "x")
    assert reason in refused(compose(f"resume={tmp_path}/x"), tmp_path / "now")


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (["optimizer.lr=1", "trainer.max_steps=5", "schedule=linear", "name=other"], []),
        (["precision=bf16_mixed", "checkpoint.every=1", "model.dropout=0.1"], []),
        (["model.layers=2"], ["model.layers"]),
        (["optimizer=sgd"], ["optimizer._target_"]),
        (["trainer.micro_batch=4"], ["trainer.micro_batch"]),
        (["data.sequence=64", "seed=9"], ["data.sequence", "seed"]),
        (["data=synthetic"], ["data._target_", "data.megabytes", "data.rows", "data.vocabulary"]),
        (["hardware=cpu", "parallelism=ddp"],
         ["parallelism._target_", "parallelism.bucket_mib",
          "parallelism.gradient_as_bucket_view", "parallelism.replicas",
          "parallelism.static_graph"]),
    ],
)  # fmt: skip
def test_what_must_not_differ(
    compose: Compose, tmp_path: Path, overrides: list[str], keys: list[str]
) -> None:
    folder = leave(compose(), tmp_path / "run", 3)
    run = compose(*overrides, f"resume={folder}")
    complaints = list(differences(run, folder))
    assert sorted(complaint.key for complaint in complaints) == keys
    if keys:
        message = refused(run, tmp_path / "now")
        assert all(f"{key}=" in message for key in keys)
    else:
        assert found(run, tmp_path / "now") is not None


def test_a_run_that_has_done_its_steps_is_refused(compose: Compose, tmp_path: Path) -> None:
    folder = leave(compose(), tmp_path / "run", STEPS)
    message = refused(compose(f"resume={folder}"), tmp_path / "now")
    assert "has done 100 of 100 steps" in message
    assert "trainer.max_steps above 100" in message


@pytest.mark.parametrize("content", ["", "[1", "- 1\n"])
def test_a_config_that_cannot_be_read_is_no_difference(
    compose: Compose, tmp_path: Path, content: str
) -> None:
    (tmp_path / "resolved.yaml").write_text(content)
    assert list(differences(compose(), tmp_path)) == []
