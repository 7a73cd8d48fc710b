"""Documents in the cache as memory-mapped token ids: tokenized once, mapped ever after."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from scalewise.console import print_lines
from scalewise.data.base import DataSplits
from scalewise.data.build_cache import build_cached
from scalewise.data.datasets import PackedDataset
from scalewise.data.encoding import encode_documents, special_ids
from scalewise.data.tokenization import Documents, TokenizerSource, vocabulary_size
from scalewise.errors import ConfigError, DataError
from scalewise.units import format_count, format_seconds

FORMAT = 3
"""Raised when the content of the cached files changes for the same key."""
LEAVE_OUT = "; data.special_tokens=false leaves it out"


@dataclass(frozen=True)
class TokenizeSource:
    """Documents to tokenize, and all that decides what comes out.

    ``key`` and ``value`` are the option that an error names; ``identity`` is JSON that changes
    whenever the documents do; ``splits`` holds ``train``, ``validation`` or both; a tokenizer
    that must be trained reads ``training_documents``.
    """

    name: str
    key: str
    value: object
    identity: Mapping[str, object]
    splits: Mapping[str, Documents]
    training_documents: Documents
    tokenizer_source: TokenizerSource


def build_tokenized(source: TokenizeSource, vocabulary: int) -> Path:
    """Returns the folder of ``tokenizer.json`` and one ``SPLIT.bin`` of ids for each split.

    The ids are little-endian uint16, or uint32 where the tokenizer needs it, as ``meta.json``
    says. Raises ``DataError`` for a tokenizer of more than ``vocabulary`` tokens (the model's)
    and for a split without text.
    """
    tokenization = source.tokenizer_source
    tokenization.check_vocabulary(vocabulary)
    identity = {
        "format": FORMAT,
        "tokenizers": version("tokenizers"),
        "splits": sorted(source.splits),
        **tokenization.cache_identity(),
        **source.identity,
    }
    return build_cached(source.name, identity, partial(_write_split, source))


def load_packed(folder: Path, split: str, sequence: int) -> PackedDataset:
    """Returns the rows of ``sequence`` tokens of a split; ``DataError`` if it fills none."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    path, tokens = folder / f"{split}.bin", meta["tokens"][split]
    dtype = np.dtype(meta["dtype"])
    if path.stat().st_size != tokens * dtype.itemsize:
        reason = f"holds {path.stat().st_size} bytes, not {tokens * dtype.itemsize}"
        raise DataError.for_key("SCALEWISE_CACHE", path, reason, f"delete {folder} and start again")
    if tokens <= sequence:
        raise too_short_error(split, tokens, sequence)
    return PackedDataset([np.memmap(path, dtype=dtype, mode="r")], sequence)


def too_short_error(split: str, tokens: int, sequence: int) -> ConfigError:
    """Returns the error of a split with fewer tokens than one row and its last label."""
    reason = f"the {split} split has {tokens} tokens, fewer than the {sequence + 1} of one row"
    return DataError.for_key(
        "data.sequence", sequence, reason, "give more text or a smaller data.sequence"
    )


def load_splits(
    folder: Path, sequence: int, *, validation: bool, hint: str = LEAVE_OUT
) -> DataSplits:
    """Returns the rows of both splits of a tokenized folder, or of ``train`` alone.

    ``hint``: how special tokens are left out, for the note about them.
    """
    return DataSplits(
        load_packed(folder, "train", sequence),
        load_packed(folder, "validation", sequence) if validation else None,
        folder / "tokenizer.json",
        special_tokens_note(folder, hint),
    )


def special_tokens_note(folder: Path, hint: str = LEAVE_OUT) -> str:
    """Returns which special tokens stand around each document, empty where there are none."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    before, after = (" ".join(tokens) for tokens in meta["special_tokens"])
    parts = [f"begin with {before}"] * bool(before) + [f"end with {after}"] * bool(after)
    if not parts:
        return ""
    return f"documents {' and '.join(parts)}, as the tokenizer adds it{hint}"


def _write_split(source: TokenizeSource, folder: Path) -> None:
    started = time.perf_counter()
    progress = TokenizeProgress(source.name)
    tokenization = source.tokenizer_source
    tokenizer = tokenization.load() or tokenization.train(source.training_documents)
    tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if vocabulary_size(tokenizer) <= 2**16 else "<u4")
    tokens = dict.fromkeys(source.splits, 0)
    for split, documents in source.splits.items():
        with open(folder / f"{split}.bin", "wb") as file:
            for ids in encode_documents(tokenizer, tokenization, documents()):
                ids.astype(dtype).tofile(file)
                tokens[split] += len(ids)
                progress.show(f"{format_count(sum(tokens.values()))} tokens")
        if not tokens[split]:
            reason = f"the {split} split has no text"
            raise DataError.for_key(source.key, source.value, reason, "give files that hold text")
    meta = {"dtype": dtype.str, "tokens": tokens, "special_tokens": [[], []]}
    if tokenization.special_tokens:
        added = special_ids(tokenizer)
        meta["special_tokens"] = [[str(tokenizer.id_to_token(it)) for it in ids] for ids in added]
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    progress.close(f"in {format_seconds(time.perf_counter() - started)}")


class TokenizeProgress:
    """One line on stderr, rewritten while it is a terminal."""

    def __init__(self, name: str) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._line = f"preparing {name} ..."
        print_lines(self._line, end="" if self._is_terminal else "\n", stderr=True)

    def show(self, text: str) -> None:
        """Says how far it is, on a terminal."""
        if self._is_terminal:
            sys.stderr.write("\r")
            print_lines(f"{self._line} {text}", end="", stderr=True)

    def close(self, text: str) -> None:
        """Says how it ended, on a terminal."""
        if self._is_terminal:
            print_lines(f" {text}", stderr=True)
