"""What cannot be resumed is refused with its reason, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.doors import UNTRACKED, Doors, Folder
from fixtures.jobs import Job


@pytest.fixture(scope="module")
def finished(doors_in: Callable[[str], Doors]) -> Folder:
    return doors_in("finished")(*UNTRACKED, "checkpoint.every=4").ok().folder


@pytest.fixture
def copy(finished: Folder, tmp_path: Path) -> Folder:
    return Folder(shutil.copytree(finished.path, tmp_path / "earlier"))


def truncate(run: Folder) -> None:
    (held,) = (run.checkpoint(4) / "model").iterdir()
    with held.open("r+b") as file:
        file.truncate(100)


def damage(run: Folder) -> None:
    file = run.checkpoint(4) / "training.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose(run: Folder) -> None:
    (run.checkpoint(4) / "training.pt").unlink()


def disguise(run: Folder) -> None:
    manifest = run.checkpoint(4) / "manifest.json"
    manifest.write_text(json.dumps({"format": "somebody's"}))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, "(model/shard-00001-model-00001-of-00001.safetensors: has 100 of"),
        (damage, "is damaged (training.pt: has another checksum)"),
        (lose, "is damaged (training.pt: is missing)"),
        (disguise, "is not a scalewise checkpoint"),
    ],
)
def test_a_checkpoint_that_is_not_whole(
    harm: Callable[[Folder], None],
    reason: str,
    copy: Folder,
    scalewise: Doors,
) -> None:
    harm(copy)
    refused = scalewise(*UNTRACKED, f"resume={copy.checkpoint(4)}").refused(reason, "resume=")
    assert refused.folders == []


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
def test_a_checkpoint_of_another_run(
    overrides: list[str], reason: str, finished: Folder, scalewise: Doors
) -> None:
    line = (*UNTRACKED, *overrides, f"resume={finished.checkpoint(8)}")
    assert scalewise(*line).refused(reason).folders == []


def test_a_folder_that_holds_none(scalewise: Doors, tmp_path: Path) -> None:
    line = (*UNTRACKED, f"resume={tmp_path}/nowhere")
    assert scalewise(*line).refused("no such checkpoint folder").folders == []
    assert scalewise(*UNTRACKED, "resume=last").refused("no complete checkpoint").folders == []


def test_latest_passes_over_a_damaged_one(copy: Folder, job: Job) -> None:
    (copy.checkpoint(8) / "training.pt").write_bytes(b"torn")
    assert job(resume=copy.path).status["resumed_from"] == str(copy.checkpoint(4))
