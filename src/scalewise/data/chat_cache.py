"""Conversations in the cache as token ids, of which those that are no answer lie below zero."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scalewise.console import print_lines
from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.chat_formats import BadRecord, iter_records
from scalewise.data.chat_templates import (
    ConversationTemplate,
    PlainTemplate,
    TemplatePiece,
    load_template,
    template_sources,
)
from scalewise.data.datasets import AnswerDataset, ClassificationDataset, PaddedDataset
from scalewise.data.encoding import encode_texts, special_ids
from scalewise.data.packing import PackedTextDataset
from scalewise.data.tokenization import TokenizerSource
from scalewise.data.tokenized_cache import TokenizeProgress
from scalewise.data.tokenizer_files import tokenizer_path
from scalewise.errors import DataError
from scalewise.units import format_count

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from scalewise.data.chat import ChatData

FORMAT = 4
"""Raised when the content of the cached files changes for the same key."""
TOGETHER, TOGETHER_CHARACTERS = 1000, 2_000_000
"""Conversations that are tokenized at once, and the characters after which no more are added."""
TOLD = 3
"""Bad records that an error names."""

Span = tuple[int, int, bool]
"""Characters from a start to a stop, and whether the template marks them."""
Written = tuple[list[TemplatePiece], ...]
"""What a record is: a conversation, or the two of a pair."""


def cache_identity(config: ChatData, files: Mapping[Path, str]) -> dict[str, object]:
    """Returns what decides the ids: template, tokenizer, what is held out, and files.

    ``files``: with their digests, in the order in which they are read.
    """
    template = (
        [] if config.tokenizer is None else template_sources(tokenizer_path(config.tokenizer))
    )
    return {
        "format": FORMAT,
        "tokenizers": version("tokenizers"),
        "transformers": version("transformers"),
        "template": [[it.name, sha256(it.read_bytes()).hexdigest()] for it in template],
        "files": [[digest, file.suffix.lower()] for file, digest in files.items()],
        "validation_fraction": config.validation_fraction,
        "max_bad_rows": config.max_bad_rows,
        "end_of_text": config.end_of_text,
        "ignore_keys": sorted(config.ignore_keys),
        **{name: getattr(config, name) for name in config.record_fields},
        **config.tokenizer_source.cache_identity(),
    }


def write_records(config: ChatData, files: Sequence[Path], folder: Path) -> None:
    """Fills a folder of the cache with the records of files; raises ``DataError`` for bad ones."""
    found, bad, notes = _rendered_records(files, config)
    parts = _split_records(found, config.validation_fraction)
    check_records(bad, parts, config)
    write_split(parts, config.tokenizer_source, config.kind, folder, notes)


def check_records(
    bad_records: Sequence[BadRecord], splits: Mapping[str, Sequence[Written]], config: ChatData
) -> None:
    """Raises ``DataError`` for more bad records than are left out, and for a split without any."""
    if len(bad_records) > config.max_bad_rows:
        named = "; ".join(map(str, bad_records[:TOLD])) + "; ..." * (len(bad_records) > TOLD)
        are = "are" if len(bad_records) > 1 else "is"
        reason = f"{_count_tokens(bad_records)} that {are} no {config.record_description}: {named}"
        fix = f"mend them, or leave them out with data.max_bad_rows={len(bad_records)}"
        raise DataError.for_key("data.max_bad_rows", config.max_bad_rows, reason, fix)
    if bad_records:
        print_lines(
            f"left out {_count_tokens(bad_records)}, the first {bad_records[0]}", stderr=True
        )
    if not any(splits.values()):
        reason = f"hold no {config.record_description}"
        raise DataError.for_key(
            "data.paths", list(config.paths), reason, "give files that hold some"
        )
    for split, texts in splits.items():
        if not texts:
            reason = f"the {split} split has no {config.record_description}"
            fix = "give more, or data.validation_fraction=0"
            raise DataError.for_key("data.paths", list(config.paths), reason, fix)


def write_split(
    splits: Mapping[str, Sequence[Written]],
    tokenizer_source: TokenizerSource,
    kind: str,
    folder: Path,
    notes: Sequence[str] = (),
) -> None:
    """Writes the tokenizer, ids and where each text starts, for each split; and notes."""
    progress = TokenizeProgress(kind)
    flat = {split: [text for each in part for text in each] for split, part in splits.items()}
    tokenizer = tokenizer_source.load() or tokenizer_source.train(
        lambda: ("".join(piece.text for piece in pieces) for pieces in flat["train"])
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    count = 0
    for split, texts in flat.items():
        starts, firsts = [0], []
        with open(folder / f"{split}.bin", "wb") as file:
            for ids in _iter_ids(tokenizer, texts, tokenizer_source.tokenizer):
                ids.tofile(file)
                starts.append(starts[-1] + len(ids))
                firsts.append(int(np.argmax(ids >= 0)) if (ids >= 0).any() else sys.maxsize)
                count += len(ids)
        progress.show(f"{format_count(count)} tokens")
        np.save(folder / f"{split}.starts.npy", np.array(starts, dtype=np.int64))
        np.save(folder / f"{split}.firsts.npy", np.array(firsts, dtype=np.int64))
    end = tokenizer.token_to_id(tokenizer_source.end_of_text)
    meta = {"end": end, "splits": list(splits), "notes": list(notes)}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    progress.close("")


def _count_tokens(bad_records: Sequence[BadRecord]) -> str:
    return f"{len(bad_records)} record{'s' * (len(bad_records) > 1)}"


def load_splits(folder: Path, config: DataConfig) -> DataSplits:
    """Returns the rows of both splits of a folder that ``keep`` has filled, or of one alone."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    rows = {
        split: _records_within_sequence(folder, split, config, meta) for split in meta["splits"]
    }
    notes = [
        *filter(None, [_truncation_note(rows["train"], config.sequence)]),
        *meta.get("notes", []),
    ]
    return DataSplits(
        rows["train"], rows.get("validation"), folder / "tokenizer.json", "\n".join(notes)
    )


