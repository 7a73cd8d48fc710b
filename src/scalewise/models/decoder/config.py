"""Configuration of decoder-only transformers: Llama, GPT-2, Qwen and others of their kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scalewise.errors import ConfigIssue
from scalewise.models.base import AttentionFlops, TPStyle, Weight
from scalewise.models.decoder.architecture import QKV, DecoderArchitecture
from scalewise.models.decoder.config_rules import decoder_issues
from scalewise.models.decoder.kinds import (
    NormKind,
    PositionKind,
    QKNorm,
    Residual,
)
from scalewise.models.decoder.moe_config import EXPERT_MATRICES, EXPERTS_MODULE
from scalewise.registry import register_option

QK_NORMS = ("attention.query_norm", "attention.key_norm")
EXPERT_STYLES = {
    "blocks.*.feedforward.router": TPStyle.router,
    f"blocks.*.{EXPERTS_MODULE}.gate": TPStyle.expert_column,
    f"blocks.*.{EXPERTS_MODULE}.up": TPStyle.expert_column,
    f"blocks.*.{EXPERTS_MODULE}.down": TPStyle.expert_row,
}
"""Tensor parallel style of the router and of the matrices of routed experts."""
SMALL_HEAD_WIDTH, FEEDFORWARD_MULTIPLE = 8, 16
"""Smallest head of a shrunk decoder, and divisor of its feedforward width, in features."""


@register_option("model", "decoder")
@dataclass(frozen=True)
class DecoderConfig(DecoderArchitecture):
    """Causal transformer: ``x += attention(norm(x)); x += feedforward(norm(x))``."""

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
    def has_post_norm(self) -> bool:  # type: ignore[override]  # not a field here
        """Whether a block normalizes the output of its last linear layer."""
        return "after" in self.norm_placement.sides

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the rotary tables: cosines and sines in float32, never sharded."""
        return self.rope_tables * 2 * self.context * self.rope_table_size * 4

    @property
    def has_equal_blocks(self) -> bool:
        """Whether all blocks have weights of the same names and shapes."""
        return not self.experts or self.dense_layers == 0

    @property
    def attention_linears(self) -> tuple[tuple[str, int, int], ...]:
        """Linear layers of attention: name within a block, output and input features."""
        width = self.width
        if self.kv_latent_dim is None:
            return (
                (QKV[0], self.query_width, width),
                (QKV[1], self.kv_width, width),
                (QKV[2], self.kv_width, width),
                ("attention.output", width, self.query_width),
            )
        rope, query_input = self.rope_head_dim or 0, self.query_latent_dim or width
        has_latent = self.query_latent_dim is not None
        return (
            *((("attention.query_latent", query_input, width),) if has_latent else ()),
            ("attention.query", self.query_width - self.heads * rope, query_input),
            ("attention.query_rope", self.heads * rope, query_input),
            ("attention.kv_latent", self.kv_latent_dim, width),
            ("attention.key_rope", rope, width),
            ("attention.key", self.kv_width - self.heads * rope, self.kv_latent_dim),
            ("attention.value", self.value_width, self.kv_latent_dim),
            ("attention.output", width, self.value_width),
        )

    @property
    def attention_norms(self) -> tuple[tuple[str, int], ...]:
        """Norms within attention: name within a block, and features."""
        if self.has_latent_attention:
            latents = {"query_latent": self.query_latent_dim, "kv_latent": self.kv_latent_dim}
            return tuple((f"attention.{name}_norm", it) for name, it in latents.items() if it)
        if self.qk_norm is QKNorm.none:
            return ()
        return tuple(zip(QK_NORMS, self.qk_norm_sizes, strict=True))

    def feedforward_linears(self, *, experts: bool) -> tuple[tuple[str, int, int], ...]:
        """Linear layers of a feedforward, dense or of shared experts, as ``attention_linears``.

        The router and the matrices of routed experts are not among them.
        """
        up = ("gate", "up") if self.has_gate else ("up",)
        prefix, hidden = "feedforward", self.feedforward
        if experts:
            prefix, hidden = "feedforward.shared", self.shared_experts * self.hidden_dim
        layers = (
            *((f"{prefix}.{name}", hidden, self.width) for name in up),
            (f"{prefix}.down", self.width, hidden),
        )
        return layers if hidden else ()

    @property
    def num_expert_layers(self) -> int:
        """Number of blocks whose feedforward is a mixture of experts."""
        return max(0, self.layers - self.dense_layers) if self.experts else 0

    @property
    def block_norms(self) -> tuple[str, ...]:
        """Names of the norms of the residual stream in a block."""
        names = {"before": "norm", "after": "post_norm"}
        sides = self.norm_placement.sides
        if self.residual is Residual.parallel_one_norm:
            return ("attention_norm",)
        return tuple(f"{part}_{names[it]}" for part in ("attention", "feedforward") for it in sides)

    def weight_census(self) -> tuple[Weight, ...]:
        """Return every parameter of ``DecoderModule``, in the order of ``named_parameters()``."""
        weights = tuple(self._iter_weights())
        if self.base_width is None:
            return weights
        return tuple(replace(weight, width_ratio=self._size_ratio(weight)) for weight in weights)

    def _size_ratio(self, weight: Weight) -> float:
        """Return the size of the growing dimensions of a weight relative to the base model."""
        if weight.name == "head.bias":
            return 1.0
        norms = tuple(f".{norm}.weight" for norm in QK_NORMS)
        if self.qk_norm is QKNorm.head and weight.name.endswith(norms):
            return self.head_width_ratio
        return self.width_ratio

    def _iter_weights(self) -> Iterator[Weight]:
        yield Weight("embedding.weight", (self.vocabulary, self.width), "embedding")
        if self.position is PositionKind.learned:
            yield Weight("position.weight", (self.context, self.width), "position")
        for layer in range(self.layers):
            block = f"blocks.{layer}"
            experts = self.has_experts(layer)
            sublayers = {
                "attention": self.attention_linears,
                "feedforward": self.feedforward_linears(experts=experts),
            }
            for role, linears in sublayers.items():
                norm = f"{role}_norm"
                if norm in self.block_norms:
                    yield from self._norm(f"{block}.{norm}", layer)
                if role == "feedforward" and experts:
                    yield from self._expert_weights(block, layer)
                for name, out, into in linears:
                    yield Weight(f"{block}.{name}.weight", (out, into), role, layer)
                    if self.has_bias(name):
                        yield Weight(f"{block}.{name}.bias", (out,), "bias", layer)
                for name, size in self.attention_norms if role == "attention" else ():
                    yield Weight(f"{block}.{name}.weight", (size,), "norm", layer)
                if (after := f"{role}_post_norm") in self.block_norms:
                    yield from self._norm(f"{block}.{after}", layer)
        yield from self._norm("norm", None)
        if not self.tied:
            yield Weight("head.weight", (self.output_size, self.width), "head")
        if self.head_bias:
            yield Weight("head.bias", (self.output_size,), "bias")

    def _expert_weights(self, block: str, layer: int) -> Iterator[Weight]:
        width, hidden, experts = self.width, self.hidden_dim, self.routed_experts
        yield Weight(f"{block}.feedforward.router.weight", (experts, width), "router", layer)
        for name in EXPERT_MATRICES:
            shape = (experts * width, hidden) if name == "down" else (experts * hidden, width)
            weight_name = f"{block}.{EXPERTS_MODULE}.{name}.weight"
            yield Weight(weight_name, shape, "experts", layer, stacked=experts)

    @property
    def expert_layers(self) -> tuple[str, ...]:
        """Names, within a block, of the matrices of routed experts."""
        return tuple(f"{EXPERTS_MODULE}.{name}" for name in EXPERT_MATRICES if self.experts)

    def token_fraction(self, name: str, sequence: int, target: int) -> float:
        """Return the fraction of the tokens that a matrix is applied to: not 1 for experts."""
        is_routed = self.experts and ".experts." in name
        return self.experts_per_token / self.routed_experts if is_routed else 1.0

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token is computed with."""
        inactive = self.num_expert_layers * (self.routed_experts - self.experts_per_token)
        return self.num_parameters - inactive * 3 * self.width * self.hidden_dim

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
        A = ``query_width``; narrower values are padded, which the other conventions do not count.
        The backward of flash attention has 5 such matmuls, one of which recomputes the scores: 2.5
        times the forward. The sum per layer and token is 4 S A * 3.5 = 14 S A (12 S A without the
        recomputation; ``attention`` selects the convention).

        Every query counts against the full sequence, except with ``AttentionFlops.causal``, which
        counts half of it; in layers with a window, against ``mean_keys``. Of the routed experts,
        those of one token count.
        Source: Chowdhery et al. 2022, PaLM, appendix B; Dao 2023, FlashAttention-2, section 4.1.
        """
        experts, width = self.num_expert_layers, self.query_width
        weights = self.layers * _count_elements(self.attention_linears)
        dense = _count_elements(self.feedforward_linears(experts=False))
        weights += (self.layers - experts) * dense
        if experts:
            active = self.experts_per_token * len(EXPERT_MATRICES) * self.hidden_dim
            shared = _count_elements(self.feedforward_linears(experts=True))
            weights += experts * (shared + self.width * (active + self.routed_experts))
        if attention is not AttentionFlops.kernel:
            width = (width + self.value_width) // 2
        attention_flops = attention.count(self.mean_keys(sequence) * width)
        return self.layers * attention_flops + 6.0 * (weights + self.output_size * self.width)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield config issues of the architecture, and of pretrained weights that do not exist."""
        yield from decoder_issues(self)

    def tensor_parallel_styles(self) -> dict[str, TPStyle]:
        """Return Megatron's styles: a column- and a row-parallel layer per sublayer."""
        norms = (*(f"blocks.*.{name}" for name in self.block_norms), "norm")
        rows = {"attention.output": TPStyle.row, "feedforward.down": TPStyle.row}
        rows["feedforward.shared.down"] = TPStyle.partial_row
        linears = (*self.attention_linears, *self._feedforward_kinds())
        return {
            "embedding": TPStyle.vocabulary,
            "position": TPStyle.positions,
            **dict.fromkeys(norms, TPStyle.tokens),
            **{f"blocks.*.{name}": TPStyle.heads for name, _ in self.attention_norms},
            **{f"blocks.*.{name}": rows.get(name, TPStyle.column) for name, *_ in linears},
            **(EXPERT_STYLES if self.experts else {}),
            "head": TPStyle.head,
        }

    def _feedforward_kinds(self) -> Iterator[tuple[str, int, int]]:
        """Yield the linear layers of dense feedforwards, and of those with experts."""
        if self.num_expert_layers < self.layers:
            yield from self.feedforward_linears(experts=False)
        if self.num_expert_layers:
            yield from self.feedforward_linears(experts=True)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Query and value projections (Hu et al., 2021, section 7.1)."""
        rope = ("attention.query_rope",) if self.has_latent_attention else ()
        return ("attention.query", *rope, "attention.value")

    @property
    def ia3_targets(self) -> tuple[str, ...]:
        """Key and value projections, and the last layer of the feedforward (Liu et al., 2022).

        Experts are not scaled.
        """
        return ("attention.key", "attention.value", "feedforward.down")

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the heads, the widths of feedforwards and the vocabulary size."""
        hidden = {"feedforward": self.feedforward}
        if self.experts:
            hidden = hidden if self.dense_layers else {}
            hidden["expert_dim" if self.expert_dim else "feedforward"] = self.hidden_dim
        return {
            "heads": self.heads,
            "kv_heads": self.key_heads,
            **hidden,
            "vocabulary": self.vocabulary,
        }

    @property
    def tied_weights(self) -> frozenset[str]:
        """Embedding weight if the head is tied, else empty."""
        return frozenset({"embedding.weight"} if self.tied else ())

    @property
    def end_modules(self) -> tuple[str, ...]:
        """Names of the token embedding and of the head, unless they are tied."""
        return () if self.tied or not self.has_equal_blocks else ("embedding", "head")

    def with_layers(self, layers: int) -> DecoderConfig:
        """Return the same configuration with another number of layers."""
        return replace(self, layers=layers)

    def shrink(self, layers: int, width: int | None) -> DecoderConfig:
        """Return a small copy with random weights; heads are at least 8 features wide.

        The number of query heads per key head stays the same if it divides the number of heads. A
        base model of muP has half the width, and as many heads. The capacity of experts, which
        depends on the ranks, takes all tokens.
        """
        layers = min(layers, self.layers)
        dense_layers = min(self.dense_layers, max(0, layers - 1))
        small = replace(self, layers=layers, dense_layers=dense_layers, weights=None, dropout=0.0)
        if self.capacity_factor is not None:
            small = replace(small, capacity_factor=self.routed_experts / self.experts_per_token)
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

        head_width = max(2, width // heads // 2 * 2)
        if self.kv_latent_dim is not None:
            head_width = max(SMALL_HEAD_WIDTH, head_width)
            rope = max(2, head_width * self.rotary_size // self.head_size // 2 * 2)
            small = replace(
                small,
                kv_latent_dim=shrink_hidden(self.kv_latent_dim),
                query_latent_dim=self.query_latent_dim and shrink_hidden(self.query_latent_dim),
                rope_head_dim=rope,
                value_head_dim=max(2, head_width * self.value_size // self.head_size // 2 * 2),
            )
        return replace(
            small,
            width=width,
            heads=heads,
            kv_heads=key_heads if heads % key_heads == 0 else heads,
            head_width=head_width,
            feedforward=shrink_hidden(self.feedforward),
            expert_dim=self.expert_dim and shrink_hidden(self.expert_dim),
            base_width=self.base_width and max(1, width // 2),
            base_heads=self.base_heads and heads,
        )


def _count_elements(linears: Iterable[tuple[str, int, int]]) -> int:
    return sum(out * into for _, out, into in linears)
