"""Choice of a checkpoint to load weights from, some of them damaged."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

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

from scalewise.checkpoints import manifest, store, trained_run
from scalewise.errors import CheckpointError


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
        assert trained_run.choose_checkpoint(tmp_path, step, file_kinds)[0] == path
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
    assert trained_run.choose_checkpoint(tmp_path, "last", ["model"])[0] == saved
    stdout = capsys.readouterr().out
    assert stdout == f"step 4 is damaged ({name}: is missing); using step 3 instead\n"
    with pytest.raises(CheckpointError, match="choose another step"):
        trained_run.choose_checkpoint(tmp_path, "4", ["model"])


def test_chosen_checkpoint_is_not_pruned_while_it_is_read(tmp_path: Path, saved: Path) -> None:
    chosen, lock = trained_run.choose_checkpoint(tmp_path, "last", ["model"])
    save(manifest.checkpoint_path(saved.parent, 4), 4)
    manifest.prune_checkpoints(saved.parent, 1)
    assert store.released_weights(chosen)
    lock.release()
    manifest.prune_checkpoints(saved.parent, 1)
    assert list(manifest.list_checkpoints(saved.parent)) == [4]


def test_checkpoint_that_disappears_before_it_is_locked_is_not_chosen(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_list = manifest.list_checkpoints(saved.parent)
    save(manifest.checkpoint_path(saved.parent, 4), 4)
    shutil.rmtree(saved)
    lists = iter([first_list])
    monkeypatch.setattr(
        manifest,
        "list_checkpoints",
        lambda folder: next(lists, {4: manifest.checkpoint_path(folder, 4)}),
    )
    chosen, _ = trained_run.choose_checkpoint(tmp_path, "last", ["model"])
    assert chosen == manifest.checkpoint_path(saved.parent, 4)
