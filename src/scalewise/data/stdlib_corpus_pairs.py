"""Pairs that need no file: code as it stands, preferred to the same words out of order."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from scalewise.config.registry import register_option
from scalewise.data.base import DataSplits
from scalewise.data.stdlib_corpus import VALIDATION_FRACTION, StdlibCorpus, held_out_names
from scalewise.errors import DataError

if TYPE_CHECKING:
    from scalewise.data.chat_cache import Written

PROMPT, ANSWER = 2, 4
"""Lines of either part of a pair."""


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
        """Returns the pairs; those of about 5 % of the files are held out."""
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

    def iter_records(self, root: Path, names: Iterable[str]) -> Iterator[Written]:
        """Yields the records of some files."""
        from scalewise.data.chat_messages import RecordKeys
        from scalewise.data.chat_templates import PlainTemplate
        from scalewise.data.preference_formats import parse_pair

        template = PlainTemplate(self.end_of_text)
        for name in names:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if len(line.split()) > 1]
            for at in range(0, len(lines) - PROMPT - ANSWER + 1, PROMPT + ANSWER):
                asked, told = lines[at : at + PROMPT], lines[at + PROMPT :][:ANSWER]
                chosen = "\n".join(normalize_spaces(line, line.split()) for line in told)
                rejected = "\n".join(
                    normalize_spaces(line, shuffle_words(line, at)) for line in told
                )
                if chosen != rejected:
                    record = {"prompt": "\n".join(asked), "chosen": chosen, "rejected": rejected}
                    yield parse_pair(record, template, RecordKeys())


def _write_pairs(root: Path, names: list[str], config: StdlibCorpusPairs, folder: Path) -> None:
    from scalewise.data import chat_cache

    held = held_out_names(names, VALIDATION_FRACTION)
    parts = {
        "train": list(config.iter_records(root, (name for name in names if name not in held))),
        "validation": list(config.iter_records(root, sorted(held))),
    }
    for split, found in parts.items():
        if not found:
            reason, fix = (
                f"the {split} split has no {config.record_description}",
                "give more data.megabytes",
            )
            raise DataError.for_key("data.megabytes", config.megabytes, reason, fix)
    chat_cache.write_split(parts, config.tokenizer_source, config.kind, folder)


def normalize_spaces(line: str, words: list[str]) -> str:
    """Returns words one space apart behind a line's indentation."""
    return line[: len(line) - len(line.lstrip())] + " ".join(words)


def shuffle_words(line: str, seed: int) -> list[str]:
    """Returns the words of a line in another order."""
    from scalewise.data.shuffle_order import epoch_permutation

    words = line.split()
    return [words[place] for place in epoch_permutation(len(words), seed, len(line))]
