"""Pictures and their captions in the cache: pixels of one size, and token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalewise.data import answers, images
from scalewise.data.base import Splits
from scalewise.data.captions import Captions
from scalewise.data.conversations import Bad, records
from scalewise.data.rows import PaddedRows
from scalewise.data.templates import plain
from scalewise.errors import DataError

PIXELS = "pixels"
"""Ending of the files of pictures, one after the other."""


class CaptionedRows(PaddedRows):
    """A caption a row, all of it to be written, and the picture that it is of."""

    def __init__(
        self,
        ids_N: NDArray[np.int32],
        starts: NDArray[np.int64],
        sequence: int,
        end: int,
        *,
        pixels_NCHW: NDArray[np.uint8],
    ) -> None:
        super().__init__(ids_N, starts, np.arange(len(starts) - 1), sequence - 1, end)
        self.target, self._pixels = sequence, pixels_NCHW

    def pictures(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns ``pixels_BCHW``, those of the rows at ``indices``."""
        return np.asarray(self._pixels[np.asarray(indices)])


def identity(spec: Captions, files: Sequence[Path]) -> dict[str, object]:
    """Returns what decides the rows: files, pictures, tokenizer, and what is held out."""
    seen = hashlib.sha256()
    for file in files:
        for told in records(file, lambda record, file=file: spec.seen(file.parent, record)):  # type: ignore[misc]
            if isinstance(told, Path) and told.is_file():
                stat = told.stat()
                seen.update(f"{told.absolute()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return answers.identity(spec, files) | {PIXELS: seen.hexdigest()}


def write(spec: Captions, files: Sequence[Path], folder: Path) -> None:
    """Fills a folder of the cache with the records of files; raises ``DataError`` for bad ones."""
    bad: list[Bad] = []
    parts: dict[str, list[answers.Written]] = {"train": [], "validation": []}
    with open(folder / f"train.{PIXELS}", "wb") as train, open(folder / f"validation.{PIXELS}", "wb") as held:
        ...
