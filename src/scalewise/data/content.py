"""Digests of file content: equal files have equal digests, wherever they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scalewise import regular_files
from scalewise.data.build_cache import build_cached
from scalewise.data.text_files import read_error

SAMPLED_BYTES = 64 * 2**20
"""Size above which only samples of a weight file are hashed."""
SAMPLES, SAMPLE_BYTES = 64, 2**18
"""Number and size of the samples of a large file, evenly spread from its first to its last byte."""


def file_digests(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file, cached while sizes and modification times stay the same.

    Raises ``DataError`` for a file that cannot be read.
    """
    if not files:
        return []
    try:
        stats = [(str(file.absolute()), file.stat()) for file in files]
    except OSError as error:
        raise read_error(Path(error.filename), error) from error
    key = {"files": [[name, it.st_size, it.st_mtime_ns, it.st_ino] for name, it in stats]}

    def write_digests(folder: Path) -> None:
        digests = [_file_digest(file) for file in files]
        (folder / "digests.json").write_text(json.dumps(digests), encoding="utf-8")

    folder = build_cached("files", key, write_digests, subfolder="digests")
    digests: list[str] = json.loads((folder / "digests.json").read_text(encoding="utf-8"))
    return digests


def digests_by_content(files: Sequence[Path]) -> dict[Path, str]:
    """Return the digest of each file, in an order that does not depend on folders."""
    digests = dict(zip(files, file_digests(files), strict=True))
    return dict(sorted(digests.items(), key=lambda item: (item[1], item[0].name)))


def combine_digests(parts: Iterable[str]) -> str:
    """Return the digest of several strings in order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def sampled_digests(files: Sequence[Path]) -> list[str]:
    """Return a digest of each file; for large files, of their size and samples of their bytes."""
    return [
        _file_digest(file) if file.stat().st_size <= SAMPLED_BYTES else _sample_digest(file)
        for file in files
    ]


def _file_digest(file: Path) -> str:
    try:
        with regular_files.open_binary(file) as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise read_error(file, error) from error


def _sample_digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with regular_files.open_binary(file) as content:
        for start in _sample_offsets(size):
            content.seek(start)
            digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(size: int) -> Iterator[int]:
    for sample in range(SAMPLES):
        yield (size - SAMPLE_BYTES) * sample // (SAMPLES - 1)
