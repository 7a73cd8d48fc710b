"""Fields of a decoder, and sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import sqrt
from typing import Any

from scalewise.models.base import ModelConfig
from scalewise.models.decoder.kinds import (
    ActivationKind,
    NormKind,
    NormPlacement,
    PositionKind,
    QKNorm,
    Residual,
    RopeScaling,
)
from scalewise.models.decoder.latent_attention_config import LatentAttentionConfig
from scalewise.models.decoder.moe_config import ExpertsConfig

QKV = ("attention.query", "attention.key", "attention.value")


@dataclass(frozen=True)
class DecoderArchitecture(LatentAttentionConfig, ExpertsConfig, ModelConfig):
    """Shape of a decoder, norms, positions and multipliers; ``DecoderConfig`` is the option."""

    vocabulary: int
    """Vocabulary size, in tokens."""
    context: int
    """Longest sequence, in tokens."""
    width: int
    """Width of the residual stream, in features."""
    layers: int
    """Number of blocks."""
    heads: int
    """Number of query heads per block."""
    feedforward: int
    """Width of the feedforward's hidden layer, in features; with experts, of each expert unless
    ``expert_dim`` is set, and of the first ``dense_layers`` blocks."""
    kv_heads: int | None = None
    """Number of key and value heads per block (grouped-query attention); null: as many as
    ``heads``."""
    head_width: int | None = None
    """Width of one head, in features; null: ``width / heads``."""
    norm: NormKind = NormKind.rmsnorm
    """Normalization layer of sublayers and before the head."""
    norm_placement: NormPlacement = NormPlacement.pre
    """Position of the norms of a block."""
    residual: Residual = Residual.sequential
    """Input of the sublayers of a block."""
    position: PositionKind = PositionKind.rope
    """Position encoding."""
    activation: ActivationKind = ActivationKind.swiglu
    """Activation of the feedforward."""
    bias: bool = False
    """Whether LayerNorm and all linear layers except the head have biases."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases, whatever ``bias``."""
    head_bias: bool = False
    """Whether the head has a bias (Phi)."""
    qk_norm: QKNorm = QKNorm.none
    """RMSNorm of queries and keys, before their rotary positions."""
    tied: bool = False
    """Whether the head shares the weight of the token embedding."""
    classes: int | None = None
    """Number of outputs of the head; null: the vocabulary size."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths, which range from 2 pi to about 2 pi theta positions."""
    rotary_fraction: float = 1.0
    """Fraction of the features of a head that have rotary positions, the first ones (GPT-NeoX:
    0.25)."""
    rope_scaling: bool = False
    """Whether wavelengths are stretched; the six fields below are its parameters."""
    rope_method: RopeScaling = RopeScaling.llama3
    """Method that stretches the wavelengths."""
    rope_attention_factor: float | None = None
    """Factor of rotated queries and keys with ``yarn``; null: ``0.1 ln(rope_factor) + 1``."""
    rope_factor: float = 8.0
    """Factor by which the longest wavelengths grow."""
    rope_low_frequency: float = 1.0
    """Wavelengths above ``rope_original_context`` divided by this grow by the whole factor
    (``beta_slow`` of YaRN)."""
    rope_high_frequency: float = 4.0
    """Wavelengths below ``rope_original_context`` divided by this stay unchanged (``beta_fast`` of
    YaRN, 32 in most models)."""
    rope_original_context: int = 8192
    """Context that the unscaled wavelengths were trained for, in tokens."""
    rope_local_theta: float | None = None
    """Base of the wavelengths, which are not stretched, in layers with a window; null: as in the
    other layers."""
    no_rope_every: int | None = None
    """Distance between layers without rotary positions, in blocks (SmolLM3: 4); null: all have
    them."""
    window: int | None = None
    """Length of the part of a sequence that a token attends to, up to itself, in tokens; null: all
    of it."""
    global_every: int | None = None
    """Distance between layers without a window, in blocks (Gemma 3: 6); null: all have it."""
    embedding_multiplier: float = 1.0
    """Factor of token embeddings (Gemma: sqrt(width))."""
    residual_multiplier: float = 1.0
    """Factor of sublayer outputs before they are added to the residual stream."""
    attention_multiplier: float | None = None
    """Factor of attention scores; null: ``1 / sqrt(head_width)``."""
    attention_softcap: float | None = None
    """Bound of attention scores, ``cap * tanh(score / cap)`` (Gemma 2: 50); null: no bound."""
    logit_divisor: float = 1.0
    """Divisor of the logits."""
    logit_softcap: float | None = None
    """Bound of the logits, ``cap * tanh(logit / cap)`` (Gemma 2: 30); null: no bound."""
    norm_epsilon: float = 1e-5
    """Constant added to the variance before its root is taken."""
    dropout: float = 0.0
    """Dropout probability of embeddings, attention weights and sublayer outputs."""
    initial_std: float = 0.02
    """Standard deviation of initial weights; divided by sqrt(2 layers) for sublayer outputs."""
    base_width: int | None = None
    """Width of the base model of muP, whose learning rate was tuned, in features; null: no base
    model. Its feedforward and its heads have the same sizes relative to the width."""
    base_heads: int | None = None
    """Number of query heads of the base model of muP; null: no base model."""
    weights: str | None = None
    """Folder or .safetensors file of Hugging Face weights to start from; null: random weights."""

    @property
    def head_size(self) -> int:
        """Features per head of queries and keys."""
        return self.head_width or self.width // self.heads

    @property
    def rotary_size(self) -> int:
        """Features per head that have rotary positions."""
        return self.rope_head_dim or int(self.head_size * self.rotary_fraction)

    @property
    def rope_table_size(self) -> int:
        """Features of a position in the rotary table: of a head, or of its rotary part alone."""
        return self.rope_head_dim or self.head_size

    @property
    def value_size(self) -> int:
        """Features per head of values."""
        return self.value_head_dim or self.head_size - (self.rope_head_dim or 0)

    @property
    def value_width(self) -> int:
        """Features of all value heads of one token, which the output projection reads."""
        return self.heads * self.value_size

    @property
    def key_heads(self) -> int:
        """Number of key (and value) heads per block."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_dim(self) -> int:
        """Width of the hidden layer of an expert, in features."""
        return self.expert_dim or self.feedforward

    @property
    def query_width(self) -> int:
        """Features of all query heads of one token."""
        return self.heads * self.head_size

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores; of a base model, divided by ``head_width_ratio``."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier / self.head_width_ratio
        return 1 / sqrt(self.head_size * self.head_width_ratio)

    @property
    def width_ratio(self) -> float:
        """Width relative to the base model of muP; 1 without one."""
        return 1.0 if self.base_width is None else self.width / self.base_width

    @property
    def head_width_ratio(self) -> float:
        """Width of a head relative to the base model of muP; 1 without one.

        The width of all heads together is proportional to the width of the model.
        """
        return 1.0 if self.base_heads is None else self.width_ratio * self.base_heads / self.heads

    @property
    def total_logit_divisor(self) -> float:
        """Divisor of the logits: ``logit_divisor``, times ``width_ratio`` (muP)."""
        return self.logit_divisor * self.width_ratio

    @property
    def hidden_std(self) -> float:
        """Standard deviation of the initial matrices of blocks that do not write the residual.

        That of the base model of muP is ``initial_std``; the variance is inversely proportional
        to the number of inputs.
        """
        return self.initial_std / sqrt(self.width_ratio)

    @property
    def feature_divisor(self) -> float:
        """Divisor of the features that the head reads: that of the logits, and their bound."""
        return self.total_logit_divisor * (self.logit_softcap or 1.0)

    @property
    def has_gate(self) -> bool:
        """Whether the feedforward multiplies two projections."""
        return self.activation in (ActivationKind.swiglu, ActivationKind.geglu)

    def layer_window(self, layer: int) -> int | None:
        """Return the window of a layer; None: it attends to all tokens before."""
        is_global = self.global_every is not None and (layer + 1) % self.global_every == 0
        return None if is_global else self.window

    def has_rope(self, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        skips = self.no_rope_every is not None and (layer + 1) % self.no_rope_every == 0
        return self.position is PositionKind.rope and not skips

    def mean_keys(self, sequence: int) -> float:
        """Return the mean over layers of the keys per query, as if half of them were masked.

        Of a sequence of S tokens, the queries of a layer with window W attend to ``W - W^2 / 2S``
        keys on average; without a window to S / 2.
        """
        if self.window is None:
            return sequence
        windows = [min(self.layer_window(i) or sequence, sequence) for i in range(self.layers)]
        return sum(2 * window - window**2 / max(sequence, 1) for window in windows) / self.layers

    @property
    def kv_width(self) -> int:
        """Features of all key heads of one token; attention reads as many of the values."""
        return self.key_heads * self.head_size

    @property
    def rope_tables(self) -> int:
        """Number of rotary tables: one more for a base of layers with a window."""
        return (self.position is PositionKind.rope) * (1 + (self.rope_local_theta is not None))

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Features over which queries and keys are normalized."""
        if self.qk_norm is QKNorm.projection:
            return self.query_width, self.kv_width
        return self.head_size, self.head_size

    def has_bias(self, name: str) -> bool:
        """Whether a linear layer of a block has a bias, by its name within the block."""
        return self.bias or (self.qkv_bias and name in QKV)

    @property
    def resolved_fields(self) -> dict[str, Any]:
        """Fields with the values that null stands for, and null for windows without effect."""

        def within(count: int | None, limit: int) -> int | None:
            return None if count is None or count > limit else count

        has_local_rope = self.rope_local_theta is not None
        window = self.window if has_local_rope else within(self.window, self.context - 1)
        return {
            **{entry.name: getattr(self, entry.name) for entry in fields(self)},
            "kv_heads": self.key_heads,
            "head_width": self.head_size,
            "expert_dim": self.hidden_dim,
            "value_head_dim": self.value_size if self.has_latent_attention else None,
            "attention_multiplier": self.attention_scale,
            "logit_divisor": self.total_logit_divisor,
            "window": window,
            "global_every": None if window is None else within(self.global_every, self.layers),
            "no_rope_every": within(self.no_rope_every, self.layers),
        }
