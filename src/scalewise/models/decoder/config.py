"""Configuration of decoder-only transformers: Llama, GPT-2, Qwen and others of their kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

from scalewise.errors import ConfigIssue
from scalewise.models.base import AttentionFlops, ModelConfig, TPStyle, Weight
from scalewise.models.decoder.config_rules import decoder_issues
from scalewise.models.decoder.kinds import (
    ActivationKind,
    NormKind,
    NormPlacement,
    PositionKind,
    QKNorm,
    RopeScaling,
)
from scalewise.models.decoder.moe_config import EXPERT_MATRICES, ExpertsConfig
from scalewise.registry import register_option

QKV = ("attention.query", "attention.key", "attention.value")
QK_NORMS = ("attention.query_norm", "attention.key_norm")
SMALL_HEAD_WIDTH, FEEDFORWARD_MULTIPLE = 8, 16
"""Smallest head of a shrunk decoder, and divisor of its feedforward width, in features."""


@register_option("model", "decoder")
@dataclass(frozen=True)
class DecoderConfig(ExpertsConfig, ModelConfig):
    """Causal transformer: ``x += attention(norm(x)); x += feedforward(norm(x))``."""

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
    ``expert_dim`` is set."""
    kv_heads: int | None = None
    """Number of key and value heads per block (grouped-query attention); null: as many as
    ``heads``."""
    head_width: int | None = None
    """Width of one head, in features; null: ``width / heads``."""
    norm: NormKind = NormKind.rmsnorm
    """Normalization layer of sublayers and before the head."""
    norm_placement: NormPlacement = NormPlacement.pre
    """Position of the norms of a block."""
    position: PositionKind = PositionKind.rope
    """Position encoding."""
    activation: ActivationKind = ActivationKind.swiglu
    """Activation of the feedforward."""
    bias: bool = False
    """Whether LayerNorm and all linear layers except the head have biases."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases, whatever ``bias``."""
    qk_norm: QKNorm = QKNorm.none
    """RMSNorm of queries and keys, before their rotary positions."""
    tied: bool = False
    """Whether the head shares the weight of the token embedding."""
    classes: int | None = None
    """Number of outputs of the head; null: the vocabulary size."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths, which range from 2 pi to about 2 pi theta positions."""
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
    """Every how many layers one has no rotary positions (SmolLM3: 4); null: all have them."""
    window: int | None = None
    """Number of latest tokens that a token attends to, its own included; null: all before it."""
    global_every: int | None = None
    """Every how many layers one has no window (Gemma 3: 6); null: all have it."""
    embedding_multiplier: float = 1.0
    """Factor of token embeddings (Gemma: sqrt(width))."""
    residual_multiplier: float = 1.0
    """Factor of sublayer outputs before they are added to the residual stream."""
    attention_multiplier: float | None = None
    """Factor of attention scores; null: ``1 / sqrt(head_width)``."""
    logit_divisor: float = 1.0
    """Divisor of the logits."""
    norm_epsilon: float = 1e-5
    """Constant added to the variance before its root is taken."""
    dropout: float = 0.0
    """Dropout probability of embeddings, attention weights and sublayer outputs."""
    initial_std: float = 0.02
    """Standard deviation of initial weights; divided by sqrt(2 layers) for sublayer outputs."""
    weights: str | None = None
    """Folder or .safetensors file of Hugging Face weights to start from; null: random weights."""

    casts_residual = True
    implementation = "scalewise.models.decoder.state_dict_adapter"
    op_graph_implementation = "scalewise.models.decoder.op_graph"

    @property
    def pretrained_path(self) -> str | None:
        """Folder or file of the pretrained weights; None: random initialization."""
        return self.weights

    def find_tokenizer_file(self) -> Path | None:
        """Return the tokenizer.json next to the pretrained weights, or None."""
        path = Path(self.weights or "")
        file = (path if path.is_dir() else path.parent) / "tokenizer.json"
        return file if self.weights is not None and file.is_file() else None

    @property
    def head_size(self) -> int:
        """Features per head."""
        return self.head_width or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Number of key (and value) heads per block."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def query_width(self) -> int:
        """Features of all query heads of one token, also of the attention output."""
        return self.heads * self.head_size

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        return self.attention_multiplier or 1 / sqrt(self.head_size)

    @property
    def has_post_norm(self) -> bool:  # type: ignore[override]  # not a field here
        """Whether a block normalizes the output of its last linear layer."""
        return "after" in self.norm_placement.sides

    @property
    def has_gate(self) -> bool:
        """Whether the feedforward multiplies two projections."""
        return self.activation is not ActivationKind.gelu

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
        """Features of all key heads of one token; the values have as many."""
        return self.key_heads * self.head_size

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the rotary tables: cosines and sines in float32, never sharded."""
        return self.rope_tables * 2 * self.context * self.head_size * 4

    @property
    def rope_tables(self) -> int:
        """Number of rotary tables: one more for a base of layers with a window."""
        return (self.position is PositionKind.rope) * (1 + (self.rope_local_theta is not None))

    @property
    def linear_layers(self) -> tuple[tuple[str, int, int, str], ...]:
        """Linear layers of one block: name within it, output features, input features, role.

        The router and the matrices of routed experts are not among them.
        """
        up = ("gate", "up") if self.has_gate else ("up",)
        prefix, hidden = "feedforward", self.feedforward
        if self.experts:
            prefix, hidden = "feedforward.shared", self.shared_experts * self.hidden_dim
        return (
            (QKV[0], self.query_width, self.width, "attention"),
            (QKV[1], self.kv_width, self.width, "attention"),
            (QKV[2], self.kv_width, self.width, "attention"),
            ("attention.output", self.width, self.query_width, "attention"),
            *(
                layer
                for layer in (
                    *((f"{prefix}.{name}", hidden, self.width, "feedforward") for name in up),
                    (f"{prefix}.down", self.width, hidden, "feedforward"),
                )
                if hidden
            ),
        )

    @property
    def block_norms(self) -> tuple[str, ...]:
        """Names of the norms of the residual stream in a block."""
        names = {"before": "norm", "after": "post_norm"}
        sides = self.norm_placement.sides
        return tuple(f"{part}_{names[it]}" for part in ("attention", "feedforward") for it in sides)

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Features over which queries and keys are normalized."""
        if self.qk_norm is QKNorm.projection:
            return self.query_width, self.kv_width
        return self.head_size, self.head_size

    def has_bias(self, name: str) -> bool:
        """Whether a linear layer of a block has a bias, by its name within the block."""
        return self.bias or (self.qkv_bias and name in QKV)

    def weight_census(self) -> tuple[Weight, ...]:
        """Return every parameter of ``DecoderModule``, in the order of ``named_parameters()``."""
        return tuple(self._iter_weights())

    def _iter_weights(self) -> Iterator[Weight]:
        yield Weight("embedding.weight", (self.vocabulary, self.width), "embedding")
        if self.position is PositionKind.learned:
            yield Weight("position.weight", (self.context, self.width), "position")
        for layer in range(self.layers):
            block = f"blocks.{layer}"
            sublayers = {
                "attention_norm": self.linear_layers[:4],
                "feedforward_norm": self.linear_layers[4:],
            }
            for norm, linears in sublayers.items():
                if norm in self.block_norms:
                    yield from self._norm(f"{block}.{norm}", layer)
                if norm == "feedforward_norm" and self.experts:
                    yield from self._expert_weights(block, layer)
                for name, out, into, role in linears:
                    yield Weight(f"{block}.{name}.weight", (out, into), role, layer)
                    if self.has_bias(name):
                        yield Weight(f"{block}.{name}.bias", (out,), "bias", layer)
                if norm == "attention_norm" and self.qk_norm is not QKNorm.none:
                    for name, size in zip(QK_NORMS, self.qk_norm_sizes, strict=True):
                        yield Weight(f"{block}.{name}.weight", (size,), "norm", layer)
                if (after := norm.replace("norm", "post_norm")) in self.block_norms:
                    yield from self._norm(f"{block}.{after}", layer)
        yield from self._norm("norm", None)
        if not self.tied:
            yield Weight("head.weight", (self.output_size, self.width), "head")

    def _expert_weights(self, block: str, layer: int) -> Iterator[Weight]:
        width, hidden, experts = self.width, self.hidden_dim, self.routed_experts
        yield Weight(f"{block}.feedforward.router.weight", (experts, width), "router", layer)
        for name in EXPERT_MATRICES:
            shape = (experts * width, hidden) if name == "down" else (experts * hidden, width)
            yield Weight(f"{block}.feedforward.experts.{name}.weight", shape, "experts", layer)

    def token_fraction(self, name: str, sequence: int, target: int) -> float:
        """Return the fraction of the tokens that a matrix is applied to: not 1 for experts."""
        is_routed = self.experts and ".experts." in name
        return self.experts_per_token / self.routed_experts if is_routed else 1.0

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token is computed with."""
        inactive = self.routed_experts - self.experts_per_token if self.experts else 0
        return self.num_parameters - self.layers * inactive * 3 * self.width * self.hidden_dim

    def _norm(self, name: str, layer: int | None) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (self.width,), "norm", layer)
        if self.bias and self.norm is NormKind.layernorm:
            yield Weight(f"{name}.bias", (self.width,), "bias", layer)

    def flops(
        self, sequence: int, target: int = 0, attention: AttentionFlops = AttentionFlops.kernel
    ) -> float:
        """Return the FLOPs of one forward and backward pass, per token of a ``sequence``.

        A linear layer with m x n weights costs 2mn FLOPs per token in forward and twice that in
        backward (one matmul for the input gradient, one for the weight gradient): 6mn. The
        embedding is a lookup and costs none; the head is a linear layer, tied or not. Attention
        multiplies each query with S keys, and its weights with S values: 2 matmuls of 2 S A FLOPs,
        A = ``query_width``. The backward of flash attention has 5 such matmuls, one of which
        recomputes the scores: 2.5 times the forward. The sum per layer and token is
        4 S A * 3.5 = 14 S A (12 S A without the recomputation; ``attention`` selects the
        convention).

        Every query counts against the full sequence, except with ``AttentionFlops.causal``, which
        counts half of it; in layers with a window, against ``mean_keys``. Of the routed experts,
        those of one token count.
        Source: Chowdhery et al. 2022, PaLM, appendix B; Dao 2023, FlashAttention-2, section 4.1.
        """
        block = 6.0 * sum(out * into for _, out, into, _ in self.linear_layers)
        if self.experts:
            active = self.experts_per_token * len(EXPERT_MATRICES) * self.hidden_dim
            block += 6.0 * self.width * (active + self.experts)
        attention_flops = attention.count(self.mean_keys(sequence) * self.query_width)
        return self.layers * (block + attention_flops) + 6.0 * self.output_size * self.width

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield config issues of the architecture, and of pretrained weights that do not exist."""
        yield from decoder_issues(self)

    @property
    def resolved_fields(self) -> dict[str, Any]:
        """Fields with the values that null stands for, and null for windows without effect."""

        def within(count: int | None, limit: int) -> int | None:
            return None if count is None or count > limit else count

        return {
            **vars(self),
            "kv_heads": self.key_heads,
            "head_width": self.head_size,
            "expert_dim": self.hidden_dim,
            "attention_multiplier": self.attention_scale,
            "window": self.window
            if self.rope_local_theta is not None
            else within(self.window, self.context - 1),
            "global_every": within(self.global_every, self.layers),
            "no_rope_every": within(self.no_rope_every, self.layers),
        }

    def tensor_parallel_styles(self) -> dict[str, TPStyle]:
        """Return Megatron's styles: a column- and a row-parallel layer per sublayer."""
        norms = (*(f"blocks.*.{name}" for name in self.block_norms), "norm")
        rows = ("attention.output", "feedforward.down")
        return {
            "embedding": TPStyle.vocabulary,
            "position": TPStyle.positions,
            **dict.fromkeys(norms, TPStyle.tokens),
            **{
                f"blocks.*.{name}": TPStyle.heads
                for name in QK_NORMS
                if self.qk_norm is not QKNorm.none
            },
            **{
                f"blocks.*.{name}": TPStyle.row if name in rows else TPStyle.column
                for name, *_ in self.linear_layers
            },
            "head": TPStyle.head,
        }

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Query and value projections (Hu et al., 2021, section 7.1)."""
        return ("attention.query", "attention.value")

    @property
    def ia3_targets(self) -> tuple[str, ...]:
        """Key and value projections, and the last layer of the feedforward (Liu et al., 2022).

        Experts are not scaled.
        """
        return ("attention.key", "attention.value", "feedforward.down")

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the heads, the feedforward width and the vocabulary size."""
        return {
            "heads": self.heads,
            "kv_heads": self.key_heads,
            "feedforward": self.feedforward,
            "vocabulary": self.vocabulary,
        }

    @property
    def tied_weights(self) -> frozenset[str]:
        """Embedding weight if the head is tied, else empty."""
        return frozenset({"embedding.weight"} if self.tied else ())

    @property
    def end_modules(self) -> tuple[str, ...]:
        """Names of the token embedding and of the head, unless they are tied."""
        return () if self.tied else ("embedding", "head")

    def with_layers(self, layers: int) -> DecoderConfig:
        """Return the same configuration with another number of layers."""
        return replace(self, layers=layers)

    def shrink(self, layers: int, width: int | None) -> DecoderConfig:
        """Return a small copy with random weights; heads are at least 8 features wide.

        The number of query heads per key head stays the same if it divides the number of heads.
        """
        small = replace(self, layers=min(layers, self.layers), weights=None, dropout=0.0)
        if width is None or width >= self.width:
            return small
        heads = max(
            count
            for count in range(1, self.heads + 1)
            if self.heads % count == 0 and (count == 1 or count * SMALL_HEAD_WIDTH <= width)
        )
        key_heads = max(1, heads * self.key_heads // self.heads)

        def shrink_hidden(features: int) -> int:
            multiples = features * width // self.width // FEEDFORWARD_MULTIPLE
            return max(1, multiples) * FEEDFORWARD_MULTIPLE

        return replace(
            small,
            width=width,
            heads=heads,
            kv_heads=key_heads if heads % key_heads == 0 else heads,
            head_width=max(2, width // heads // 2 * 2),
            feedforward=shrink_hidden(self.feedforward),
            expert_dim=self.expert_dim and shrink_hidden(self.expert_dim),
        )
