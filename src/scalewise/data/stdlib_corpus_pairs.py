"""Preference pairs without input files: source code is preferred to its shuffled words."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from scalewise.data.base import DataSplits
from scalewise.data.stdlib_corpus import VALIDATION_FRACTION, StdlibCorpus, held_out_names
from scalewise.errors import DataError
from scalewise.registry import register_option

if TYPE_CHECKING:
    from scalewise.data.chat_cache import RenderedRecord

PROMPT_LINES, ANSWER_LINES = 2, 4
"""Number of lines of the prompt and of the answer."""


@register_option("data", "corpus_pairs")
@dataclass(frozen=True)
class StdlibCorpusPairs(StdlibCorpus):
    """Preference pairs from Python's standard library: the rejected answer is shuffled.

    Each line of a rejected answer has the words of the chosen one in another order.
    """

    sequence: int = 128
    """Length of a prompt with its answer, in tokens; longer ones are truncated."""
    vocabulary: int = 1024
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    megabytes: float = 2.0
    """Largest amount of source text that is read, in MB (10^6 bytes)."""

    kind: ClassVar[str] = "corpus_pairs"
    record_description: ClassVar[str] = "pair"
    pairs = True

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Return the pairs; those of about 5 % of the files are held out."""
        from scalewise.data import chat_cache
        from scalewise.data.build_cache import build_cached

        self.tokenizer_source.check_vocabulary(vocabulary)
        root = Path(sysconfig.get_path("stdlib"))
        sizes = self.list_source_sizes(root)
        identity = {
            "format": chat_cache.FORMAT,
            "python": sys.version,
            "files": list(sizes.items()),
            **self.tokenizer_source.cache_identity(),
        }
        folder = build_cached(self.kind, identity, partial(_write_pairs, root, list(sizes), self))
        return chat_cache.load_splits(folder, self)

    def iter_records(self, root: Path, names: Iterable[str]) -> Iterator[RenderedRecord]:
        """Yield the records of some files."""
        from scalewise.data.chat_messages import RecordKeys
        from scalewise.data.chat_templates import PlainTemplate
        from scalewise.data.preference_formats import parse_pair

        template = PlainTemplate(self.end_of_text)
        for name in names:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if len(line.split()) > 1]
            for start in range(
                0, len(lines) - PROMPT_LINES - ANSWER_LINES + 1, PROMPT_LINES + ANSWER_LINES
            ):
                prompt_lines, answer_lines = (
                    lines[start : start + PROMPT_LINES],
                    lines[start + PROMPT_LINES :][:ANSWER_LINES],
                )
                chosen = "\n".join(normalize_spaces(line, line.split()) for line in answer_lines)
                rejected = "\n".join(
                    normalize_spaces(line, shuffle_words(line, start)) for line in answer_lines
                )
                if chosen != rejected:
                    record = {
                        "prompt": "\n".join(prompt_lines),
                        "chosen": chosen,
                        "rejected": rejected,
                    }
                    yield parse_pair(record, template, RecordKeys())


def _write_pairs(root: Path, names: list[str], config: StdlibCorpusPairs, folder: Path) -> None:
    from scalewise.data import chat_cache

    validation_names = held_out_names(names, VALIDATION_FRACTION)
    splits = {
        "train": list(
            config.iter_records(root, (name for name in names if name not in validation_names))
        ),
        "validation": list(config.iter_records(root, sorted(validation_names))),
    }
    for split, records in splits.items():
        if not records:
            reason, fix = (
                f"the {split} split has no {config.record_description}",
                "increase data.megabytes",
            )
            raise DataError.for_key("data.megabytes", config.megabytes, reason, fix)
    chat_cache.write_splits(splits, config.tokenizer_source, config.kind, folder)


def normalize_spaces(line: str, words: list[str]) -> str:
    """Return words separated by single spaces, with the indentation of ``line``."""
    return line[: len(line) - len(line.lstrip())] + " ".join(words)


def shuffle_words(line: str, seed: int) -> list[str]:
    """Return the words of a line in random order."""
    from scalewise.data.shuffle_order import epoch_permutation

    words = line.split()
    return [words[index] for index in epoch_permutation(len(words), seed, len(line))]
