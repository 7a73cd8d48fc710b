"""Torch module of the decoder.

Shape suffixes: B batch, T tokens of a sequence on this rank, S tokens of the full sequence, W
width, F feedforward, V vocabulary, H query heads, K key (and value) heads, D features per head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.models import init
from scalewise.models.attention_segments import (
    AttentionSegments,
    equal_segments,
    packed_segments,
)
from scalewise.models.autocast import residual_dtype
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.decoder.attention import PrefixAttention, SelfAttention, build_rope_table
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import ActivationKind, NormKind, PositionKind, Residual
from scalewise.models.decoder.latent_attention import LatentAttention
from scalewise.models.decoder.moe import MixtureOfExperts, find_mixtures
from scalewise.models.decoder.norms import build_norm


class DecoderModule(ModelModule):
    """Decoder-only transformer: ``tokens_BT -> logits_BTV``.

    Parameters have the names and the order of ``spec.weight_census()``. The module is built on the
    meta device; ``to_empty(device=...)``, optionally after sharding, and ``init_weights(seed)``
    materialize it. A pipeline ``stage`` has some of the layers: unless it is the first it reads
    ``x_BTW``, and unless it is the last it returns ``x_BTW``.
    """

    rope: Tensor | None
    """Rotary table."""
    local_rope: Tensor | None
    """Rotary table of layers with a window; None: ``rope``."""

    def __init__(self, spec: DecoderConfig, stage: StageSlice) -> None:
        super().__init__()
        self.spec, self.stage = spec, stage
        learned = spec.position is PositionKind.learned
        embeds = stage.is_first or (stage.is_last and spec.tied)
        with torch.device("meta"):  # skips torch's own initialization
            self.embedding = nn.Embedding(spec.vocabulary, spec.width) if embeds else None
            self.position = (
                nn.Embedding(spec.context, spec.width) if learned and stage.is_first else None
            )
            self.blocks = nn.ModuleDict(
                {str(layer): TransformerBlock(spec, layer) for layer in stage.layers}
            )
            self.norm = build_norm(spec) if stage.is_last else None
            self.head = build_head(spec) if stage.is_last else None
            shape = (2, spec.context, spec.rope_table_size)
            for index, name in enumerate(("rope", "local_rope")):
                is_used = index < spec.rope_tables
                table = torch.empty(shape, dtype=torch.float32) if is_used else None
                self.register_buffer(name, table, persistent=False)
        self.positions_T: Tensor | None = None
        self.prompt: PromptVectors | None = None
        self.prompt_tokens = self.prefix_tokens = 0

    def layers(self) -> list[nn.Module]:
        """Return the blocks, in order."""
        return list(self.blocks.values())

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the head, and the embedding if it is tied."""
        assert self.head is not None
        yield from self.head.parameters()
        if self.spec.tied:
            assert self.embedding is not None
            yield cast(nn.Parameter, self.embedding.weight)

    def replace_attention(self, make: Callable[[float], nn.Module]) -> None:
        """Replace the attention of every block by ``make(dropout)``."""
        for block in self.blocks.values():
            assert isinstance(block, TransformerBlock)
            block.attention.mix = make(self.spec.dropout)

    def add_prompt_tokens(self, tokens: int) -> None:
        """Insert trained vectors before the embedded tokens, in the stage with the embedding."""
        self.prompt_tokens = tokens
        if self.stage.is_first:
            with torch.device("meta"):
                self.prompt = PromptVectors(tokens, self.spec.width)

    def add_prefix_kv(self, tokens: int) -> None:
        """Insert trained keys and values before those of each layer."""
        self.prefix_tokens = tokens
        with torch.device("meta"):
            self.replace_attention(lambda _: PrefixAttention(self.spec, tokens))

    def set_position_ids(self, positions_T: Tensor) -> None:
        """Set the positions of this rank's tokens in the sequence."""
        self.positions_T = positions_T

    def forward(
        self, x: Tensor, labels_BT: Tensor | None = None, positions_BS: Tensor | None = None
    ) -> Tensor:
        """Return ``logits_BTV`` of ``tokens_BT``, their loss, or the ``x_BTW`` of a stage."""
        positions_T = self.positions_T
        if positions_T is None:
            positions_T = torch.arange(self.prompt_tokens + x.shape[1], device=x.device)
        segments = self.segments(x, len(positions_T), positions_BS)
        if positions_BS is not None:
            positions_T = positions_BS.to(x.device, non_blocking=True)[:, positions_T]
        if self.prefix_tokens:
            positions_T = positions_T + self.prefix_tokens
        if self.stage.is_first:
            x = self.embed(x, positions_T)
        rope_2TD = None if self.rope is None else self.rope[:, positions_T]
        local_rope_2TD = None if self.local_rope is None else self.local_rope[:, positions_T]
        for name, block in self.blocks.items():
            layer = int(name)
            is_local = local_rope_2TD is not None and self.spec.layer_window(layer) is not None
            layer_rope_2TD = local_rope_2TD if is_local else rope_2TD
            x = block(x, layer_rope_2TD if self.spec.has_rope(layer) else None, segments)
        return self.unembed(x, labels_BT) if self.stage.is_last else x

    def segments(
        self, x: Tensor, tokens: int, positions_BS: Tensor | None
    ) -> AttentionSegments | None:
        """Return the segments of packed sequences or of prefix keys; None: causal attention."""
        if positions_BS is not None:
            return packed_segments(positions_BS, x.device, self.prefix_tokens)
        if self.prefix_tokens:
            return equal_segments(len(x), tokens, self.prefix_tokens + tokens, x.device)
        return None

    def embed(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        """Return the input ``x_BTW`` of the first block."""
        assert self.embedding is not None
        x_BTW = cast(Tensor, self.embedding(tokens_BT))
        x_BTW = x_BTW.to(residual_dtype(x_BTW))
        if self.spec.embedding_multiplier != 1.0:
            x_BTW = x_BTW * self.spec.embedding_multiplier
        if self.prompt is not None:
            x_BTW = self.prompt(x_BTW)
        if self.position is not None:
            x_BTW = x_BTW + self.position(positions_T).to(x_BTW.dtype)
        return F.dropout(x_BTW, self.spec.dropout, self.training)

    def unembed(self, x_BTW: Tensor, labels_BT: Tensor | None) -> Tensor:
        """Return ``logits_BTV`` of the last block's output, or the loss of the labels."""
        assert self.norm is not None
        x_BTW = self.norm(x_BTW)
        if self.prompt_tokens:
            x_BTW = self.gather_tokens(x_BTW)[:, self.prompt_tokens :]
        if self.loss is None or labels_BT is None:
            return self.logits(x_BTW)
        return self.loss(self.logits, self.gather_tokens(x_BTW), labels_BT)

    def logits(self, x_BTW: Tensor, *, hooks: bool = True) -> Tensor:
        """Return ``logits_BTV`` of normalized features."""
        assert self.head is not None
        head: Callable[..., Tensor] = self.head if hooks else self.head.forward
        softcap = self.spec.logit_softcap
        if self.spec.feature_divisor != 1.0:
            x_BTW = x_BTW / self.spec.feature_divisor
        weights: list[Tensor] = []
        if self.spec.tied:
            assert self.embedding is not None
            weights = [self.embedding.weight]
        logits_BTV = head(x_BTW, *weights)
        return logits_BTV if softcap is None else logits_BTV.tanh() * softcap

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize every parameter from ``seed`` and its name, and fill the buffers.

        Matrices are drawn from N(0, ``initial_std``^2), or N(0, ``hidden_std``^2) in blocks. Those
        that write to the residual stream are scaled by ``1 / sqrt(2 layers)``, so that its variance
        does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). Norms are one, or zero
        if they are zero-centered; biases are zero.
        """
        self.init_buffers()
        residual_std = self.spec.hidden_std / sqrt(2 * self.spec.layers)
        for name, parameter in self.base_parameters():
            if isinstance(parameter, nn.Parameter) and name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif isinstance(parameter, nn.Parameter) and "norm" in name:
                is_centered = self.spec.norm is NormKind.zero_centered_rmsnorm
                nn.init.constant_(parameter, 0.0 if is_centered else 1.0)
            else:
                writes_residual = name.endswith(("attention.output.weight", ".down.weight"))
                std = self.spec.initial_std
                if name.startswith("blocks."):
                    std = residual_std if writes_residual else self.spec.hidden_std
                init.init_normal(name, parameter, seed, std)

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fill the rotary tables, which are not in checkpoints, and the biases of routers."""
        spec = self.spec
        if self.rope is not None:
            table = build_rope_table(spec, spec.rope_theta, scales=spec.rope_scaling)
            self.rope.copy_(table)
        if self.local_rope is not None and spec.rope_local_theta is not None:
            self.local_rope.copy_(build_rope_table(spec, spec.rope_local_theta, scales=False))
        for experts in find_mixtures(self):
            experts.init_buffers()

    def set_sequence_weight(self, weight: float) -> None:
        """Set the weight of one sequence in the losses of the routers."""
        for experts in find_mixtures(self):
            experts.sequence_weight = weight


