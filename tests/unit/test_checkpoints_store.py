"""Checkpoint folders: whole or absent, loaded without running code, pruned but for the best."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scalewise.checkpoints import store
from scalewise.checkpoints.lightning_io import FolderIO
from scalewise.errors import CheckpointError


def state(step: int = 3) -> dict[str, Any]:
    """Returns what Lightning hands over: a tied head, a transposed view, an optimizer."""
    generator = torch.Generator().manual_seed(step)
    embedding = torch.randn(6, 4, generator=generator)
    return {
        "global_step": step,
        "epoch": 0,
        "state_dict": {
            "embedding": embedding,
            "head": embedding,
            "turned": torch.randn(3, 5, generator=generator).t(),
            "first_of_two": (pair := torch.randn(4, generator=generator))[:2],
            "second_of_two": pair[2:],
            "half": torch.randn(2, generator=generator).bfloat16(),
            "nothing": torch.zeros(0),
            "also_nothing": torch.zeros(0),
        },
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(6, 4)}}, "param_groups": []}],
        "callbacks": {"ema": {"decay": 0.9}},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = store.path_of(tmp_path / "checkpoints", 3)
    store.save(path, state())
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        store.load(path)
    (complaint,) = caught.value.complaints
    assert complaint.key == "resume"
    assert complaint.value == path
    return complaint.reason


def sign(path: Path) -> None:
    """Makes the manifest agree with files that were changed behind its back."""
    manifest = json.loads((path / store.MANIFEST).read_text())
    manifest["files"] = {name: store._fingerprint(path / name) for name in manifest["files"]}
    (path / store.MANIFEST).write_text(json.dumps(manifest))


def test_what_is_saved_comes_back(saved: Path) -> None:
    loaded, expected = store.load(saved), state()
    assert loaded.keys() == expected.keys()
    assert loaded["state_dict"].keys() == expected["state_dict"].keys()
    for name, tensor in expected["state_dict"].items():
        assert loaded["state_dict"][name].dtype is tensor.dtype
        assert torch.equal(loaded["state_dict"][name], tensor)
    moments = loaded["optimizer_states"][0]["state"][0]["exp_avg"]
    assert torch.equal(moments, torch.ones(6, 4))
    assert loaded["callbacks"] == expected["callbacks"]


def test_tied_tensors_are_written_once_and_come_back_tied(saved: Path) -> None:
    assert set(load_file(saved / store.WEIGHTS)) == set(state()["state_dict"]) - {"head"}
    weights = store.load(saved)["state_dict"]
    assert weights["head"].data_ptr() == weights["embedding"].data_ptr()


def test_the_seam_to_lightning(tmp_path: Path) -> None:
    FolderIO().save_checkpoint(state(), tmp_path / "step-00000003")
    assert FolderIO().load_checkpoint(tmp_path / "step-00000003")["global_step"] == 3
    with pytest.raises(AssertionError):
        FolderIO().remove_checkpoint(tmp_path)


def test_saving_again_replaces(saved: Path) -> None:
    store.save(saved, state() | {"epoch": 9})
    assert store.load(saved)["epoch"] == 9


@pytest.mark.parametrize("name", [store.WEIGHTS, store.TRAINING])
def test_a_truncated_file_is_refused(saved: Path, name: str) -> None:
    size = (saved / name).stat().st_size
    os.truncate(saved / name, size - 1)
    assert refused(saved) == f"is truncated: {name} has {size - 1} of {size} bytes"


@pytest.mark.parametrize("name", [store.WEIGHTS, store.TRAINING])
def test_a_flipped_bit_is_refused(saved: Path, name: str) -> None:
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    assert refused(saved) == f"is damaged: the checksum of {name} differs"


@pytest.mark.parametrize("name", [store.WEIGHTS, store.TRAINING])
def test_a_missing_file_is_refused(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert refused(saved) == f"lacks {name}"


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (None, "is no scalewise checkpoint"),
        ("{", "is no scalewise checkpoint"),
        ("[]", "is no scalewise checkpoint"),
        ('{"format": "another"}', "is no scalewise checkpoint"),
        ('{"format": "scalewise-checkpoint", "version": 99}', "has format version 99, not 1"),
        ('{"format": "scalewise-checkpoint", "version": 1}', "its manifest.json is damaged"),
    ],
)
def test_a_foreign_folder_is_refused(saved: Path, manifest: str | None, reason: str) -> None:
    (saved / store.MANIFEST).unlink()
    if manifest is not None:
        (saved / store.MANIFEST).write_text(manifest)
    assert reason in refused(saved)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "none") == "there is no such checkpoint folder"
    (tmp_path / "file.ckpt").write_text("")
    assert refused(tmp_path / "file.ckpt") == "there is no such checkpoint folder"


class Payload:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("ran-code",))


@pytest.mark.parametrize("content", ["torch", "pickle"])
def test_a_pickled_object_is_refused_and_not_run(
    saved: Path, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content == "torch":
        torch.save({"aliases": {}, "evil": Payload()}, saved / store.TRAINING)
    else:
        (saved / store.TRAINING).write_bytes(pickle.dumps(Payload(), protocol=2))
    sign(saved)
    assert refused(saved).startswith("cannot be read: ")
    assert not (tmp_path / "ran-code").exists()


def test_weights_that_are_no_safetensors_are_refused(saved: Path) -> None:
    (saved / store.WEIGHTS).write_bytes(b"\xff" * 64)
    sign(saved)
    assert refused(saved).startswith("cannot be read: ")


def test_a_writer_that_dies_leaves_nothing_that_is_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_json", dies)
        with pytest.raises(KeyboardInterrupt):
            store.save(store.path_of(saved.parent, 4), state(4))
    assert list(saved.parent.iterdir()) == [saved]


def test_a_partial_folder_of_a_killed_writer_is_not_read_and_goes(saved: Path) -> None:
    partial = saved.parent / ".partial-step-00000009"
    partial.mkdir()
    (partial / store.MANIFEST).write_text((saved / store.MANIFEST).read_text())
    assert list(store.steps(saved.parent)) == [3]
    store.save(store.path_of(saved.parent, 4), state(4))
    assert not partial.exists()


def test_the_latest_passes_over_damaged_ones(saved: Path) -> None:
    later = [store.path_of(saved.parent, step) for step in (4, 5, 123_456_789)]
    for path in later:
        store.save(path, state())
    os.truncate(later[2] / store.WEIGHTS, 10)
    (later[1] / store.MANIFEST).unlink()
    assert list(store.steps(saved.parent)) == [3, 4, 123_456_789]
    assert store.latest(saved.parent) == later[0]
    assert store.latest(saved.parent / "none") is None


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (0, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (2, 1, [1, 3, 4]),
        (1, 4, [4]),
        (9, 1, [1, 2, 3, 4]),
    ],
)
def test_pruning_keeps_the_newest_and_the_best(
    tmp_path: Path, keep: int, best: int | None, left: list[int]
) -> None:
    for step in (1, 2, 3, 4):
        store.save(store.path_of(tmp_path, step), state(step))
    if best is not None:
        store.mark_best(tmp_path, best, 0.5)
        assert store.best_of(tmp_path) == (best, 0.5)
    store.prune(tmp_path, keep)
    assert list(store.steps(tmp_path)) == left
    assert not list(tmp_path.glob(".partial*"))
