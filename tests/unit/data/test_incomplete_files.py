"""Files that are empty, not downloaded, or named as another kind: none is read silently."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from fixtures.text_documents import read_texts
from pyarrow import parquet

from scalewise.data.input_files import match_paths, path_issues
from scalewise.data.prepare import prepare_splits
from scalewise.data.record_files import BadRecord, iter_records
from scalewise.data.text import PretokenizedData
from scalewise.data.text_files import PLAIN_SUFFIXES, warn_once
from scalewise.data.tokenizer import tokenizer_issues
from scalewise.errors import DataError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


@pytest.fixture(autouse=True)
def _setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))
    warn_once.cache_clear()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.JSONL"])
def test_compressed_file_of_no_bytes_is_rejected(name: str, suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"{name}{suffix}", b"")
    reason = rf"{path.name}: is empty, so that it is not complete \{suffix} data; copy the file"
    with pytest.raises(DataError, match=reason):
        read_texts(path, "x")


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
@pytest.mark.parametrize(
    ("name", "content", "texts", "note"),
    [
        ("a.txt", b"", [""], "has no text"),
        ("b.txt", b"\xef\xbb\xbf", [""], "has no text"),
        ("a.jsonl", b"", [], "has no records"),
        ("b.jsonl", b" \n\n", [], "has no records"),
    ],
)
def test_file_without_text_is_noted(
    name: str,
    content: bytes,
    texts: list[str],
    note: str,
    suffix: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write(tmp_path / f"{name}{suffix}", COMPRESS.get(suffix, bytes)(content))
    with caplog.at_level(logging.WARNING):
        assert read_texts(path, "x") == texts
        assert caplog.messages == [f"{path} {note}"]
        if name.endswith(".jsonl"):
            warn_once.cache_clear()
            assert not [*iter_records(path, dict)]
            assert caplog.messages == [f"{path} {note}"] * 2


def test_zstd_file_that_begins_with_a_skippable_frame_is_read(tmp_path: Path) -> None:
    for number in (0, 15):
        frame = bytes([0x50 + number]) + b"\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
        path = write(tmp_path / "a.txt.zst", frame + COMPRESS[".zst"](b"one"))
        assert read_texts(path) == ["one"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.parquet"])
def test_pointer_of_git_lfs_is_rejected(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, POINTER)
    with pytest.raises(DataError, match=r"is only the pointer of Git LFS .* git -C \S+ lfs pull"):
        read_texts(path, "x")


def test_token_shards_are_recognized_by_their_content(tmp_path: Path) -> None:
    ids = np.arange(20, dtype=np.uint16)
    for name in ("a.npy", "b.NPY", "c.bin"):
        with open(tmp_path / name, "wb") as file:
            np.save(file, ids)
        splits = prepare_splits(PretokenizedData(4, (str(tmp_path / name),)), 20, 0)
        assert splits.train.gather([0]).tolist() == [[0, 1, 2, 3, 4]], name
    for name in ("d.bin", "e.npy"):
        data = PretokenizedData(4, (str(write(tmp_path / name, POINTER)),))
        with pytest.raises(DataError, match=r"is only the pointer of Git LFS"):
            prepare_splits(data, 1 << 16, 0)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_json_lines_without_a_byte_order_mark_are_rejected_with_a_command(
    encoding: str, tmp_path: Path
) -> None:
    text = json.dumps({"x": "Fluß"}, ensure_ascii=False) + "\n"
    path = write(tmp_path / "a.jsonl", text.encode(encoding) * 5)
    name = f"{encoding[:-3]}{encoding[-2:]}".upper()
    reason = rf"is {name} without a byte order mark.* iconv -f {name} -t UTF-8 "
    with pytest.raises(DataError, match=reason):
        read_texts(path, "x")
    with pytest.raises(DataError, match=reason):
        [*iter_records(path, dict)]


@pytest.mark.parametrize(
    ("encoding", "name"), [("iso2022_jp", "ISO-2022-JP-2"), ("iso2022_kr", "ISO-2022-KR")]
)
def test_text_in_iso_2022_is_rejected_with_its_name(
    encoding: str, name: str, tmp_path: Path
) -> None:
    text = {"iso2022_jp": "これは", "iso2022_kr": "안녕하세요"}[encoding]
    path = write(tmp_path / "a.txt", f"one\n{text}\n".encode(encoding))
    with pytest.raises(DataError, match=rf"is ISO-2022 .*: iconv -f {name} -t UTF-8 "):
        read_texts(path)


def _invalid_text() -> pyarrow.Array:
    offsets = pyarrow.array([0, 3, 4], pyarrow.int32()).buffers()[1]
    return pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"a\xffbc")]
    )


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("text", _invalid_text()),
        ("date", pyarrow.array([2**30, 1], pyarrow.date32())),
        ("time", pyarrow.array([2**62, 1], pyarrow.timestamp("ms"))),
    ],
)
def test_parquet_row_that_cannot_be_read_is_named(
    name: str, column: pyarrow.Array, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"x": ["one", "two"], name: column}), path)
    first, second = iter_records(path, dict)
    assert isinstance(first, BadRecord)
    assert str(first).startswith("a.parquet:1 cannot be read (")
    assert isinstance(second, dict)
    assert second["x"] == "two"
    if name == "text":
        with pytest.raises(DataError, match=r"row 1 cannot be read \(.*; correct the row"):
            read_texts(path, name)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("~nobody/a.txt", "no such file"),
        ("~.txt", "no such file"),
        ("x" * 5000, "File name too long"),
        ("x" * 300 + "/*.txt", "File name too long"),
    ],
)
def test_path_that_cannot_exist_is_rejected(pattern: str, reason: str) -> None:
    (issue,) = path_issues("data.paths", [pattern], PLAIN_SUFFIXES, "my/*.txt")
    assert issue.reason == reason


def test_file_name_that_begins_with_a_tilde_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "~nobody.txt", b"one")
    assert match_paths(["~nobody.txt"]) == [Path("~nobody.txt")]
    (issue,) = tokenizer_issues("~nobody")
    assert issue.reason == "no such file"