class PromptVectors(nn.Module):
    """Trained vectors before the embedded tokens: ``x_BTW -> x_BTW`` with a longer T."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width))

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return ``x_BTW`` with the vectors prepended."""
        prompt_BTW = self.weight.to(x_BTW.dtype).expand(len(x_BTW), -1, -1)
        return torch.cat((prompt_BTW, x_BTW), dim=1)


class TransformerBlock(nn.Module):
    """Transformer block: ``x_BTW, rope_2TD, segments -> x_BTW``."""

    def __init__(self, spec: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.dropout, self.multiplier = spec.dropout, spec.residual_multiplier
        has_norm = {side: side in spec.norm_placement.sides for side in ("before", "after")}
        self.residual = spec.residual
        self.attention_norm = build_norm(spec) if has_norm["before"] else nn.Identity()
        attention = LatentAttention if spec.has_latent_attention else SelfAttention
        self.attention = attention(spec, layer)
        self.attention_post_norm = build_norm(spec) if has_norm["after"] else nn.Identity()
        has_feedforward_norm = "feedforward_norm" in spec.block_norms
        self.feedforward_norm = build_norm(spec) if has_feedforward_norm else nn.Identity()
        self.feedforward = build_feedforward(spec, layer)
        self.feedforward_post_norm = build_norm(spec) if has_norm["after"] else nn.Identity()

    def forward(
        self,
        x_BTW: Tensor,
        rope_2TD: Tensor | None,
        segments: AttentionSegments | None = None,
    ) -> Tensor:
        """Return the residual stream after this layer."""
        if self.residual is not Residual.sequential:
            return self._parallel(x_BTW, rope_2TD, segments)
        x_BTW = x_BTW + self._scale(
            self.attention_post_norm(self.attention(self.attention_norm(x_BTW), rope_2TD, segments))
        )
        return x_BTW + self._scale(
            self.feedforward_post_norm(self.feedforward(self.feedforward_norm(x_BTW)))
        )

    def _parallel(
        self, x_BTW: Tensor, rope_2TD: Tensor | None, segments: AttentionSegments | None
    ) -> Tensor:
        """Return the residual stream if both sublayers read that before the layer."""
        normed_BTW = self.attention_norm(x_BTW)
        attended_BTW = x_BTW + self._scale(self.attention(normed_BTW, rope_2TD, segments))
        if self.residual is Residual.parallel:
            normed_BTW = self.feedforward_norm(x_BTW)
        return attended_BTW + self._scale(self.feedforward(normed_BTW))

    def _scale(self, branch_BTW: Tensor) -> Tensor:
        branch_BTW = F.dropout(branch_BTW, self.dropout, self.training)
        return branch_BTW if self.multiplier == 1.0 else branch_BTW * self.multiplier


def build_feedforward(spec: DecoderConfig, layer: int) -> nn.Module:
    """Return the feedforward of a block, dense or of experts."""
    if spec.has_experts(layer):
        hidden = spec.shared_experts * spec.hidden_dim
        return MixtureOfExperts(spec, GatedFeedForward(spec, hidden) if hidden else None)
    if spec.has_gate:
        return GatedFeedForward(spec, spec.feedforward)
    return GELUFeedForward(spec)


class GatedFeedForward(nn.Module):
    """Gated feedforward: ``x_BTW -> down(activation(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, spec: DecoderConfig, hidden: int) -> None:
        super().__init__()
        self.is_gelu = spec.activation is ActivationKind.geglu
        self.gate = nn.Linear(spec.width, hidden, bias=spec.bias)
        self.up = nn.Linear(spec.width, hidden, bias=spec.bias)
        self.down = nn.Linear(hidden, spec.width, bias=spec.bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return ``x_BTW``."""
        # No local variables: they would live until ``down`` returns.
        return cast(Tensor, self.down(self._activate(self.gate(x_BTW)) * self.up(x_BTW)))

    def _activate(self, gate_BTF: Tensor) -> Tensor:
        return F.gelu(gate_BTF, approximate="tanh") if self.is_gelu else F.silu(gate_BTF)


class GELUFeedForward(nn.Module):
    """GELU feedforward: ``x_BTW -> down(GELU(up(x)))``, exact or with a tanh (GPT-2)."""

    def __init__(self, spec: DecoderConfig) -> None:
        super().__init__()
        self.approximate = "none" if spec.activation is ActivationKind.gelu_exact else "tanh"
        self.up = nn.Linear(spec.width, spec.feedforward, bias=spec.bias)
        self.down = nn.Linear(spec.feedforward, spec.width, bias=spec.bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return ``x_BTW``."""
        return cast(Tensor, self.down(F.gelu(self.up(x_BTW), approximate=self.approximate)))


class TiedHead(nn.Module):
    """Output head that uses the embedding's weight; a module so that hooks can be registered."""

    def forward(self, x_BTW: Tensor, weight_VW: Tensor) -> Tensor:
        """Return ``logits_BTV``."""
        return F.linear(x_BTW, weight_VW)


def build_head(spec: DecoderConfig) -> nn.Module:
    """Return the output head."""
    return TiedHead() if spec.tied else nn.Linear(spec.width, spec.output_size, spec.head_bias)
