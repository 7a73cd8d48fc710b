"""Checkpoints of a run: newest, best, copied and pruned."""

import os
import shutil
from pathlib import Path

import pytest
from fixtures.checkpoints import save, tensors_file

from scalewise.checkpoints import manifest


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
