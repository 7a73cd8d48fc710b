"""Source files of the Python standard library, tokenized as text, preference pairs and classes."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from scalewise.data import chat_cache
from scalewise.data.build_cache import build_cached
from scalewise.data.chat_formats import parse_labeled, parse_pair
from scalewise.data.chat_messages import RecordKeys
from scalewise.data.chat_templates import PlainTemplate, RenderedRecord
from scalewise.data.datasets import epoch_permutation
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.data.stdlib_corpus import StdlibCorpus, StdlibCorpusPairs
from scalewise.data.tokenized_cache import (
    TokenizeSource,
    build_tokenized,
    held_out_names,
    load_splits,
    tokenize_source,
)
from scalewise.errors import DataError

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
VALIDATION_FRACTION = 0.05
PROMPT_LINES, ANSWER_LINES = 2, 4
"""Number of lines of the prompt and of the answer of a pair."""
CLASS_LINES = 4
"""Number of lines of a text with a class."""


@prepare_splits.register(StdlibCorpus)
def _prepare_text(config: StdlibCorpus, vocabulary: int, seed: int) -> DataSplits:
    """Return packed sequences; about 5 % of the files are held out, by a hash of their path."""
    folder = build_tokenized(tokenize_source(config), vocabulary)
    return load_splits(folder, config.sequence, validation=True, hint="")


@tokenize_source.register(StdlibCorpus)
def _corpus_source(config: StdlibCorpus) -> TokenizeSource:
    root = Path(sysconfig.get_path("stdlib"))
    sizes = _list_source_sizes(config, root)
    if len(sizes) < 2:
        reason = f"{root / config.folder} has fewer than two Python sources within that size"
        fix = "increase data.megabytes, or use other files with data=text"
        raise DataError.for_key("data.megabytes", config.megabytes, reason, fix)
    validation_names = held_out_names(sizes, VALIDATION_FRACTION)
    iter_train = partial(
        _iter_texts, root, [name for name in sizes if name not in validation_names]
    )
    return TokenizeSource(
        name="corpus",
        key="data.megabytes",
        value=config.megabytes,
        identity={"python": sys.version, "files": list(sizes.items())},
        splits={
            "train": iter_train,
            "validation": partial(_iter_texts, root, sorted(validation_names)),
        },
        training_documents=iter_train,
        tokenizer_source=config.tokenizer_source,
    )


@prepare_splits.register(StdlibCorpusPairs)
def _prepare_records(config: StdlibCorpusPairs, vocabulary: int, seed: int) -> DataSplits:
    """Return the pairs or labeled texts; those of about 5 % of the files are held out."""
    config.tokenizer_source.check_vocabulary(vocabulary)
    root = Path(sysconfig.get_path("stdlib"))
    sizes = _list_source_sizes(config, root)
    identity = {
        "format": chat_cache.FORMAT,
        "python": sys.version,
        "files": list(sizes.items()),
        **config.tokenizer_source.cache_identity(),
    }
    folder = build_cached(config.kind, identity, partial(_write_records, root, list(sizes), config))
    return chat_cache.load_splits(folder, config)


def _list_source_sizes(config: StdlibCorpus, root: Path) -> dict[str, int]:
    """Return the bytes of source files by their relative path, up to ``megabytes`` in total."""
    sizes: dict[str, int] = {}
    remaining = config.megabytes * 1e6
    for name in sorted(_source_files(root, config.folder)):
        size = (root / name).stat().st_size
        if 0 < size <= remaining:
            sizes[name] = size
            remaining -= size
    return sizes


def _source_files(root: Path, start: str) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root / start):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _iter_texts(root: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        yield (root / name).read_text(encoding="utf-8", errors="replace")


def _write_records(root: Path, names: list[str], config: StdlibCorpusPairs, folder: Path) -> None:
    validation_names = held_out_names(names, VALIDATION_FRACTION)
    names_by_split = {
        "train": [name for name in names if name not in validation_names],
        "validation": sorted(validation_names),
    }
    splits: dict[str, list[RenderedRecord]] = {}
    for split, split_names in names_by_split.items():
        texts = _iter_texts(root, split_names)
        records = _iter_labeled(texts) if config.classes else _iter_pairs(texts, config.end_of_text)
        splits[split] = list(records)
        if not splits[split]:
            reason = f"the {split} split has no {config.record_description}"
            fix = "increase data.megabytes"
            raise DataError.for_key("data.megabytes", config.megabytes, reason, fix)
    chat_cache.write_splits(splits, config.tokenizer_source, config.kind, folder)


def _iter_pairs(texts: Iterable[str], end_of_text: str) -> Iterator[RenderedRecord]:
    """Yield pairs of following lines, and the same lines with shuffled words."""
    template = PlainTemplate(end_of_text)
    for text in texts:
        lines = [line for line in text.splitlines() if len(line.split()) > 1]
        for start in range(
            0, len(lines) - PROMPT_LINES - ANSWER_LINES + 1, PROMPT_LINES + ANSWER_LINES
        ):
            prompt_lines, answer_lines = (
                lines[start : start + PROMPT_LINES],
                lines[start + PROMPT_LINES :][:ANSWER_LINES],
            )
            chosen = "\n".join(_normalize_spaces(line, line.split()) for line in answer_lines)
            rejected = "\n".join(
                _normalize_spaces(line, _shuffle_words(line, start)) for line in answer_lines
            )
            if chosen != rejected:
                record = {
                    "prompt": "\n".join(prompt_lines),
                    "chosen": chosen,
                    "rejected": rejected,
                }
                yield parse_pair(record, template, RecordKeys())


def _iter_labeled(texts: Iterable[str]) -> Iterator[RenderedRecord]:
    """Yield equally many texts of both classes."""
    for text in texts:
        lines = [line for line in text.splitlines() if len(line.split()) > 2]
        for start in range(0, len(lines) - CLASS_LINES + 1, CLASS_LINES):
            class_index = start // CLASS_LINES % 2
            text_lines = [
                _normalize_spaces(line, line.split()[:: 1 if class_index else -1])
                for line in lines[start : start + CLASS_LINES]
            ]
            yield (parse_labeled("\n".join(text_lines), class_index),)


def _normalize_spaces(line: str, words: list[str]) -> str:
    """Return words separated by single spaces, with the indentation of ``line``."""
    return line[: len(line) - len(line.lstrip())] + " ".join(words)


def _shuffle_words(line: str, seed: int) -> list[str]:
    """Return the words of a line in random order."""
    words = line.split()
    return [words[index] for index in epoch_permutation(len(words), seed, len(line))]
