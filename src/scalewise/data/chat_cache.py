"""Conversations in the cache, as token ids; ids without a label are negative."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from scalewise.console import ProgressLine
from scalewise.data.base import DataConfig
from scalewise.data.build_cache import build_cached
from scalewise.data.chat import ChatData
from scalewise.data.chat_formats import render_record
from scalewise.data.chat_templates import (
    ConversationTemplate,
    PlainTemplate,
    RenderedRecord,
    TextSegment,
    load_template,
    template_sources,
)
from scalewise.data.datasets import (
    ClassificationDataset,
    PackedTextDataset,
    PaddedDataset,
    Seq2SeqDataset,
)
from scalewise.data.encoding import encode_texts, special_ids, train_tokenizer
from scalewise.data.input_files import digests_by_content, file_suffix, match_paths
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.record_files import BadRecord, iter_records
from scalewise.data.tokenized_cache import is_held_out
from scalewise.data.tokenizer import TokenizerSource, tokenizer_path
from scalewise.errors import DataError
from scalewise.units import format_count

logger = logging.getLogger(__name__)

FORMAT = 6
"""Cache format; increased when the cached content changes for the same key."""
BATCH_TEXTS, BATCH_CHARACTERS = 1000, 2_000_000
"""Number of conversations that are tokenized at once, and their maximum number of characters."""
MAX_SHOWN = 3
"""Maximum number of invalid records in an error message."""

Span = tuple[int, int, bool]
"""Start and stop character, and whether the template marks them."""


@prepare_splits.register(ChatData)
def _prepare_records(config: ChatData, vocabulary: int, seed: int) -> DataSplits:
    """Render and tokenize the records into the cache, and return evenly spread splits."""
    if issues := list(config.validate()):
        raise DataError(issues)
    config.tokenizer_source.check_vocabulary(vocabulary)
    files = digests_by_content(match_paths(config.paths))
    folder = build_cached(
        config.kind,
        cache_identity(config, files),
        partial(write_records, config, list(files)),
    )
    return load_splits(folder, config)


def cache_identity(config: ChatData, files: Mapping[Path, str]) -> dict[str, object]:
    """Return the values that decide the token ids: template, tokenizer, options and files.

    ``files``: digests by path, in the order in which the files are read.
    """
    template = (
        [] if config.tokenizer is None else template_sources(tokenizer_path(config.tokenizer))
    )
    return {
        "format": FORMAT,
        "tokenizers": version("tokenizers"),
        "transformers": version("transformers"),
        "template": [[it.name, sha256(it.read_bytes()).hexdigest()] for it in template],
        "files": [[digest, file_suffix(file)] for file, digest in files.items()],
        "validation_fraction": config.validation_fraction,
        "max_bad_rows": config.max_bad_rows,
        "end_of_text": config.end_of_text,
        "ignore_keys": sorted(config.ignore_keys),
        **{name: getattr(config, name) for name in config.record_fields},
        **config.tokenizer_source.cache_identity(),
    }


def write_records(config: ChatData, files: Sequence[Path], folder: Path) -> None:
    """Write the records of files into a cache folder; raises ``DataError`` for invalid ones."""
    records, bad_records, notes = _rendered_records(files, config)
    splits = _split_records(records, config.validation_fraction)
    check_records(bad_records, splits, config)
    write_splits(splits, config.tokenizer_source, config.kind, folder, notes)


def check_records(
    bad_records: Sequence[BadRecord],
    splits: Mapping[str, Sequence[RenderedRecord]],
    config: ChatData,
) -> None:
    """Raise ``DataError`` for more invalid records than allowed, and for an empty split."""
    if len(bad_records) > config.max_bad_rows:
        listing = "; ".join(map(str, bad_records[:MAX_SHOWN])) + "; ..." * (
            len(bad_records) > MAX_SHOWN
        )
        verb = "are" if len(bad_records) > 1 else "is"
        reason = f"{_records_text(bad_records)} that {verb} not a valid "
        reason += f"{config.record_description}: {listing}"
        fix = f"correct them, or set data.max_bad_rows={len(bad_records)} to skip them"
        raise DataError.for_key("data.max_bad_rows", config.max_bad_rows, reason, fix)
    if bad_records:
        logger.warning(f"skipped {_records_text(bad_records)}, first: {bad_records[0]}")
    if not any(splits.values()):
        reason = f"have no {config.record_description}"
        raise DataError.for_key(
            "data.paths", list(config.paths), reason, "use files with at least one"
        )
    for split, texts in splits.items():
        if not texts:
            reason = f"the {split} split has no {config.record_description}"
            fix = "add more, or set data.validation_fraction=0"
            raise DataError.for_key("data.paths", list(config.paths), reason, fix)


def write_splits(
    splits: Mapping[str, Sequence[RenderedRecord]],
    tokenizer_source: TokenizerSource,
    kind: str,
    folder: Path,
    notes: Sequence[str] = (),
) -> None:
    """Write the tokenizer, and the ids, text starts and first labels of each split."""
    progress = ProgressLine(f"preparing {kind} ...")
    texts_by_split = {
        split: [text for record in records for text in record] for split, records in splits.items()
    }
    tokenizer = tokenizer_source.load() or train_tokenizer(
        tokenizer_source,
        lambda: (
            "".join(segment.text for segment in segments) for segments in texts_by_split["train"]
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    count = 0
    for split, texts in texts_by_split.items():
        starts, first_labels = [0], []
        with open(folder / f"{split}.bin", "wb") as file:
            for ids in _iter_ids(tokenizer, texts, tokenizer_source.tokenizer):
                ids.tofile(file)
                starts.append(starts[-1] + len(ids))
                first_labels.append(int(np.argmax(ids >= 0)) if (ids >= 0).any() else sys.maxsize)
                count += len(ids)
        progress.show(f"{format_count(count)} tokens")
        np.save(folder / f"{split}.starts.npy", np.array(starts, dtype=np.int64))
        np.save(folder / f"{split}.firsts.npy", np.array(first_labels, dtype=np.int64))
    end_token = tokenizer.token_to_id(tokenizer_source.end_of_text)
    metadata = {"end": end_token, "splits": list(splits), "notes": list(notes)}
    (folder / "meta.json").write_text(json.dumps(metadata), encoding="utf-8")
    progress.close("")


def _records_text(bad_records: Sequence[BadRecord]) -> str:
    return f"{len(bad_records)} record{'s' * (len(bad_records) > 1)}"


def load_splits(folder: Path, config: DataConfig) -> DataSplits:
    """Return both splits of a folder that ``write_splits`` has filled, or ``train`` alone."""
    metadata = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    datasets = {
        split: _records_within_sequence(folder, split, config, metadata)
        for split in metadata["splits"]
    }
    notes = [
        *filter(None, [_truncation_note(datasets["train"], config.sequence)]),
        *metadata.get("notes", []),
    ]
    return DataSplits(
        datasets["train"], datasets.get("validation"), folder / "tokenizer.json", "\n".join(notes)
    )


def _truncation_note(dataset: PaddedDataset, sequence: int) -> str:
    """Return a note on dropped, truncated and packed conversations."""
    reasons = {
        "dropped (answers start after the sequence)": dataset.dropped_texts,
        "truncated (longer than the sequence)": dataset.truncated_texts,
    }
    notes = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
    if isinstance(dataset, PackedTextDataset):
        notes.append(dataset.packing_note)
    prefix = f"of {dataset.total_texts:,} conversations, data.sequence={sequence}: "
    return prefix + ", ".join(notes) if notes else ""


def _records_within_sequence(
    folder: Path, split: str, config: DataConfig, metadata: dict[str, Any]
) -> PaddedDataset:
    """Return the records whose first answer starts within the sequence."""
    ids_N = np.memmap(folder / f"{split}.bin", dtype="<i4", mode="r")
    starts, first_labels = (
        np.load(folder / f"{split}.{name}.npy") for name in ("starts", "firsts")
    )
    texts: NDArray[np.int64] = np.arange(len(first_labels))
    if config.pairs:
        texts, first_labels = texts.reshape(-1, 2), first_labels.reshape(-1, 2).max(1)
    if not (config.classes or config.target_length):
        texts = texts[first_labels <= config.sequence]
    if not len(texts):
        reason = (
            f"is too short: the first answer of the {split} split starts at {first_labels.min()}"
        )
        fix = f"set data.sequence={2 * int(first_labels.min())}"
        raise DataError.for_key("data.sequence", config.sequence, reason, fix)
    if config.target_length:
        return Seq2SeqDataset(
            ids_N,
            starts,
            texts,
            config.sequence,
            metadata["end"],
            target_length=config.target_length,
        )
    dataset_class = (
        ClassificationDataset
        if config.classes
        else PackedTextDataset
        if config.packing
        else PaddedDataset
    )
    return dataset_class(ids_N, starts, texts, config.sequence, metadata["end"])


def chat_template(config: ChatData) -> ConversationTemplate:
    """Return the tokenizer's chat template, or the plain template."""
    template = None
    if config.tokenizer is not None:
        template = load_template(tokenizer_path(config.tokenizer))
    return template or PlainTemplate(config.end_of_text)


