"""Compressed text files, which are decompressed while they are read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from scalewise import regular_files
from scalewise.errors import DataError
from scalewise.typed_override import shell_word

COMPRESSED_SUFFIXES = frozenset({".bz2", ".gz", ".xz", ".zst"})
"""Suffixes of compressed files, which follow that of the content, as in ``a.jsonl.gz``."""
MAGIC_BYTES = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
}
"""Compressed formats by the first bytes of a file."""
BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
"""Bytes 4 to 9 of a bzip2 file with and without content; text may begin with its first three."""
ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""First bytes of a zstd file that begins with a skippable frame, as those of pzstd."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the file that Git stores instead of a large file."""
MAX_LINE_BYTES = 1 << 28
"""Maximum size of a line of a compressed file, whose size on disk says nothing about it."""


@contextmanager
def open_content(path: Path) -> Iterator[io.BufferedReader]:
    """Open the content of a file for reading from its start, decompressed if it is compressed.

    Raises ``DataError`` for a zip archive, for a damaged file, and for zstd without pyarrow.
    """
    name = compression_name(path)
    check_pointer("data.paths", path)
    if name is None and path.suffix.lower() in COMPRESSED_SUFFIXES and not path.stat().st_size:
        reason = f"is empty, so that it is not complete {path.suffix.lower()} data"
        raise DataError.for_key("data.paths", path, reason, "copy the file again, or omit it")
    if name is None:
        with regular_files.open_binary(path) as file:
            yield file
        return
    if name == "zip":
        name = path.stem if path.suffix.lower() in COMPRESSED_SUFFIXES else path.name
        unpacked = path.with_name(f"{Path(name).stem}-unpacked{Path(name).suffix}")
        command = f"unzip -p {shell_word(str(path))} > {shell_word(str(unpacked))}"
        raise DataError.for_key("data.paths", path, "is zip data", f"unpack it: {command}")
    try:
        with regular_files.open_binary(path) as file, _decompress(name, path, file) as content:
            yield content
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        reason = f"is not complete {name} data ({error})"
        raise DataError.for_key("data.paths", path, reason, "copy the file again") from error


def iter_byte_lines(path: Path, skipped: int) -> Iterator[bytes]:
    """Yield the lines of the content of a file, after its first ``skipped`` bytes.

    Raises ``DataError`` for a line of a compressed file of more than ``MAX_LINE_BYTES``.
    """
    limit = -1 if compression_name(path) is None else MAX_LINE_BYTES
    with open_content(path) as file:
        file.read(skipped)
        number = 0
        while line := file.readline(limit):
            number += 1
            if len(line) == limit and not line.endswith(b"\n"):
                reason = f"line {number} has more than {limit >> 20} MiB"
                raise DataError.for_key("data.paths", path, reason, "split the line")
            yield line


def compression_name(path: Path) -> str | None:
    """Return the name of the format of a compressed file; None for any other file."""
    with regular_files.open_binary(path) as file:
        head = file.read(16)
    for magic, name in MAGIC_BYTES.items():
        if head.startswith(magic):
            is_text = name == "bzip2" and head[4:10] not in BZIP2_BLOCKS
            return None if is_text else name
    return "zstd" if ZSTD_SKIPPABLE.match(head) else None


def check_pointer(key: str, path: Path) -> None:
    """Raise ``DataError`` for a file that Git LFS has not downloaded, which is a short text."""
    with regular_files.open_binary(path) as file:
        if file.read(len(LFS_POINTER)) != LFS_POINTER:
            return
    reason = "is only the pointer of Git LFS to the file"
    fix = f"download it: git -C {shell_word(str(path.parent))} lfs pull"
    raise DataError.for_key(key, path, reason, fix)


def _decompress(name: str, path: Path, file: io.BufferedReader) -> io.BufferedReader:
    if name == "zstd":
        return _decompress_zstd(path, file)
    open_stream: dict[str, Callable[[Any], Any]] = {
        "gzip": gzip.open,
        "bzip2": bz2.open,
        "xz": lzma.open,
    }
    return io.BufferedReader(open_stream[name](file))


def _decompress_zstd(path: Path, file: io.BufferedReader) -> io.BufferedReader:
    try:
        import pyarrow
    except ImportError as error:
        fix = "pip install 'scalewise[hf]'"
        raise DataError.for_key("data.paths", path, "reading zstd requires pyarrow", fix) from error
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd")
    return io.BufferedReader(cast(io.RawIOBase, stream))
