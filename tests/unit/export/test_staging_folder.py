"""Exports are written to a temporary folder, which is renamed when they are complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import SafetensorError

from scalewise import export
from scalewise.errors import ConfigError
from scalewise.export import staging_folder
from scalewise.path_lock import PathLock


class ExportKilled(BaseException):
    """Interrupts an export, as a signal does."""


def test_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    to = tmp_path / "export"

    def killed_export() -> None:
        with staging_folder(to) as partial:
            (partial / "half").write_text("a", "utf-8")
            assert not to.exists()
            raise ExportKilled

    with pytest.raises(ExportKilled):
        killed_export()
    assert [*tmp_path.iterdir()] == []


def test_export_on_a_full_disk_names_the_folder(tmp_path: Path) -> None:
    """With the error of safetensors, which has no file name."""
    error = SafetensorError("I/O error: No space left on device (os error 28)")
    with (
        pytest.raises(ConfigError, match=r"to=.*/export: the disk is full; free some space"),
        staging_folder(tmp_path / "export"),
    ):
        raise error
    assert [*tmp_path.iterdir()] == []


def test_export_removes_remains_of_a_killed_export(tmp_path: Path) -> None:
    to = tmp_path / "export"
    half = tmp_path / ".partial-export"
    (half / "base").mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    (tmp_path / "kept").write_text("kept", "utf-8")
    (half / "link").symlink_to(tmp_path / "kept")
    with staging_folder(to) as partial:
        assert [*partial.iterdir()] == []
        (partial / "whole").write_text("a", "utf-8")
    assert [path.name for path in to.iterdir()] == ["whole"]
    assert not half.exists()
    assert (tmp_path / "kept").read_text("utf-8") == "kept"


def test_concurrent_exports_do_not_mix(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "export") as partial:
        (partial / "first").write_text("a", "utf-8")
        with (
            pytest.raises(ConfigError, match="is being written by another export"),
            staging_folder(tmp_path / "export"),
        ):
            pass
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["first"]


def test_export_keeps_a_folder_that_another_export_has_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other export ends between the creation of the folder and its lock."""

    def lock_after_rename(path: Path) -> PathLock:
        lock = PathLock(path)
        (path / "weights").write_text("a", "utf-8")
        path.rename(tmp_path / "export")
        return lock

    monkeypatch.setattr(export, "PathLock", lock_after_rename)
    with (
        pytest.raises(ConfigError, match="is being written by another export"),
        staging_folder(tmp_path / "export"),
    ):
        pass
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["weights"]


def test_export_follows_no_links(tmp_path: Path) -> None:
    link_target = tmp_path / "elsewhere"
    link_target.mkdir()
    (tmp_path / ".partial-export").symlink_to(link_target)
    with staging_folder(tmp_path / "export") as partial:
        (partial / "file").write_text("a", "utf-8")
    assert [*link_target.iterdir()] == []
    (tmp_path / "link").symlink_to(link_target)
    with (
        pytest.raises(ConfigError, match="already exists"),
        staging_folder(tmp_path / "link"),
    ):
        pass


def test_export_keeps_an_existing_folder(tmp_path: Path) -> None:
    to = tmp_path / "export"
    to.mkdir()
    with staging_folder(to) as partial:  # an empty folder is accepted
        (partial / "file").write_text("a", "utf-8")
    with pytest.raises(ConfigError, match="already exists"), staging_folder(to):
        pass
    assert [path.name for path in to.iterdir()] == ["file"]
