"""Datasets of a run: their interface, and their preparation, dispatched on the data config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from scalewise.data.base import DataConfig
from scalewise.lazy_dispatch import lazy_dispatch, not_registered

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
    validation_sources: Mapping[str, TokenDataset] = field(default_factory=dict)
    """Held-out samples of each source of a mixture, by name."""


@lazy_dispatch
def prepare_splits(config: DataConfig, vocabulary: int, seed: int) -> DataSplits:
    """Prepare the data, such as by tokenizing into a cache, and return the splits.

    Several processes may call it at the same time; a second call only maps the cached files into
    memory.

    Args:
        config: Options of the data.
        vocabulary: Vocabulary size of the model, in tokens.
        seed: Seed of data that are drawn at random.

    Raises:
        DataError: The data are absent, empty or damaged, or have an id of ``vocabulary`` or more.
    """
    raise not_registered(prepare_splits, config)
