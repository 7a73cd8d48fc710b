"""Tokenized documents in the cache, as memory-mapped token ids."""

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
    return build_cached(source.name, identity, partial(_write_tokenized, source))


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
    progress = TokenizeProgress(source.name)
    tokenizer_source = source.tokenizer_source
    tokenizer = tokenizer_source.load() or tokenizer_source.train(source.training_documents)
    tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if vocabulary_size(tokenizer) <= 2**16 else "<u4")
    tokens = dict.fromkeys(source.splits, 0)
    for split, documents in source.splits.items():
        with open(folder / f"{split}.bin", "wb") as file:
            for ids in encode_documents(tokenizer, tokenizer_source, documents()):
                ids.astype(dtype).tofile(file)
                tokens[split] += len(ids)
                progress.show(f"{format_count(sum(tokens.values()))} tokens")
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


class TokenizeProgress:
    """Progress line on stderr, rewritten in place on a terminal."""

    def __init__(self, name: str) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._line = f"preparing {name} ..."
        print_lines(self._line, end="" if self._is_terminal else "\n", stderr=True)

    def show(self, text: str) -> None:
        """Show the progress on a terminal."""
        if self._is_terminal:
            sys.stderr.write("\r")
            print_lines(f"{self._line} {text}", end="", stderr=True)

    def close(self, text: str) -> None:
        """End the line on a terminal."""
        if self._is_terminal:
            print_lines(f" {text}", stderr=True)
