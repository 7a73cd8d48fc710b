"""Checkpoint folders: complete or absent, loaded without running code, pruned."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scalewise.checkpoints import manifest, store, trained_run
from scalewise.errors import CheckpointError


def tensors(step: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    """Strategy state with a tied head, views, a moment and a step count."""
    generator = torch.Generator().manual_seed(step)
    embedding = torch.randn(6, 4, generator=generator)
    return {
        "model": {
            "model.embedding": embedding,
            "model.head": embedding,
            "turned": torch.randn(3, 5, generator=generator).t(),
            "first_of_two": (pair := torch.randn(4, generator=generator))[:2],
            "second_of_two": pair[2:],
            "half": torch.randn(2, generator=generator).bfloat16(),
            "nothing": torch.zeros(0),
            "also_nothing": torch.zeros(0),
        },
        "optimizer": {
            "exp_avg/model.embedding": torch.ones(6, 4),
            "step/model.embedding": torch.full((1,), 3.0),
        },
    }


def trainer_state(step: int = 3) -> dict[str, Any]:
    """Training state that Lightning passes next to the tensors."""
    return {"global_step": step, "epoch": 0, "callbacks": {"ema": {"decay": 0.9}}}


def save(path: Path, step: int = 3, **more: Any) -> None:
    store.save_checkpoint(path, tensors(step), store.pack_state(trainer_state(step) | more))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = manifest.checkpoint_path(tmp_path / "checkpoints", 3)
    save(path)
    return path


def tensors_file(path: Path, part: str = "model") -> str:
    """Only tensor file below ``model`` or ``optimizer``, as named in the manifest."""
    (file,) = (path / part).iterdir()
    return str(file.relative_to(path))


FILES = ["model", "optimizer", manifest.TRAINING]
for_each_file = pytest.mark.parametrize("kind", FILES)


def file_of(path: Path, kind: str) -> str:
    return kind if kind == manifest.TRAINING else tensors_file(path, kind)


def rejection_message(path: Path) -> str:
    with pytest.raises(CheckpointError) as excinfo:
        store.load_state(path)
    (issue,) = excinfo.value.issues
    assert issue.key == "resume"
    assert issue.value == path
    return issue.reason


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


def test_latest_checkpoint_skips_damaged_ones(saved: Path) -> None:
    checkpoints = [manifest.checkpoint_path(saved.parent, step) for step in (4, 5, 123_456_789)]
    for path in checkpoints:
        save(path)
    os.truncate(checkpoints[2] / tensors_file(checkpoints[2]), 10)
    (checkpoints[1] / manifest.MANIFEST).unlink()
    assert list(manifest.list_checkpoints(saved.parent)) == [3, 4, 123_456_789]
    assert manifest.newest_checkpoint(saved.parent) == checkpoints[0]
    assert manifest.newest_checkpoint(saved.parent / "none") is None


@pytest.mark.parametrize("links", [True, False])
def test_copied_checkpoint_outlives_the_original(
    saved: Path, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError("another file system")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):
        manifest.adopt_checkpoint(saved, tmp_path / "other")
    copied_checkpoint = manifest.checkpoint_path(tmp_path / "other", 3)
    assert (copied_checkpoint / manifest.MANIFEST).samefile(saved / manifest.MANIFEST) == links
    shutil.rmtree(saved)
    assert manifest.verify_checkpoint(copied_checkpoint) == 3
    assert list(copied_checkpoint.parent.iterdir()) == [copied_checkpoint]


@pytest.mark.parametrize(
    ("max_kept", "best", "remaining_steps"),
    [
        (0, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (2, 1, [1, 3, 4]),
        (1, 4, [4]),
        (9, 1, [1, 2, 3, 4]),
    ],
)
def test_pruning_keeps_the_newest_and_best_checkpoints(
    tmp_path: Path, max_kept: int, best: int | None, remaining_steps: list[int]
) -> None:
    for step in (1, 2, 3, 4):
        save(manifest.checkpoint_path(tmp_path, step), step)
    if best is not None:
        manifest.mark_best(tmp_path, best, 0.5)
        assert manifest.best_checkpoint(tmp_path) == (best, 0.5)
    manifest.prune_checkpoints(tmp_path, max_kept)
    assert list(manifest.list_checkpoints(tmp_path)) == remaining_steps
    assert not list(tmp_path.glob(".partial*"))


def half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("damage", [half, empty, Path.unlink])
@pytest.mark.parametrize("file_kinds", [("model", "average"), ("model", "average", "optimizer")])
@pytest.mark.parametrize("kind", [*FILES, store.AVERAGE])
@pytest.mark.parametrize("step", ["last", "3"])
def test_weights_load_despite_a_damaged_training_state(
    tmp_path: Path,
    step: str,
    kind: str,
    file_kinds: tuple[str, ...],
    damage: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = manifest.checkpoint_path(tmp_path / "checkpoints", 3)
    average = {"model.embedding": torch.ones(6, 4)}
    store.save_checkpoint(
        path, tensors() | {store.AVERAGE: average}, store.pack_state(trainer_state())
    )
    name = file_of(path, kind)
    damage(path / name)
    assert f"is damaged ({name}: " in rejection_message(path)
    if kind not in file_kinds:
        assert trained_run.choose_checkpoint(tmp_path, step, file_kinds) == path
        (note,) = capsys.readouterr().out.splitlines()
        assert note.startswith(f"note: the training state of {path} is damaged ({name}: ")
        return
    with pytest.raises(CheckpointError) as excinfo:
        trained_run.choose_checkpoint(tmp_path, step, file_kinds)
    (issue,) = excinfo.value.issues
    assert (issue.key, issue.value) == ("step", step)
    assert f": step 3 is damaged ({name}: " in issue.reason
    assert capsys.readouterr().out == ""


def test_weights_of_an_earlier_step_replace_damaged_ones(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(newer_checkpoint := manifest.checkpoint_path(saved.parent, 4), 4)
    (newer_checkpoint / (name := tensors_file(newer_checkpoint))).unlink()
    assert trained_run.choose_checkpoint(tmp_path, "last", ["model"]) == saved
    stdout = capsys.readouterr().out
    assert stdout == f"step 4 is damaged ({name}: is missing); using step 3 instead\n"
    with pytest.raises(CheckpointError, match="choose another step"):
        trained_run.choose_checkpoint(tmp_path, "4", ["model"])
