"""Atomic writes: links, permissions and full disks."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from scalewise import atomic, failures
from scalewise.launch import exit_reports
from scalewise.launch.outcomes import Outcome
from scalewise.run_files import MetricsFile, read_json, write_json

BLOCK = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """File system with 64 blocks."""
    folder = tmp_path / "disk"
    folder.mkdir()
    overrides = ["mount", "-t", "tmpfs", "-o", f"size={64 * BLOCK}", "tmpfs", str(folder)]
    mount_result = subprocess.run(overrides, check=False, capture_output=True, text=True)
    if mount_result.returncode:
        pytest.skip(f"no file system can be mounted here: {mount_result.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(folder: Path) -> None:
    with (folder / "fill").open("wb", 0) as file, suppress(OSError):
        while True:
            file.write(bytes(BLOCK))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"fill"}


def test_atomic_write_follows_no_link(tmp_path: Path) -> None:
    link_target = tmp_path / "victim"
    link_target.write_text("theirs")
    folder = tmp_path / "run"
    folder.mkdir()
    link_names = ("x", f".x.{os.getpid()}", ".x.tmp", "x.tmp", ".x.reserve", "metrics.csv", "copy")
    for name in link_names:
        (folder / name).symlink_to(link_target)
    atomic.write_atomic(folder / "x", b"ours")
    atomic.reserve_space(folder / "x", 100)
    (tmp_path / "source").write_text("copied")
    atomic.copy_atomic(tmp_path / "source", folder / "copy")
    MetricsFile(folder / "metrics.csv").append([{"step": 1}])
    assert link_target.read_text() == "theirs"
    assert (folder / "x").read_text() == "ours"
    assert (folder / "copy").read_text() == "copied"
    assert not (folder / "x").is_symlink()


def test_append_follows_no_link(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.csv")
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / "metrics.csv").symlink_to("victim")
    with pytest.raises(OSError, match="symbolic links"):
        file.append([{"step": 1}])
    assert (tmp_path / "victim").read_text() == "theirs"


def test_atomic_write_respects_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic.write_atomic(tmp_path / "x", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_atomic_write_on_a_full_disk_keeps_the_old_file(disk: Path) -> None:
    atomic.write_atomic(disk / "x", b"old")
    fill_disk(disk)
    with pytest.raises(OSError, match="No space left") as excinfo:
        atomic.write_atomic(disk / "x", bytes(2 * BLOCK))
    assert excinfo.value.errno == errno.ENOSPC
    assert (disk / "x").read_bytes() == b"old"
    assert names(disk) == {"x"}


def test_reserved_space_allows_repeated_writes(disk: Path) -> None:
    atomic.write_atomic(disk / "x", b"old")
    atomic.reserve_space(disk / "x", 8 * BLOCK)
    fill_disk(disk)
    for size in (1, 2, 3, 4):
        atomic.write_atomic(disk / "x", bytes([size]) * size * BLOCK)
        assert (disk / "x").read_bytes() == bytes([size]) * size * BLOCK, size
        (disk / "fill").unlink()
        fill_disk(disk)
    atomic.release_space(disk / "x")
    assert names(disk) == {"x"}


def test_write_larger_than_the_reserve_is_not_partial(disk: Path) -> None:
    atomic.write_atomic(disk / "x", b"old")
    atomic.reserve_space(disk / "x", BLOCK)
    fill_disk(disk)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_atomic(disk / "x", bytes(2 * BLOCK))
    assert (disk / "x").read_bytes() == b"old"
    atomic.write_atomic(disk / "x", b"new")
    assert (disk / "x").read_bytes() == b"new"


def test_reserve_fails_without_free_space(disk: Path) -> None:
    fill_disk(disk)
    with pytest.raises(OSError, match="No space left"):
        atomic.reserve_space(disk / "x", BLOCK)
    assert names(disk) == set()


def test_reserve_is_used_if_new_blocks_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, without a separate file system."""
    atomic.reserve_space(tmp_path / "x", BLOCK)

    def raise_disk_full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(atomic, "_write_new", raise_disk_full)
    write_json(tmp_path / "x", {"status": "failed"})
    assert read_json(tmp_path / "x") == {"status": "failed"}
    assert names(tmp_path) == {"x"}
    with pytest.raises(OSError, match="quota"):
        write_json(tmp_path / "x", {})


def test_exit_report_is_written_on_a_full_disk(disk: Path) -> None:
    exit_reports.prepare_reports(disk)
    exit_reports.reserve_report(disk, 3)
    fill_disk(disk)
    tail = ("x" * 500,) * 12
    exit_reports.write_report(disk, 3, Outcome("failed", "the disk is full", 3, tail))
    assert exit_reports.read_reports(disk) == [Outcome("failed", "the disk is full", 3, tail)]
    exit_reports.write_report(disk, 3, Outcome("failed", "again", 3, ("é" * 5000,)))
    assert exit_reports.read_reports(disk) == [Outcome("failed", "again", 3)]
    exit_reports.remove_reports(disk)
    assert names(disk) == set()


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "free some space"),
        (OSError(errno.EFBIG, "File too large"), "ulimit -f"),
        (Exception("File too large (os error 27)"), "ulimit -f"),
        (ValueError("I/O error: No space left on device (os error 28)"), "free some space"),
        (OSError("226472 requested and 190464 written"), "free some space"),
        (OSError(errno.EACCES, "Permission denied"), None),
        (Exception("No such file (os error 2)"), None),
        (ValueError("27"), None),
    ],
)
def test_full_disk_error_has_a_fix(error: Exception, fix: str | None) -> None:
    reason = atomic.disk_full_reason(error)
    assert (reason is None) == (fix is None)
    if fix is not None and reason is not None:
        assert fix in reason[1]
        assert fix in failures.exception_message(error)
        assert str(error) in failures.exception_message(error)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: atomic.write_atomic(path, b"x" * 100_000),
        lambda path: atomic.reserve_space(path, 100_000),
        lambda path: atomic.copy_atomic(path.with_name("large"), path),
        lambda path: MetricsFile(path).append([{"step": 10**9}] * 20_000),
    ],
    ids=["write", "reserve", "copy", "metrics"],
)
def test_file_size_limit_error_names_the_file(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    file_size_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, file_size_limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as excinfo:
            write(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, file_size_limits)
    assert excinfo.value.filename == str(tmp_path / "file")
    assert "ulimit -f" in failures.exception_message(excinfo.value)
