"""Images and captions in the cache: pixels of one size, and token ids."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalewise.data import chat_cache, image_io
from scalewise.data.build_cache import build_cached
from scalewise.data.chat import CaptionData
from scalewise.data.chat_formats import record_keys
from scalewise.data.chat_templates import (
    ConversationTemplate,
    PlainTemplate,
    RenderedRecord,
    TextSegment,
)
from scalewise.data.datasets import PaddedDataset
from scalewise.data.input_files import (
    combine_digests,
    digests_by_content,
    file_digests,
    match_paths,
)
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.record_files import BadRecord, iter_records
from scalewise.data.tokenized_cache import is_held_out
from scalewise.errors import DataError
from scalewise.regular_files import expand_home

PIXELS_SUFFIX = "pixels"
"""Suffix of the files with the pixels of all images."""


class CaptionDataset(PaddedDataset):
    """One caption per sample, of which all tokens are labels, and its image."""

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
        """Return ``pixels_BCHW``, the images of the samples at ``indices``."""
        return np.asarray(self._pixels[np.asarray(indices)])


def cache_identity(config: CaptionData, files: Mapping[Path, str]) -> dict[str, object]:
    """Return the values that decide the samples: files, images, tokenizer and options."""
    image_paths = [
        parsed
        for file in files
        for parsed in iter_records(file, partial(_image_path, config, file.parent))
        if isinstance(parsed, Path) and os.path.isfile(parsed)  # false for a name that is too long
    ]
    images_digest = combine_digests(file_digests(image_paths))
    return chat_cache.cache_identity(config, files) | {PIXELS_SUFFIX: images_digest}


def write_records(config: CaptionData, files: Sequence[Path], folder: Path) -> None:
    """Write the records of files into a cache folder; raises ``DataError`` for invalid ones.

    Only one image at a time is in memory.
    """
    captions: dict[str, list[RenderedRecord]] = {"train": []}
    if config.validation_fraction:
        captions["validation"] = []
    bad_records: list[BadRecord] = []
    template = PlainTemplate(config.end_of_text)  # only for its notes: captions are not rendered
    with ExitStack() as opened:
        pixels = {
            split: opened.enter_context(open(folder / f"{split}.{PIXELS_SUFFIX}", "wb"))
            for split in captions
        }
        for parsed in _iter_records(files, config, template):
            if isinstance(parsed, BadRecord):
                bad_records.append(parsed)
                continue
            count = sum(map(len, captions.values()))
            split = "validation" if is_held_out(count, config.validation_fraction) else "train"
            pixels_CHW, rendered = parsed
            pixels_CHW.tofile(pixels[split])
            captions[split].append(rendered)
    chat_cache.check_records(bad_records, captions, config)
    chat_cache.write_splits(
        captions, config.tokenizer_source, config.kind, folder, chat_cache.template_notes(template)
    )


def _iter_records(
    files: Sequence[Path], config: CaptionData, template: PlainTemplate
) -> Iterator[BadRecord | tuple[NDArray[np.uint8], RenderedRecord]]:
    """Yield the image and the caption of each record, or the reason why it is invalid."""
    for file in files:

        def parse_record(
            record: dict[str, Any], image_folder: Path = file.parent
        ) -> tuple[NDArray[np.uint8], RenderedRecord]:
            rendered = _render_caption(config, record, template)
            pixels_CHW = image_io.read_image(_image_path(config, image_folder, record))
            return image_io.resize_image(pixels_CHW, config.image_size), rendered

        yield from iter_records(file, parse_record)


def load_splits(folder: Path, config: CaptionData) -> DataSplits:
    """Return both splits of a folder that ``write_records`` has filled, or ``train`` alone."""
    metadata = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    datasets = {
        split: _load_dataset(folder, split, config, metadata["end"]) for split in metadata["splits"]
    }
    truncated, count = datasets["train"].truncated_texts, len(datasets["train"])
    note = (
        f"of {count:,} captions, data.sequence={config.sequence}: {truncated:,} truncated"
        if truncated
        else ""
    )
    notes = "\n".join(filter(None, [note, *metadata["notes"]]))
    return DataSplits(
        datasets["train"], datasets.get("validation"), folder / "tokenizer.json", notes
    )


def _load_dataset(folder: Path, split: str, config: CaptionData, end_token: int) -> CaptionDataset:
    ids_N = np.memmap(folder / f"{split}.bin", dtype="<i4", mode="r")
    starts = np.load(folder / f"{split}.starts.npy")
    shape = (len(starts) - 1, 3, config.image_size, config.image_size)
    pixels_NCHW = np.memmap(
        folder / f"{split}.{PIXELS_SUFFIX}", dtype=np.uint8, mode="r", shape=shape
    )
    return CaptionDataset(ids_N, starts, config.sequence, end_token, pixels_NCHW=pixels_NCHW)


@prepare_splits.register(CaptionData)
def _prepare_captions(config: CaptionData, vocabulary: int, seed: int) -> DataSplits:
    """Read images and captions into the cache, and return evenly spread splits."""
    if issues := list(config.validate()):
        raise DataError(issues)
    config.tokenizer_source.check_vocabulary(vocabulary)
    files = digests_by_content(match_paths(config.paths))
    identity = cache_identity(config, files)
    folder = build_cached(config.kind, identity, partial(write_records, config, list(files)))
    return load_splits(folder, config)


def _render_caption(
    config: CaptionData, record: dict[str, Any], template: ConversationTemplate
) -> RenderedRecord:
    """Return the caption, of which all tokens are trained on; raises ``ValueError``."""
    caption = _read_text(record, config.caption)
    for key in record:
        if key not in (config.picture, config.caption):
            record_keys(config, template).count_ignored(key)
    if any("\ud800" <= character <= "\udfff" for character in caption):
        raise ValueError("has a lone surrogate (half a character)")
    return ([TextSegment(caption + config.end_of_text, trained=True)],)


def _image_path(config: CaptionData, folder: Path, record: dict[str, Any]) -> Path:
    """Return the path of a record's image; raises ``ValueError``."""
    return folder / expand_home(_read_text(record, config.picture))


def _read_text(record: dict[str, Any], key: str) -> str:
    """Return the text under a key of a record; raises ``ValueError`` if there is none."""
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        keys = ", ".join(map(str, record)) or "none"
        raise ValueError(f"has no text in {key!r}; its keys: {keys}")
    return value
