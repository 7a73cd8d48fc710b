"""Documents of text files, tokenized into the cache as memory-mapped token ids."""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from scalewise.console import ProgressLine
from scalewise.data.base import DataConfig
from scalewise.data.build_cache import build_cached
from scalewise.data.chunked_encoding import encode_documents
from scalewise.data.datasets import PackedDataset
from scalewise.data.encoding import special_ids, train_tokenizer
from scalewise.data.input_files import digests_by_content, file_suffix, match_paths
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.record_files import RECORD_SUFFIXES, iter_documents
from scalewise.data.text import TextData
from scalewise.data.text_files import Document, text_chunks
from scalewise.data.token_files import TokenFiles, saved_tokens
from scalewise.data.tokenizer import Documents, TokenizerSource, vocabulary_size
from scalewise.errors import ConfigError, DataError
from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.units import format_count, format_seconds

FORMAT = 3
"""Cache format; increased when the cached content changes for the same key."""
OMIT_HINT = "; set data.special_tokens=false to omit it"


@dataclass(frozen=True)
class TokenizeSource:
    """Documents to tokenize, and everything that decides the token ids."""

    name: str
    """Prefix of the cache folder."""
    key: str
    """Option that an error names."""
    value: object
    """Value of that option."""
    identity: Mapping[str, object]
    """JSON that changes whenever the documents do."""
    splits: Mapping[str, Documents]
    """Documents of ``train``, ``validation`` or both."""
    training_documents: Documents
    """Documents that a new tokenizer is trained on."""
    tokenizer_source: TokenizerSource
    """Tokenizer to load or train."""
    is_fixed: bool = True
    """Whether ``identity`` decides the documents, so that an interrupted tokenization continues."""


def build_tokenized(source: TokenizeSource, vocabulary: int) -> Path:
    """Return the folder with ``tokenizer.json`` and one file of ids, ``SPLIT.bin``, per split.

    The ids are little-endian uint16, or uint32 for a large vocabulary; ``meta.json`` contains the
    dtype. Raises ``DataError`` for a tokenizer with more than ``vocabulary`` tokens (the model's)
    and for a split without text.
    """
    tokenizer_source = source.tokenizer_source
    tokenizer_source.check_vocabulary(vocabulary)
    identity = {
        "format": FORMAT,
        "tokenizers": version("tokenizers"),
        "splits": sorted(source.splits),
        **tokenizer_source.cache_identity(),
        **source.identity,
    }
    return build_cached(
        source.name, identity, partial(_write_tokenized, source), resumable=source.is_fixed
    )


def load_packed(folder: Path, split: str, sequence: int) -> PackedDataset:
    """Return the sequences of a split; raises ``DataError`` if it is shorter than one sequence."""
    metadata = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    path, tokens = folder / f"{split}.bin", metadata["tokens"][split]
    dtype = np.dtype(metadata["dtype"])
    if path.stat().st_size != tokens * dtype.itemsize:
        reason = f"has {path.stat().st_size} bytes instead of {tokens * dtype.itemsize}"
        raise DataError.for_key("SCALEWISE_CACHE", path, reason, f"delete {folder} and start again")
    if tokens <= sequence:
        raise too_short_error(split, tokens, sequence)
    return PackedDataset([np.memmap(path, dtype=dtype, mode="r")], sequence)


def too_short_error(split: str, tokens: int, sequence: int) -> ConfigError:
    """Return the error of a split with fewer tokens than one sequence and its last label."""
    reason = f"the {split} split has {tokens} tokens, fewer than the {sequence + 1} of one sequence"
    return DataError.for_key(
        "data.sequence", sequence, reason, "add more text or set a smaller data.sequence"
    )


def load_splits(
    folder: Path, sequence: int, *, validation: bool, hint: str = OMIT_HINT
) -> DataSplits:
    """Return both splits of a tokenized folder, or ``train`` alone.

    ``hint``: how to omit special tokens, for the note about them.
    """
    return DataSplits(
        load_packed(folder, "train", sequence),
        load_packed(folder, "validation", sequence) if validation else None,
        folder / "tokenizer.json",
        special_tokens_note(folder, hint),
    )


def special_tokens_note(folder: Path, hint: str = OMIT_HINT) -> str:
    """Return a note on the special tokens around each document; empty if there are none."""
    metadata = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    before, after = (" ".join(tokens) for tokens in metadata["special_tokens"])
    parts = [f"begin with {before}"] * bool(before) + [f"end with {after}"] * bool(after)
    if not parts:
        return ""
    return f"documents {' and '.join(parts)}, as the tokenizer adds it{hint}"


def _write_tokenized(source: TokenizeSource, folder: Path) -> None:
    started = time.perf_counter()
    earlier_tokens = saved_tokens(folder)
    note = f" continuing after {format_count(earlier_tokens)} tokens" if earlier_tokens else ""
    progress = ProgressLine(f"preparing {source.name} ...{note}")
    tokenizer_source, tokenizer_path = source.tokenizer_source, folder / "tokenizer.json"
    if earlier_tokens is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    else:
        tokenizer = tokenizer_source.load() or train_tokenizer(
            tokenizer_source, source.training_documents
        )
        tokenizer.save(str(tokenizer_path))
    dtype = np.dtype("<u2" if vocabulary_size(tokenizer) <= 2**16 else "<u4")
    files = TokenFiles(folder, dtype, source.splits)
    files.write(
        lambda documents: encode_documents(tokenizer, tokenizer_source, documents),
        lambda tokens: progress.show(f"{format_count(tokens)} tokens"),
    )
    tokens = files.tokens
    for split in source.splits:
        if not tokens[split]:
            reason = f"the {split} split has no text"
            raise DataError.for_key(source.key, source.value, reason, "add files with text")
    metadata = {"dtype": dtype.str, "tokens": tokens, "special_tokens": [[], []]}
    if tokenizer_source.special_tokens:
        added = special_ids(tokenizer)
        metadata["special_tokens"] = [
            [str(tokenizer.id_to_token(it)) for it in ids] for ids in added
        ]
    (folder / "meta.json").write_text(json.dumps(metadata), encoding="utf-8")
    progress.close(f"in {format_seconds(time.perf_counter() - started)}")


