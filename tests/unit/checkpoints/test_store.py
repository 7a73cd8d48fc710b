"""Checkpoint folders: complete or absent, loaded without running code, pruned."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import (
    FILES,
    file_of,
    rejection_message,
    save,
    tensors,
    tensors_file,
    trainer_state,
)

from scalewise.checkpoints import manifest, store
from scalewise.errors import CheckpointError

for_each_file = pytest.mark.parametrize("kind", FILES)


def sign(path: Path) -> None:
    """Update the checksums of the manifest to the changed files."""
    content = json.loads((path / manifest.MANIFEST).read_text())
    content["files"] = {name: manifest.fingerprint(path / name) for name in content["files"]}
    (path / manifest.MANIFEST).write_text(json.dumps(content))


def test_checkpoint_round_trips(saved: Path) -> None:
    assert store.load_state(saved) == trainer_state()
    for part, expected in tensors().items():
        loaded = store.full_tensors(saved, part)
        assert loaded.keys() == expected.keys(), part
        assert store.tensor_shapes(saved, part) == {
            name: t.shape for name, t in expected.items()
        }, part
        for name, tensor in expected.items():
            assert loaded[name].dtype is tensor.dtype, name
            assert torch.equal(loaded[name], tensor), name


def test_checkpoint_reader_fills_requested_tensors(saved: Path) -> None:
    head = torch.zeros(6, 4)
    store.read_into(saved, "model", {"model.head": head})
    assert torch.equal(head, tensors()["model"]["model.head"])


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"gone": torch.zeros(1)}, "lacks gone"),
        ({"gone": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)}, "lacks b and 2 more"),
        ({"turned": torch.zeros(3, 5)}, "turned has shape (5, 3), the model has (3, 5)"),
    ],
)
def test_checkpoint_of_another_model_is_rejected(
    saved: Path, target: dict[str, torch.Tensor], reason: str
) -> None:
    before = {name: tensor.clone() for name, tensor in target.items()}
    with pytest.raises(CheckpointError) as excinfo:
        store.read_into(saved, "model", target)
    (issue,) = excinfo.value.issues
    assert (issue.key, issue.value, issue.reason) == ("resume", saved, reason)
    assert "the model config of the run that saved it" in issue.fix
    assert all(torch.equal(target[name], tensor) for name, tensor in before.items())


def test_checkpoint_saved_again_is_replaced(saved: Path) -> None:
    save(saved, epoch=9)
    assert store.load_state(saved)["epoch"] == 9


@for_each_file
def test_checkpoint_with_a_truncated_file_is_rejected(saved: Path, kind: str) -> None:
    name = file_of(saved, kind)
    size = (saved / name).stat().st_size
    os.truncate(saved / name, size - 1)
    assert rejection_message(saved) == f"is damaged ({name}: has {size - 1} of {size} bytes)"


@for_each_file
def test_checkpoint_with_a_flipped_bit_is_rejected(saved: Path, kind: str) -> None:
    name = file_of(saved, kind)
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    assert rejection_message(saved) == f"is damaged ({name}: has another checksum)"


@for_each_file
def test_checkpoint_with_a_missing_file_is_rejected(saved: Path, kind: str) -> None:
    name = file_of(saved, kind)
    (saved / name).unlink()
    assert rejection_message(saved) == f"is damaged ({name}: is missing)"


def fill_shards(folder: Path, ranks: int) -> list[str]:
    """Write the files of a checkpoint of several ranks; returns their names in order."""
    names = [
        f"{part}/shard-{rank:05d}-model-00001-of-00001.safetensors"
        for part in ("model", "optimizer")
        for rank in range(1, ranks + 1)
    ]
    names.append(manifest.TRAINING)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return names


@pytest.mark.parametrize("readers", [1, 2, 3, 8])
def test_ranks_hash_each_file_once_and_their_own_shards(tmp_path: Path, readers: int) -> None:
    names = fill_shards(tmp_path, ranks=3)
    parts = [manifest.fingerprints(tmp_path, rank, readers) for rank in range(readers)]
    assert sorted(name for part in parts for name in part) == names
    assert {name: it for part in parts for name, it in part.items()} == manifest.fingerprints(
        tmp_path
    )
    if readers == 3:
        assert [*parts[1]] == [name for name in names if "shard-00002" in name]


def test_each_rank_detects_damage_of_its_shards(tmp_path: Path) -> None:
    path = manifest.checkpoint_path(tmp_path, 3)
    path.mkdir()
    names = fill_shards(path, ranks=3)
    header = {"format": manifest.FORMAT, "version": manifest.VERSION, "step": 3}
    content = header | {"files": manifest.fingerprints(path)}
    (path / manifest.MANIFEST).write_text(json.dumps(content))
    (path / names[1]).write_text(names[2])
    found = [[*manifest.damaged_files(path, rank, 3)] for rank in range(3)]
    assert found == [[], [(names[1], "has another checksum")], []]


def test_resumed_ranks_share_the_verification(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    fingerprint = manifest.fingerprint

    def record(file: Path) -> dict[str, int]:
        read.append(file.name)
        return fingerprint(file)

    monkeypatch.setattr(manifest, "fingerprint", record)
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(store.dist, name, lambda value=value: value)
    assert store.load_state(saved) == trainer_state()
    assert read == []  # rank 0 wrote all files, and verifies them


@pytest.mark.parametrize("failed_rank", [None, 0, 1])
def test_fingerprints_of_all_ranks_are_gathered(
    failed_rank: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = fill_shards(tmp_path, ranks=2)
    of_rank_0 = manifest.fingerprints(tmp_path, 0, 2)
    group: Any = object()

    def gather(results: list[Any], own: Any, group: object) -> None:
        results[:] = ["no space" if failed_rank == 0 else of_rank_0, own]

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(store.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(store.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(store.dist, "all_gather_object", gather)
    if failed_rank == 1:
        monkeypatch.setattr(store, "fingerprints", fail)
    if failed_rank is None:
        gathered = store._fingerprint_files(tmp_path, group)
        assert [*gathered] == names
        assert gathered == manifest.fingerprints(tmp_path)
        return
    expected = (OSError, "no space") if failed_rank else (CheckpointError, "rank 0 failed to save")
    with pytest.raises(expected[0], match=expected[1]):
        store._fingerprint_files(tmp_path, group)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is not a scalewise checkpoint"),
        ("{", "is not a scalewise checkpoint"),
        ("[]", "is not a scalewise checkpoint"),
        ('{"format": "another"}', "is not a scalewise checkpoint"),
        ('{"format": "scalewise-checkpoint", "version": 99}', "has format version 99, not 2"),
        ('{"format": "scalewise-checkpoint", "version": 1}', "has format version 1, not 2"),
        ('{"format": "scalewise-checkpoint", "version": 2}', "its manifest.json is damaged"),
    ],
)
def test_folder_that_is_no_checkpoint_is_rejected(
    saved: Path, content: str | None, reason: str
) -> None:
    (saved / manifest.MANIFEST).unlink()
    if content is not None:
        (saved / manifest.MANIFEST).write_text(content)
    assert reason in rejection_message(saved)


def test_absent_checkpoint_folder_is_rejected(tmp_path: Path) -> None:
    assert rejection_message(tmp_path / "none") == "there is no such checkpoint folder"
    (tmp_path / "file.ckpt").write_text("")
    assert rejection_message(tmp_path / "file.ckpt") == "there is no such checkpoint folder"


class Payload:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("ran-code",))


@pytest.mark.parametrize("content", ["torch", "pickle"])
def test_checkpoint_with_a_pickled_object_is_rejected(
    saved: Path, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content == "torch":
        torch.save({**trainer_state(), "evil": Payload()}, saved / manifest.TRAINING)
    else:
        (saved / manifest.TRAINING).write_bytes(pickle.dumps(Payload(), protocol=2))
    sign(saved)
    message = rejection_message(saved)
    assert message.startswith("cannot be read: training.pt is damaged or contains objects")
    assert "weights_only" not in message
    assert not (tmp_path / "ran-code").exists()


@pytest.mark.parametrize("content", [[], 3], ids=repr)
def test_checkpoint_with_foreign_data_is_rejected(saved: Path, content: object) -> None:
    torch.save(content, saved / manifest.TRAINING)
    sign(saved)
    assert rejection_message(saved) == f"{manifest.TRAINING} was not written by scalewise"


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("read", [store.full_tensors, store.tensor_shapes])
def test_checkpoint_with_invalid_safetensors_is_rejected(
    saved: Path, part: str, read: Callable[[Path, str], object]
) -> None:
    (saved / tensors_file(saved, part)).write_bytes(b"\xff" * 64)
    sign(saved)
    with pytest.raises(CheckpointError, match="cannot be read: ") as excinfo:
        read(saved, part)
    assert [issue.key for issue in excinfo.value.issues] == ["resume"]


class PanicException(BaseException):
    """Exception of Rust bindings on an allocation failure; its class cannot be imported."""


@pytest.mark.parametrize(
    ("exception", "expected", "message"),
    [
        (OSError(28, "No space left on device"), OSError, "No space left"),
        (MemoryError("no memory"), MemoryError, "no memory"),
        (PanicException("PyObject pointer is null"), MemoryError, "failed to save: PyObject"),
        (ValueError("odd"), CheckpointError, "failed to save: odd"),
    ],
)
def test_checkpoint_write_error_of_a_rank_is_reported(
    exception: BaseException,
    expected: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise exception

    monkeypatch.setattr(store.HuggingFaceStorageWriter, "write_data", fails)
    with pytest.raises(expected, match=message):
        save(manifest.checkpoint_path(tmp_path, 3))
    assert list(tmp_path.iterdir()) == []


def test_killed_checkpoint_writer_leaves_nothing_readable(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_json", dies)
        with pytest.raises(KeyboardInterrupt):
            save(manifest.checkpoint_path(saved.parent, 4), 4)
    assert list(saved.parent.iterdir()) == [saved]


def test_partial_checkpoint_is_ignored_and_removed(saved: Path) -> None:
    partial = saved.parent / ".partial-step-00000009"
    partial.mkdir()
    (partial / manifest.MANIFEST).write_text((saved / manifest.MANIFEST).read_text())
    assert list(manifest.list_checkpoints(saved.parent)) == [3]
    save(manifest.checkpoint_path(saved.parent, 4), 4)
    assert not partial.exists()
