"""What is known of a model of transformers before it lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scalewise.models.base import TPStyle, Weight

COLUMN = "colwise"
SPLITS = {COLUMN: TPStyle.column, "rowwise": TPStyle.row}
"""Those of transformers' words for a cut that are known here."""


@dataclass(frozen=True)
class VisionInfo:
    """What a model does with a picture of ``side`` x ``side`` pixels.

    ``tokens``: that its decoder reads of it, before a text; ``encoded``: that the encoder of its
    language model reads, where it has one. ``reads``: what layers multiply of it, places, by their
    whole names; other layers read text. ``pairs``: what attends to what of it in all layers before
    the language model, times the features of these.
    """

    side: int
    tokens: int
    encoded: int
    reads: Mapping[str, float]
    pairs: int


@dataclass(frozen=True)
class ModelInfo:
    """What the configuration and the module made of it say.

    ``kind`` is transformers' name of the architecture; ``linears`` are the linear layers of a
    block, by name within it, with their features out and in. ``dropout`` is the largest share that
    the configuration drops. ``order``: the layers with weights of a block as they run, by
    name within it. ``tied_head`` is the module of a head without a matrix of its own; ``plan``
    says, in transformers' words, how tensor parallelism cuts modules of a block. ``starts`` are the
    first blocks of each stack of them: of one, of an encoder and its decoder, or of what reads a
    ``picture``, asks about it and writes, which may be two again. ``encoded`` are the layers that
    multiply what an encoder reads, by their whole names.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    key_heads: int
    width: int
    head_size: int
    census: tuple[Weight, ...]
    tied: frozenset[str]
    kind: str
    linears: tuple[tuple[str, tuple[int, int]], ...]
    buffer_bytes: int
    dropout: float
    order: tuple[str, ...]
    tied_head: str | None
    plan: tuple[tuple[str, str], ...]
    starts: tuple[int, ...] = (0,)
    encoded: frozenset[str] = frozenset()
    picture: VisionInfo | None = None