@lazy_dispatch
def tokenize_source(config: DataConfig) -> TokenizeSource:
    """Documents of a config of texts that are tokenized into the cache; may raise ``DataError``."""
    raise not_registered(tokenize_source, config)


@prepare_splits.register(TextData)
def _prepare_text(config: TextData, vocabulary: int, seed: int) -> DataSplits:
    """Tokenize the files into the cache, and return packed sequences of both splits."""
    source = tokenize_source(config)
    folder = build_tokenized(source, vocabulary)
    return load_splits(folder, config.sequence, validation="validation" in source.splits)


@tokenize_source.register(TextData)
def _text_source(config: TextData) -> TokenizeSource:
    if issues := list(config.validate()):
        raise DataError(issues)
    files = digests_by_content(match_paths(config.paths))
    parts = _split_documents(config, files)
    identity = {
        "files": [[digest, file_suffix(file)] for file, digest in files.items()],
        "field": config.field,
        "validation_fraction": config.validation_fraction,
    }
    return TokenizeSource(
        name="text",
        key="data.paths",
        value=list(config.paths),
        identity=identity,
        splits=parts,
        training_documents=parts["train"],
        tokenizer_source=config.tokenizer_source,
    )


def _split_documents(config: TextData, digests: Mapping[Path, str]) -> dict[str, Documents]:
    """Return the documents of each split: by the digests of files, or within each file.

    A single file is split within itself, and so are files with equal content.
    """
    fraction, files = config.validation_fraction, list(digests)
    if not fraction:
        return {"train": partial(_iter_all, files, config.field)}
    if len({*digests.values()}) == 1:
        iter_side = partial(_iter_split, files, config.field, fraction)
        return {
            "train": partial(iter_side, held_out=False),
            "validation": partial(iter_side, held_out=True),
        }
    validation_digests = held_out_names(digests.values(), fraction)
    sides: dict[bool, list[Path]] = {False: [], True: []}
    for file, digest in digests.items():
        sides[digest in validation_digests].append(file)
    return {
        "train": partial(_iter_all, sides[False], config.field),
        "validation": partial(_iter_all, sides[True], config.field),
    }


def held_out_names(names: Iterable[str], fraction: float) -> set[str]:
    """Return the names of the validation split: those whose hash is below ``fraction``.

    Adding a name moves no other name between splits. With two or more names, neither split is
    empty.
    """
    hashes = {name: _unit_hash(name) for name in names}
    selected = {name for name in hashes if hashes[name] < fraction}
    if not selected:
        return {min(hashes, key=hashes.__getitem__)}
    if len(selected) == len(hashes):
        selected.remove(max(hashes, key=hashes.__getitem__))
    return selected


def _unit_hash(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def is_held_out(number: int, fraction: float) -> bool:
    """Whether a record of a file belongs to the validation split, which is evenly spread."""
    return int((number + 1) * fraction) > int(number * fraction)


def _iter_all(files: list[Path], field: str | None) -> Iterator[Document]:
    for file in files:
        yield from iter_documents(file, field)


def _iter_split(
    files: list[Path], field: str | None, fraction: float, *, held_out: bool
) -> Iterator[Document]:
    for file in files:
        yield from _iter_single_file_split(file, field, fraction, held_out=held_out)


def _iter_single_file_split(
    file: Path, field: str | None, fraction: float, *, held_out: bool
) -> Iterator[Document]:
    """Yield one side of a single file: every 1/fraction-th record, or the end of plain text."""
    if file_suffix(file) in RECORD_SUFFIXES:
        for index, document in enumerate(iter_documents(file, field)):
            if is_held_out(index, fraction) is held_out:
                yield document
        return
    (full_document,) = iter_documents(file, field)
    split_position = _last_line_start(
        file, int(sum(map(len, full_document.chunks)) * (1 - fraction))
    )
    yield Document(
        _slice_chunks(text_chunks(file), split_position, held_out=held_out), full_document.source
    )


def _last_line_start(file: Path, limit: int) -> int:
    """Return the start of the last line that begins within ``limit`` characters.

    A longer first line is split at ``limit``.
    """
    start = characters = 0
    for chunk in text_chunks(file):
        if (newline := chunk.rfind("\n", 0, limit - characters)) >= 0:
            start = characters + newline + 1
        characters += len(chunk)
        if characters >= limit:
            break
    return start or limit


def _slice_chunks(chunks: Iterable[str], position: int, *, held_out: bool) -> Iterator[str]:
    """Yield the characters of chunks before ``position``, or those after it."""
    for chunk in chunks:
        yield chunk[max(0, position) :] if held_out else chunk[: max(0, position)]
        position -= len(chunk)