def _truncation_note(dataset: PaddedDataset, sequence: int) -> str:
    """Returns how many conversations no row holds, or not all of, and how full packed rows are."""
    reasons = {
        "left out (answers begin past the row)": dataset.dropped_texts,
        "cut (longer than the row)": dataset.truncated_texts,
    }
    told = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
    if isinstance(dataset, PackedTextDataset):
        told.append(dataset.packing_note)
    of_all = f"of {dataset.total_texts:,} conversations, data.sequence={sequence}: "
    return of_all + ", ".join(told) if told else ""


def _records_within_sequence(
    folder: Path, split: str, config: DataConfig, metadata: dict[str, Any]
) -> PaddedDataset:
    """Returns the records of which each first answer begins within a row."""
    ids_N = np.memmap(folder / f"{split}.bin", dtype="<i4", mode="r")
    starts, firsts = (np.load(folder / f"{split}.{name}.npy") for name in ("starts", "firsts"))
    texts: NDArray[np.int64] = np.arange(len(firsts))
    if config.pairs:
        texts, firsts = texts.reshape(-1, 2), firsts.reshape(-1, 2).max(1)
    if not (config.classes or config.target_length):
        texts = texts[firsts <= config.sequence]
    if not len(texts):
        reason = f"no answer of the {split} split begins so early; one begins at {firsts.min()}"
        fix = f"give data.sequence={2 * int(firsts.min())}"
        raise DataError.for_key("data.sequence", config.sequence, reason, fix)
    if config.target_length:
        return AnswerDataset(
            ids_N,
            starts,
            texts,
            config.sequence,
            metadata["end"],
            target_length=config.target_length,
        )
    kind = (
        ClassificationDataset
        if config.classes
        else PackedTextDataset
        if config.packing
        else PaddedDataset
    )
    return kind(ids_N, starts, texts, config.sequence, metadata["end"])


def chat_template(config: ChatData) -> ConversationTemplate:
    """Returns what writes a conversation down: the tokenizer's own template, or plain words."""
    own = None
    if config.tokenizer is not None:
        own = load_template(tokenizer_path(config.tokenizer))
    return own or PlainTemplate(config.end_of_text)


