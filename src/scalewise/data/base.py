"""Interfaces of datasets and data options: sequences of token ids, read by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from scalewise.errors import ConfigIssue
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


FIRST_TOKEN_OFFSET = 1 << 32
"""Offset added to the id of each text's first token in a packed sequence."""
NO_TOKEN = ~FIRST_TOKEN_OFFSET
"""Value of encoder positions without a token."""


class TokenDataset(Protocol):
    """Samples of ``sequence + 1`` token ids: the inputs, and the labels shifted by one position.

    A sample is a pure function of its index. ``streamed`` datasets are read in order: their length
    is ``sys.maxsize``, and an index below the last one reopens the stream.

    A negative id ``~t`` is token ``t`` without a label: padding, or a prompt. Only ``masked``
    datasets contain such ids. A sample of a pair dataset consists of two sequences, ``tokens_2S``.

    Masked datasets may be ``packing``: a sequence then contains several texts, and the first token
    of each is ``~(t + FIRST_TOKEN_OFFSET)``, without a label.

    Samples with a ``target_length`` have ``sequence`` ids: the encoder's tokens, padded with
    ``NO_TOKEN``, and then ``target_length`` ids of the decoder.
    """

    @property
    def masked(self) -> bool:
        """Whether some tokens may have no label."""
        ...

    @property
    def packing(self) -> bool:
        """Whether a sequence may contain several texts, with separated attention."""
        ...

    @property
    def target_length(self) -> int:
        """Number of decoder tokens at the end of a sample; 0: one model reads all tokens."""
        ...

    @property
    def streamed(self) -> bool:
        """Whether indices must be read in increasing order."""
        ...

    def __len__(self) -> int:
        """Number of complete samples of one epoch."""
        ...

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``, one sample per index, S = sequence + 1."""
        ...


@runtime_checkable
class CaptionedTokenDataset(TokenDataset, Protocol):
    """Captions, of which all tokens are the ``target_length``, with their images."""

    def gather_pixels(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return ``pixels_BCHW``: RGB, uint8."""
        ...


@dataclass(frozen=True)
class DataSplits:
    """Training and validation data of a run."""

    train: TokenDataset
    """Training samples."""
    validation: TokenDataset | None = None
    """Held-out samples; None: no validation."""
    tokenizer: Path | None = None
    """Path of the tokenizer.json that decodes the token ids; None: no tokenizer."""
    note: str = ""
    """Notes for the user, one per line."""


class DataConfig(ABC):
    """Options of a data source."""

    sequence: int
    """Sequence length, in tokens."""
    pairs: bool = False
    """Whether a sample consists of two sequences, the preferred one first."""
    packing: bool = False
    """Whether a sequence contains several texts, with separated attention."""
    target_length: int = 0
    """Number of decoder tokens at the end of a sample, after the encoder's; 0: one model reads all
    tokens."""
    image_size: int = 0
    """Side of the images that captions describe, in pixels; 0: no images."""
    classes: tuple[str, ...] = ()
    """Class names, for data whose samples have a class index as their only label."""
    is_user_defined = False
    """Whether batches of any kind come from user-defined data loaders."""
    implementation: ClassVar[str] = ""
    """Module that registers a function of ``prepare_splits`` for the class."""

    @property
    def trains_tokenizer(self) -> bool:
        """Whether a tokenizer is trained on the texts, since none is given."""
        return getattr(self, "tokenizer", "") is None

    @property
    def answer_length(self) -> int:
        """Number of verifiable answer tokens at the end of each sample; 0: none."""
        return 0

    @property
    @abstractmethod
    def required_vocabulary(self) -> int | None:
        """Largest token id plus one; None if the data decide it."""

    @abstractmethod
    def validate(self) -> Iterator[ConfigIssue]:
        """Yield the issues that are visible without reading the data, such as absent files."""

    def target_length_issue(self) -> ConfigIssue:
        """Return the issue of a ``target_length`` that leaves no tokens for the encoder."""
        reason = (
            f"must be positive and below data.sequence={self.sequence}: the encoder reads the rest"
        )
        fix = f"set data.target_length={max(1, self.sequence // 4)}"
        return ConfigIssue("data.target_length", self.target_length, reason, fix)

    def non_positive_issues(self, *fields: str) -> Iterator[ConfigIssue]:
        """Yield an issue for each of the named fields that is zero or less."""
        for field in fields:
            value, default = getattr(self, field), getattr(type(self), field)
            if value <= 0:
                key = f"data.{field}"
                yield ConfigIssue(
                    key, value, "must be positive", f"set {format_override(key, default)}"
                )