def _rendered_records(
    files: Iterable[Path], config: ChatData
) -> tuple[list[RenderedRecord], list[BadRecord], list[str]]:
    """Return the rendered records of all files, the invalid ones, and notes."""
    records: list[RenderedRecord] = []
    bad_records: list[BadRecord] = []
    template = chat_template(config)
    try:
        for file in files:
            for parsed in iter_records(
                file, lambda record: render_record(config, record, template)
            ):
                if isinstance(parsed, BadRecord):
                    bad_records.append(parsed)
                else:
                    records.append(parsed)
    finally:
        template.close()
    return records, bad_records, template_notes(template)


def template_notes(template: ConversationTemplate) -> list[str]:
    """Return the notes of a template with their counts."""
    return [f"{note}: {count:,}" for note, count in template.notes.items() if count]


def _split_records(
    records: Sequence[RenderedRecord], fraction: float
) -> dict[str, list[RenderedRecord]]:
    """Return the training records, and every 1/fraction-th record for validation."""
    if not fraction:
        return {"train": list(records)}
    splits: dict[str, list[RenderedRecord]] = {"train": [], "validation": []}
    for number, record in enumerate(records):
        splits["validation" if is_held_out(number, fraction) else "train"].append(record)
    return splits


def _iter_ids(
    tokenizer: Tokenizer, texts: Sequence[list[TextSegment]], path: str | None
) -> Iterator[NDArray[np.int32]]:
    """Yield the ids of each conversation; ``~t`` is a token t without a label.

    A text with a class label gets the special tokens of the tokenizer's post-processor. Raises
    ``DataError`` for a text that the tokenizer at ``path`` cannot encode.
    """
    prefix_ids, suffix_ids = (~np.array(ids, dtype=np.int32) for ids in special_ids(tokenizer))
    for batch in _iter_batches(texts):
        batch_parts = [list(_iter_texts(segments)) for segments in batch]
        plain_texts = [text for parts in batch_parts for text, _, label in parts if label is None]
        sources = [f"the text that begins {text[:40]!r}" for text in plain_texts]
        encodings = iter(encode_texts(tokenizer, plain_texts, sources, path))
        for parts in batch_parts:
            ids = []
            for _, spans, label in parts:
                if label is None:
                    ids.append(_mask_ids(next(encodings), spans))
                else:
                    ids = [prefix_ids, *ids, suffix_ids, np.array([label], dtype=np.int32)]
            yield np.concatenate(ids)


