"""Pictures and their captions in the cache: pixels of one size, and token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalewise.data import chat_cache, content, image_io
from scalewise.data.base import DataSplits
from scalewise.data.captions import CaptionData
from scalewise.data.chat_formats import BadRecord, iter_records
from scalewise.data.chat_templates import PlainTemplate
from scalewise.data.datasets import PaddedDataset

PIXELS = "pixels"
"""Ending of the files of pictures, one after the other."""


class CaptionDataset(PaddedDataset):
    """A caption a row, all of it to be written, and the picture that it is of."""

    def __init__(
        self,
        ids_N: NDArray[np.int32],
        starts: NDArray[np.int64],
        sequence: int,
        end_token: int,
        *,
        pixels_NCHW: NDArray[np.uint8],
    ) -> None:
        super().__init__(ids_N, starts, np.arange(len(starts) - 1), sequence - 1, end_token)
        self.target_length, self._pixels = sequence, pixels_NCHW

    def gather_pixels(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns ``pixels_BCHW``, those of the rows at ``indices``."""
        return np.asarray(self._pixels[np.asarray(indices)])


def cache_identity(config: CaptionData, files: Mapping[Path, str]) -> dict[str, object]:
    """Returns what decides the rows: files, pictures, tokenizer, and what is held out."""
    pictures = [
        found
        for file in files
        for found in iter_records(file, partial(config.image_path, file.parent))
        if isinstance(found, Path) and found.is_file()
    ]
    seen = content.combine_digests(content.file_digests(pictures))
    return chat_cache.cache_identity(config, files) | {PIXELS: seen}


def write_records(config: CaptionData, files: Sequence[Path], folder: Path) -> None:
    """Fills a folder of the cache with the records of files; raises ``DataError`` for bad ones.

    Of all pictures one is held at a time.
    """
    found: dict[str, list[chat_cache.Written]] = {"train": []}
    if config.validation_fraction:
        found["validation"] = []
    bad: list[BadRecord] = []
    template = PlainTemplate(
        config.end_of_text
    )  # for its notes: captions are written as they stand
    with ExitStack() as opened:
        pixels = {
            split: opened.enter_context(open(folder / f"{split}.{PIXELS}", "wb")) for split in found
        }
        for told in _iter_records(files, config, template):
            if isinstance(told, BadRecord):
                bad.append(told)
                continue
            count = sum(map(len, found.values()))
            split = (
                "validation"
                if chat_cache.is_held_out(count, config.validation_fraction)
                else "train"
            )
            pixels_CHW, pieces = told
            pixels_CHW.tofile(pixels[split])
            found[split].append(pieces)
    chat_cache.check_records(bad, found, config)
    chat_cache.write_split(
        found, config.tokenizer_source, config.kind, folder, chat_cache.template_notes(template)
    )


def _iter_records(
    files: Sequence[Path], config: CaptionData, template: PlainTemplate
) -> Iterator[BadRecord | tuple[NDArray[np.uint8], chat_cache.Written]]:
    """Yields the picture and the caption of each record, or what is bad about it."""
    for file in files:

        def told(
            record: dict[str, Any], beside: Path = file.parent
        ) -> tuple[NDArray[np.uint8], chat_cache.Written]:
            written = config.render_record(record, template)
            pixels_CHW = image_io.read_image(config.image_path(beside, record))
            return image_io.resize_image(pixels_CHW, config.image_size), written

        yield from iter_records(file, told)


def load_splits(folder: Path, config: CaptionData) -> DataSplits:
    """Returns the rows of both splits of a folder that ``write`` has filled, or of one alone."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    rows = {split: _load_rows(folder, split, config, meta["end"]) for split in meta["splits"]}
    cut, count = rows["train"].truncated_texts, len(rows["train"])
    note = (
        f"of {count:,} captions, data.sequence={config.sequence}: {cut:,} cut (longer)"
        if cut
        else ""
    )
    notes = "\n".join(filter(None, [note, *meta["notes"]]))
    return DataSplits(rows["train"], rows.get("validation"), folder / "tokenizer.json", notes)


def _load_rows(folder: Path, split: str, config: CaptionData, end_token: int) -> CaptionDataset:
    ids_N = np.memmap(folder / f"{split}.bin", dtype="<i4", mode="r")
    starts = np.load(folder / f"{split}.starts.npy")
    shape = (len(starts) - 1, 3, config.image_size, config.image_size)
    pixels_NCHW = np.memmap(folder / f"{split}.{PIXELS}", dtype=np.uint8, mode="r", shape=shape)
    return CaptionDataset(ids_N, starts, config.sequence, end_token, pixels_NCHW=pixels_NCHW)
