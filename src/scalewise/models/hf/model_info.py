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
    """What a model does with a picture of ``image_size`` x ``image_size`` pixels.

    ``decoder_tokens``: that its decoder reads of it, before a text; ``encoder_tokens``: that the
    encoder of its
    language model reads, where it has one. ``tokens_by_layer``: what layers multiply of it, places,
    by their
    whole names; other layers read text. ``attention_pairs``: what attends to what of it in all
    layers before the language model, times the features of these.
    """

    image_size: int
    decoder_tokens: int
    encoder_tokens: int
    tokens_by_layer: Mapping[str, float]
    attention_pairs: int


@dataclass(frozen=True)
class ModelInfo:
    """What the configuration and the module made of it say.

    ``model_type`` is transformers' name of the architecture; ``linear_layers`` are the linear
    layers of a
    block, by name within it, with their features out and in. ``dropout`` is the largest share that
    the configuration drops. ``layer_order``: the layers with weights of a block as they run, by
    name within it. ``tied_head`` is the module of a head without a matrix of its own;
    ``hf_tp_plan``
    says, in transformers' words, how tensor parallelism cuts modules of a block. ``stack_starts``
    are the
    first blocks of each stack of them: of one, of an encoder and its decoder, or of what reads a
    ``vision``, asks about it and writes, which may be two again. ``source_layers`` are the layers
    that multiply what an encoder reads, by their whole names.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    key_heads: int
    width: int
    head_size: int
    weight_census: tuple[Weight, ...]
    tied_weights: frozenset[str]
    model_type: str
    linear_layers: tuple[tuple[str, tuple[int, int]], ...]
    buffer_bytes: int
    dropout: float
    layer_order: tuple[str, ...]
    tied_head: str | None
    hf_tp_plan: tuple[tuple[str, str], ...]
    stack_starts: tuple[int, ...] = (0,)
    source_layers: frozenset[str] = frozenset()
    vision: VisionInfo | None = None