def _iter_batches(texts: Iterable[list[TextSegment]]) -> Iterator[list[list[TextSegment]]]:
    batch: list[list[TextSegment]] = []
    characters = 0
    for segments in texts:
        batch.append(segments)
        characters += sum(len(segment.text) for segment in segments)
        if len(batch) == BATCH_TEXTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _iter_texts(segments: Iterable[TextSegment]) -> Iterator[tuple[str, list[Span], int | None]]:
    """Yield each separately tokenized text, its spans to train on, and a class label."""
    text = ""
    spans: list[Span] = []
    for segment in segments:
        if segment.separate:
            yield text, spans, None
            text, spans = "", []
        if segment.label is not None:
            yield "", [], segment.label
            return
        if segment.trained:
            spans.append((len(text), len(text) + len(segment.text), segment.marked))
        text += segment.text
    yield text, spans, None


def _mask_ids(encoding: Encoding, spans: Iterable[Span]) -> NDArray[np.int32]:
    """Return the ids of a text, ``~t`` for tokens without a character of a span.

    If several tokens contain the last character of a marked span, only the first belongs to it, as
    in the assistant masks of transformers.
    """
    ids = np.array(encoding.ids, dtype=np.int32)
    offsets_T2 = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    is_label = np.zeros(len(ids), dtype=bool)
    for start, stop, marked in spans:
        (inside,) = np.nonzero((offsets_T2[:, 0] < stop) & (offsets_T2[:, 1] > start))
        if len(inside):
            has_last = offsets_T2[inside, 1] >= stop
            last = inside[has_last.argmax()] if marked and has_last.any() else inside[-1]
            is_label[inside[0] : last + 1] = True
    return np.where(is_label, ids, ~ids)
