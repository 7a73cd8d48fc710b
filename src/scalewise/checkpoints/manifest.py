"""Checkpoint folders of a run: names, manifests and checksums, without torch.

``manifest.json`` lists sizes and checksums of the files of a checkpoint; ``store`` reads and writes
their content.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from scalewise import regular_files
from scalewise.errors import CheckpointError
from scalewise.path_lock import PathLock
from scalewise.run_files import read_json, write_json

FORMAT = "scalewise-checkpoint"
VERSION = 2
TRAINING, MANIFEST = "training.pt", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_SHARD_NAME = re.compile(r"(?:.*/)?shard-(\d+)-")
_THREADS = 8
"""Threads that compute checksums, which release Python's lock."""

RECOVERY_FIX = "use an earlier checkpoint, or restore this one from a copy"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Path of the checkpoint of ``step`` in a ``checkpoints`` folder."""
    return folder / f"step-{step:08d}"


def verify_checkpoint(path: Path, rank: int = 0, world_size: int = 1) -> int:
    """Return the step of a checkpoint; raise ``CheckpointError`` if it is damaged.

    Each of ``world_size`` ranks reads other files.
    """
    for name, reason in damaged_files(path, rank, world_size):
        raise CheckpointError.for_key(
            "resume", path, f"is damaged ({name}: {reason})", RECOVERY_FIX
        )
    return step_of(path)


def step_of(path: Path) -> int:
    """Step of a checkpoint in its manifest; raises ``CheckpointError`` without a valid one."""
    return _manifest(path)[0]


def damaged_files(path: Path, rank: int = 0, world_size: int = 1) -> Iterator[tuple[str, str]]:
    """Compare the files of a checkpoint with its manifest; yield (name, damage).

    Raises:
        CheckpointError: the folder has no valid manifest.
    """
    recorded_files = _manifest(path)[1]
    names = files_of_rank(recorded_files, rank, world_size)
    with ThreadPoolExecutor(_THREADS) as pool:
        damages = pool.map(lambda name: _damage(path / name, recorded_files[name]), names)
        yield from ((name, damage) for name, damage in zip(names, damages, strict=True) if damage)


def _damage(file: Path, recorded: dict[str, int]) -> str:
    expected = recorded["bytes"]
    if not file.is_file():
        return "is missing"
    if (size := file.stat().st_size) != expected:
        return f"has {size} of {expected} bytes"
    return "" if fingerprint(file) == recorded else "has another checksum"


def files_of_rank(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Files that a rank writes: its shards; for rank 0 also files without a shard number."""
    shards = {name: _SHARD_NAME.match(name) for name in names}
    return [
        name
        for name, shard in shards.items()
        if (int(shard[1]) - 1 if shard else 0) % world_size == rank
    ]


def fingerprints(folder: Path, rank: int = 0, world_size: int = 1) -> dict[str, dict[str, int]]:
    """Fingerprints of the files in a checkpoint folder that a rank wrote, by name."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    names = files_of_rank((str(file.relative_to(folder)) for file in files), rank, world_size)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(fingerprint, map(folder.joinpath, names)), strict=True))


def _manifest(path: Path) -> tuple[int, dict[str, Any]]:
    """Step of a checkpoint, and the fingerprints of its files by name."""
    if not path.is_dir():
        raise CheckpointError.for_key("resume", path, "there is no such checkpoint folder")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError.for_key(
            "resume",
            path,
            f"is not a scalewise checkpoint (no {MANIFEST} of its format)",
            RECOVERY_FIX,
        )
    if manifest.get("version") != VERSION:
        raise CheckpointError.for_key(
            "resume", path, f"has format version {manifest.get('version')}, not {VERSION}"
        )
    files, step = manifest.get("files"), manifest.get("step")
    if step is None or files is None or TRAINING not in files:
        raise CheckpointError.for_key("resume", path, f"its {MANIFEST} is damaged", RECOVERY_FIX)
    return step, files


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in a ``checkpoints`` folder by step, in ascending order."""
    checkpoints = {
        int(match[1]): child
        for child in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(child.name)) and (child / MANIFEST).is_file()
    }
    return dict(sorted(checkpoints.items()))


def lock_checkpoints(folder: Path) -> dict[int, PathLock]:
    """Shared locks on the checkpoints in a ``checkpoints`` folder, by step in ascending order.

    ``prune_checkpoints`` of a running training keeps the checkpoints that are locked.
    """
    while True:
        paths, locks = list_checkpoints(folder), {}
        with suppress(FileNotFoundError, BlockingIOError):  # removed since it was listed
            for step, path in paths.items():
                locks[step] = PathLock(path, shared=True)
        if all(locks.get(step) and locks[step].is_current for step in paths):
            return locks


def newest_checkpoint(folder: Path) -> Path | None:
    """Newest undamaged checkpoint in ``folder``; None: there is none."""
    for path in reversed(list_checkpoints(folder).values()):
        try:
            verify_checkpoint(path)
        except CheckpointError:
            continue
        return path
    return None


def adopt_checkpoint(path: Path, folder: Path) -> None:
    """Add a checkpoint to ``folder`` by hard links, or by copying if links are not supported."""
    if (folder / path.name).exists():
        return
    partial = folder / f".partial-{path.name}"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(path, partial, copy_function=_link_or_copy)
    partial.rename(folder / path.name)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or no support for links
        shutil.copy2(source, target)


def fingerprint(file: Path) -> dict[str, int]:
    """Size and checksum of a file; its content is written to the disk."""
    checksum, size = 0, 0
    with regular_files.open_binary(file) as stream:
        while block := stream.read(1 << 22):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
        os.fsync(stream.fileno())
    return {"bytes": size, "crc32": checksum}


def best_checkpoint(folder: Path) -> tuple[int, float] | None:
    """Step and validation loss of the best checkpoint; None: there is none."""
    best = read_json(folder / "best.json")
    return (best["step"], best["val/loss"]) if best else None


def mark_best(folder: Path, step: int, loss: float) -> None:
    """Record the best checkpoint in ``best.json``."""
    write_json(folder / "best.json", {"step": step, "val/loss": loss})


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints and the best one; 0 keeps all.

    Keeps a checkpoint that another process reads; the next call removes it.
    """
    if not keep:
        return
    best = best_checkpoint(folder)
    for step, path in list(list_checkpoints(folder).items())[:-keep]:
        if best is not None and step == best[0]:
            continue
        with suppress(BlockingIOError), PathLock(path):
            removed = folder / f".partial-{path.name}"  # a half-removed folder must not look valid
            path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
