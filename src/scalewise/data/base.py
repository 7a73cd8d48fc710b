"""What every data source answers: the length of a row, and rows of token ids by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from scalewise.errors import ConfigIssue
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


FIRST = 1 << 32
"""What is added to the id of a text's first token in a row of several texts."""
NOTHING = ~FIRST
"""Stands where an encoder has no token to read."""


class Sequences(Protocol):
    """Rows of ``sequence + 1`` token ids: the inputs, and the labels one place on.

    A row is a pure function of its index. ``streamed`` rows are read in their own order: their
    length is ``sys.maxsize``, and an index below the last one asked for starts the stream anew.

    An id ``~t``, below zero, is the token ``t`` that is no label: padding, or a prompt. Only rows
    that are ``masked`` hold such. A row of a pair is two of these, ``tokens_2S``.

    Masked rows may be ``packing``: several texts lie in one, and the first token of each is
    ``~(t + FIRST)``, no label.

    Rows with a ``target_length`` are ``sequence`` ids: what an encoder reads, filled up with
    ``NOTHING``, and so many at the end that a decoder writes.
    """

    @property
    def masked(self) -> bool:
        """Returns whether some tokens may be no labels."""
        ...

    @property
    def packing(self) -> bool:
        """Returns whether a row may hold several texts, which are not to see each other."""
        ...

    @property
    def target_length(self) -> int:
        """Returns the ids at the end of a row that a decoder writes; 0: one model reads all."""
        ...

    @property
    def streamed(self) -> bool:
        """Returns True where indices must be asked for in increasing order."""
        ...

    def __len__(self) -> int:
        """Returns the number of whole rows of one epoch."""
        ...

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``: one row per index, S = sequence + 1, in one gather."""
        ...


@runtime_checkable
class CaptionedSequences(Sequences, Protocol):
    """Rows of captions, all of each a ``target_length``, with the pictures that they are of."""

    def gather_pixels(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns ``pixels_BCHW``: red, green and blue, bytes."""
        ...


@dataclass(frozen=True)
class DataSplits:
    """The rows to train on, the held-out rows, and the tokenizer.json that reads them back.

    ``note``: what the user should know of them, in lines.
    """

    train: Sequences
    validation: Sequences | None = None
    tokenizer: Path | None = None
    note: str = ""


class DataConfig(ABC):
    """A data source as a spec.

    ``pairs``: whether a row is two sequences, the preferred first. ``packing``: whether a row is
    several texts, none of which attends to another. ``target_length``: tokens at the end of a row
    that a decoder writes, an encoder reading the others; 0: one model reads all. ``image_size``:
    the side of the pictures that rows are captions of, pixels; 0: there are none. ``classes``: what
    a row may be, where its one label is not a token but a number of them. ``is_user_defined``:
    whether loaders of the user's give batches of any kind.
    """

    sequence: int
    pairs: bool = False
    packing: bool = False
    target_length: int = 0
    image_size: int = 0
    classes: tuple[str, ...] = ()
    is_user_defined = False

    @property
    def trains_tokenizer(self) -> bool:
        """Returns whether a tokenizer is trained on its texts, for want of one that is given."""
        return getattr(self, "tokenizer", "") is None

    @property
    def answer_length(self) -> int:
        """Returns the tokens at the end of each row that answer it and can be checked; 0: none."""
        return 0

    def reward(self, answer_BA: Tensor, expected_BA: Tensor) -> Tensor:
        """Returns ``reward_B`` of answers: the share of their tokens that are right."""
        return (answer_BA == expected_BA).float().mean(1)

    @property
    @abstractmethod
    def required_vocabulary(self) -> int | None:
        """Returns one more than the largest token id it may yield; None until it is prepared."""

    @abstractmethod
    def validate(self) -> Iterator[ConfigIssue]:
        """Yields what is wrong and can be seen without reading the data (files that are absent)."""

    @abstractmethod
    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Returns the rows, after whatever must be done once (tokenize, write a cache).

        Safe when several processes start at once; a second call costs a memory map. Raises
        ``DataError`` naming the key and the cure (empty, truncated, id >= ``vocabulary``).
        """

    def target_length_issue(self) -> ConfigIssue:
        """Returns the complaint about a target that leaves an encoder nothing to read."""
        reason = f"is no part of data.sequence={self.sequence}: an encoder reads the rest"
        fix = f"give data.target_length={max(1, self.sequence // 4)}"
        return ConfigIssue("data.target_length", self.target_length, reason, fix)

    def non_positive_issues(self, *fields: str) -> Iterator[ConfigIssue]:
        """Yields a complaint for each of the named fields that is zero or less."""
        for field in fields:
            value, default = getattr(self, field), getattr(type(self), field)
            if value <= 0:
                key = f"data.{field}"
                yield ConfigIssue(
                    key, value, "must be positive", f"give {format_override(key, default)}"
                )