def _rendered_records(
    files: Iterable[Path], config: ChatData
) -> tuple[list[Written], list[BadRecord], list[str]]:
    """Returns the records of all files as they are written down, what is bad, and notes."""
    found: list[Written] = []
    bad: list[BadRecord] = []
    template = chat_template(config)
    try:
        for file in files:
            for one in iter_records(file, lambda record: config.render_record(record, template)):
                if isinstance(one, BadRecord):
                    bad.append(one)
                else:
                    found.append(one)
    finally:
        template.close()
    return found, bad, template_notes(template)


def template_notes(template: ConversationTemplate) -> list[str]:
    """The notes of a template with their counts."""
    return [f"{note}: {count:,}" for note, count in template.notes.items() if count]


def _split_records(records: Sequence[Written], fraction: float) -> dict[str, list[Written]]:
    """Returns the records to train on, and every 1/fraction-th held out."""
    if not fraction:
        return {"train": list(records)}
    parts: dict[str, list[Written]] = {"train": [], "validation": []}
    for number, pieces in enumerate(records):
        parts["validation" if is_held_out(number, fraction) else "train"].append(pieces)
    return parts


def is_held_out(number: int, fraction: float) -> bool:
    """Returns whether a record is one of the share that is held out, evenly spread."""
    return int((number + 1) * fraction) > int(number * fraction)


def _iter_ids(
    tokenizer: Tokenizer, texts: Sequence[list[TemplatePiece]], path: str | None
) -> Iterator[NDArray[np.int32]]:
    """Yields the ids of each conversation; ``~t`` is the token t of what is not learnt.

    A text with a label gets the special tokens of the tokenizer's post-processor. Raises
    ``DataError`` for a text that the tokenizer at ``path`` cannot encode.
    """
    before, after = (~np.array(ids, dtype=np.int32) for ids in special_ids(tokenizer))
    for some in _iter_batches(texts):
        runs = [list(_iter_texts(pieces)) for pieces in some]
        flat = [text for parts in runs for text, _, label in parts if label is None]
        sources = [f"the text that begins {text[:40]!r}" for text in flat]
        encodings = iter(encode_texts(tokenizer, flat, sources, path))
        for parts in runs:
            ids = []
            for _, spans, label in parts:
                if label is None:
                    ids.append(_mask_ids(next(encodings), spans))
                else:
                    ids = [before, *ids, after, np.array([label], dtype=np.int32)]
            yield np.concatenate(ids)


def _iter_batches(texts: Iterable[list[TemplatePiece]]) -> Iterator[list[list[TemplatePiece]]]:
    batch: list[list[TemplatePiece]] = []
    characters = 0
    for pieces in texts:
        batch.append(pieces)
        characters += sum(len(piece.text) for piece in pieces)
        if len(batch) == TOGETHER or characters >= TOGETHER_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _iter_texts(pieces: Iterable[TemplatePiece]) -> Iterator[tuple[str, list[Span], int | None]]:
    """Yields each text that is tokenized by itself, the spans in it to learn, and a label."""
    text = ""
    spans: list[Span] = []
    for piece in pieces:
        if piece.separate:
            yield text, spans, None
            text, spans = "", []
        if piece.label is not None:
            yield "", [], piece.label
            return
        if piece.trained:
            spans.append((len(text), len(text) + len(piece.text), piece.marked))
        text += piece.text
    yield text, spans, None


def _mask_ids(encoding: Encoding, spans: Iterable[Span]) -> NDArray[np.int32]:
    """The ids of a text, ``~t`` where a token has no character of a span.

    Of the tokens of a marked span's last character only the first is in it, as in the assistant
    masks of transformers.
    """
    ids = np.array(encoding.ids, dtype=np.int32)
    offsets_T2 = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    learnt = np.zeros(len(ids), dtype=bool)
    for start, stop, marked in spans:
        (inside,) = np.nonzero((offsets_T2[:, 0] < stop) & (offsets_T2[:, 1] > start))
        if len(inside):
            has_last = offsets_T2[inside, 1] >= stop
            last = inside[has_last.argmax()] if marked and has_last.any() else inside[-1]
            learnt[inside[0] : last + 1] = True
    return np.where(learnt, ids, ~ids)
