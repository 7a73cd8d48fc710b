"""Folder locks: exclusive between processes, released when the process ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalewise.launch import locks
from scalewise.launch.locks import InUseError

HOLD_LOCK = """
import sys, time
from pathlib import Path
from scalewise.launch import locks
lock = locks.acquire_lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lock_holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of ``tmp_path``."""
    overrides = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(overrides, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_lock_excludes_other_processes_until_their_end(
    tmp_path: Path, lock_holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(InUseError, match=f"process {lock_holder.pid} on {socket.gethostname()}"):
        locks.acquire_lock(tmp_path)
    owner = locks.lock_owner(tmp_path)
    assert owner is not None
    assert owner.kill_command == f"kill {lock_holder.pid}"
    lock_holder.send_signal(signal.SIGKILL)
    lock_holder.wait()
    assert locks.lock_owner(tmp_path) is None
    with locks.acquire_lock(tmp_path) as lock:
        assert lock.is_held
        assert json.loads((tmp_path / locks.FILE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_lock_excludes_its_own_process(tmp_path: Path) -> None:
    with locks.acquire_lock(tmp_path), pytest.raises(InUseError):
        locks.acquire_lock(tmp_path)
    locks.acquire_lock(tmp_path).release()


def test_lock_check_leaves_nothing(tmp_path: Path) -> None:
    assert locks.lock_owner(tmp_path) is None
    assert locks.lock_owner(tmp_path / "absent") is None
    assert list(tmp_path.iterdir()) == []


def test_lock_is_not_inherited_by_a_fork(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with locks.acquire_lock(tmp_path):
        child = os.fork()
        if child == 0:
            os.read(reader, 1)
            os._exit(0)
    assert locks.lock_owner(tmp_path) is None
    with locks.acquire_lock(tmp_path) as lock:
        assert lock.is_held
    os.write(writer, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(reader)
    os.close(writer)


def test_lock_of_another_host_names_the_host(tmp_path: Path) -> None:
    with locks.acquire_lock(tmp_path):
        (tmp_path / locks.FILE).write_text('{"pid": 12, "host": "node7"}')
        owner = locks.lock_owner(tmp_path)
    assert owner is not None
    assert (str(owner), owner.kill_command) == ("process 12 on node7", "ssh node7 kill 12")


@pytest.mark.parametrize("code", sorted(locks.UNSUPPORTED))
def test_lock_is_skipped_without_file_locks(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock = locks.acquire_lock(tmp_path)
    assert not lock.is_held
    lock.release()
    assert locks.lock_owner(tmp_path) is None


def test_lock_is_skipped_in_a_read_only_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*arguments: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    assert not locks.acquire_lock(tmp_path).is_held
