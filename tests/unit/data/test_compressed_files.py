"""Compressed text files are read as their content, and damaged ones are rejected."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shlex
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from fixtures.text_documents import read_texts

from scalewise import compose
from scalewise.data import compressed_files
from scalewise.data.input_files import file_suffix
from scalewise.data.prepare import prepare_splits
from scalewise.errors import ConfigError, DataError

TEXT = "naïve café\nzwei Zeilen €\n" * 5000


def compress_zstd(content: bytes) -> bytes:
    """Return a zstd frame."""
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as file:
        file.write(content)
    return buffer.getvalue().to_pybytes()


FORMATS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": compress_zstd,
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_compressed_file_has_the_documents_of_its_content(
    tmp_path: Path, suffix: str, encoding: str
) -> None:
    lines = "".join(json.dumps({"x": line}, ensure_ascii=False) + "\n" for line in TEXT.split())
    for name, content in (("a.txt", TEXT), ("a.jsonl", lines)):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(FORMATS[suffix](content.encode(encoding)))
        (tmp_path / name).write_text(content, encoding=encoding, newline="")
        texts = read_texts(path, "x")
        assert texts == read_texts(tmp_path / name, "x")
        assert texts[0]


@pytest.mark.parametrize("suffix", FORMATS)
def test_damaged_file_is_rejected(tmp_path: Path, suffix: str) -> None:
    content = FORMATS[suffix](json.dumps({"x": TEXT}).encode())
    damaged = {"truncated": content[:-20], "overwritten": content[:60] + b"damage" + content[66:]}
    for name, data in damaged.items():
        path = tmp_path / f"{name}.jsonl{suffix}"
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"is not complete \w+ data .*; copy the file again"):
            read_texts(path, "x")


@pytest.mark.parametrize("name", ["it's.txt", "it's.txt.gz"])
def test_zip_archive_is_rejected_with_its_fix(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("b.txt", "one")
    with pytest.raises(DataError, match=r"is zip data; unpack it: unzip -p \S+ > ") as error:
        read_texts(path)
    command = error.value.issues[0].fix.removeprefix("unpack it: unzip -p ")
    assert shlex.split(command) == [str(path), ">", str(tmp_path / "it's-unpacked.txt")]


def test_zstd_without_pyarrow_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.zst").write_bytes(compress_zstd(b"one"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"requires pyarrow; pip install 'scalewise\[hf\]'"):
        read_texts(tmp_path / "a.txt.zst")


def test_long_line_of_a_compressed_file_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_files, "MAX_LINE_BYTES", 1 << 20)
    content = b'{"x": "one"}\n' + b" " * (1 << 21)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="line 2 has more than 1 MiB; split the line"):
        read_texts(tmp_path / "a.jsonl.gz", "x")


def test_invalid_text_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\ncaf\xe9\n"))
    with pytest.raises(DataError, match=r"line 3 is not UTF-8 .*; decompress the file, and"):
        read_texts(tmp_path / "a.txt.gz")


def test_text_that_begins_as_bzip2_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("BZhang wrote this")
    assert read_texts(tmp_path / "a.txt") == ["BZhang wrote this"]


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("a.jsonl.gz", ".jsonl"),
        ("a.TXT.ZST", ".txt"),
        ("a.b.json.xz", ".json"),
        ("a.gz", ".gz"),
        ("a.bin.gz", ".gz"),
        ("a.parquet.zst", ".zst"),
    ],
)
def test_suffix_of_a_compressed_file_is_that_of_its_text(name: str, suffix: str) -> None:
    assert file_suffix(Path(name)) == suffix


def test_compressed_files_train_as_their_content(tmp_path: Path) -> None:
    lines = [json.dumps({"x": f"line {number} of a text"}) for number in range(400)]
    content = "\n".join(lines).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    options = ("data=text", "data.field=x", "data.vocabulary=300", "data.sequence=32")
    plain, compressed = (
        prepare_splits(compose([*options, f"data.paths=[{tmp_path / name}]"]).data, 300, 1)
        for name in ("a.jsonl", "b.jsonl.gz")
    )
    assert len(plain.train) == len(compressed.train) > 10
    indices = range(10)
    assert (compressed.train.gather(indices) == plain.train.gather(indices)).all()


@pytest.mark.parametrize("data", ["tokens", "chat"])
def test_compressed_files_of_other_kinds_are_rejected(tmp_path: Path, data: str) -> None:
    path = tmp_path / ("a.bin.gz" if data == "tokens" else "a.parquet.gz")
    path.write_bytes(gzip.compress(bytes(1000)))
    with pytest.raises(ConfigError, match=r"unknown suffix '\.\w+\.gz'"):
        compose([f"data={data}", f"data.paths=[{path}]"])
