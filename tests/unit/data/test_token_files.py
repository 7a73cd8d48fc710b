"""Tokenization continues after an interruption, with the ids of an uninterrupted one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from scalewise import compose
from scalewise.data import token_files, tokenized_cache
from scalewise.data.base import DataConfig
from scalewise.data.chunked_encoding import encode_documents
from scalewise.data.prepare import prepare_splits
from scalewise.data.text_files import Document
from scalewise.data.tokenizer import TokenizerSource

DOCUMENTS = 300


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Documents of two files, in groups of some 500 characters; some documents are empty."""
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_files, "GROUP_CHARACTERS", 500)
    for name in ("a", "b"):
        texts = [f"{name}: line {number} of a text" * (number % 7) for number in range(DOCUMENTS)]
        lines = [json.dumps({"x": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    options = ("data=text", "data.field=x", "data.vocabulary=300", "data.sequence=32")
    return compose([*options, f"data.paths=[{tmp_path}/*.jsonl]"]).data


def cached_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def prepared_folder(config: DataConfig) -> Path:
    tokenizer = prepare_splits(config, 300, 1).tokenizer
    assert tokenizer is not None
    return tokenizer.parent


class Interruption:
    """Encoder that is interrupted after some documents, and counts those that it has encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.encoded = -1, 0
        monkeypatch.setattr(tokenized_cache, "encode_documents", self)

    def __call__(
        self, tokenizer: Tokenizer, source: TokenizerSource, documents: Iterable[str | Document]
    ) -> Iterator[NDArray[np.uint32]]:
        return encode_documents(tokenizer, source, self._iterate(documents))

    def _iterate(self, documents: Iterable[str | Document]) -> Iterator[str | Document]:
        for document in documents:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            self.encoded += 1
            yield document


@pytest.mark.parametrize("stop", [0, 1, 100, DOCUMENTS - 1, DOCUMENTS + 50])
def test_interrupted_tokenization_continues_with_equal_ids(
    config: DataConfig, stop: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    encoder = Interruption(monkeypatch)
    encoder.left = stop
    with pytest.raises(KeyboardInterrupt):
        prepared_folder(config)
    encoder.left, encoder.encoded = -1, 0
    continued = prepared_folder(config)
    assert encoder.encoded <= 2 * DOCUMENTS - stop + 20  # at most one group a second time
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "other"))
    assert cached_files(continued) == cached_files(prepared_folder(config))
    assert encoder.encoded >= 2 * DOCUMENTS


def test_lost_ids_are_written_again(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a power failure the progress may be on disk, and the ids not."""
    encoder = Interruption(monkeypatch)
    encoder.left = 200
    with pytest.raises(KeyboardInterrupt):
        prepared_folder(config)
    (partial_file,) = (tmp_path / "cache" / "data").glob(".*.partial/train.bin")
    partial_file.write_bytes(partial_file.read_bytes()[:100])
    encoder.left = -1
    continued = prepared_folder(config)
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "other"))
    assert cached_files(continued) == cached_files(prepared_folder(config))


def test_failed_tokenization_starts_again(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: object) -> object:
        raise RuntimeError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(tokenized_cache, "encode_documents", fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            prepared_folder(config)
    assert not [*(tmp_path / "cache" / "data").glob(".*.partial")]


def test_continuation_is_announced(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = Interruption(monkeypatch)
    encoder.left = 100
    with pytest.raises(KeyboardInterrupt):
        prepared_folder(config)
    encoder.left = -1
    prepared_folder(config)
    assert re.search(r"preparing text \.\.\. continuing after .* tokens", capsys.readouterr().err)
