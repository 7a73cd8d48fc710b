"""Torch module of the decoder.

Shape suffixes: B batch, T tokens of a sequence on this rank, S tokens of the full sequence, W
width, F feedforward, V vocabulary, H query heads, K key (and value) heads, D features per head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import pi, sqrt
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.models import init
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.decoder.config import ActivationKind, DecoderConfig, NormKind, PositionKind


class DecoderModule(ModelModule):
    """Decoder-only transformer: ``tokens_BT -> logits_BTV``.

    Parameters have the names and the order of ``spec.weight_census()``. The module is built on the
    meta device; ``to_empty(device=...)``, optionally after sharding, and ``init_weights(seed)``
    materialize it. A pipeline ``stage`` has some of the layers: unless it is the first it reads
    ``x_BTW``, and unless it is the last it returns ``x_BTW``.
    """

    rope: Tensor | None

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
                {str(layer): TransformerBlock(spec) for layer in stage.layers}
            )
            self.norm = build_norm(spec) if stage.is_last else None
            self.head = build_head(spec) if stage.is_last else None
            shape = (2, spec.context, spec.head_size)
            table = None if learned else torch.empty(shape, dtype=torch.float32)
            self.register_buffer("rope", table, persistent=False)
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
        if positions_BS is not None:
            positions_T = positions_BS[:, positions_T]
        if self.prefix_tokens:
            positions_T = positions_T + self.prefix_tokens
        if self.stage.is_first:
            x = self.embed(x, positions_T)
        if self.prefix_tokens and positions_BS is None:
            positions_BS = torch.arange(len(positions_T), device=x.device)[None]
        rope_2TD, mask_B1SS = self.rotation(positions_T), self.mask(x, positions_BS)
        for block in self.blocks.values():
            x = block(x, rope_2TD, mask_B1SS)
        return self.unembed(x, labels_BT) if self.stage.is_last else x

    def mask(self, x_BTW: Tensor, positions_BS: Tensor | None) -> Tensor | None:
        """Return ``mask_B1SS`` of packed sequences, with a column per prefix key; None: causal."""
        if positions_BS is None:
            return None
        mask_B1SS = build_block_mask(positions_BS, _attention_dtype(x_BTW))
        return F.pad(mask_B1SS, (self.prefix_tokens, 0)) if self.prefix_tokens else mask_B1SS

    def embed(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        """Return the input ``x_BTW`` of the first block."""
        assert self.embedding is not None
        x_BTW = cast(Tensor, self.embedding(tokens_BT))
        if self.prompt is not None:
            x_BTW = self.prompt(x_BTW)
        if self.position is not None:
            x_BTW = x_BTW + self.position(positions_T)
        return F.dropout(x_BTW, self.spec.dropout, self.training)

    def rotation(self, positions_T: Tensor) -> Tensor | None:
        """Return the input ``rope_2TD`` of ``apply_rope``; None with learned positions."""
        return None if self.rope is None else self.rope[:, positions_T]

    def unembed(self, x_BTW: Tensor, labels_BT: Tensor | None) -> Tensor:
        """Return ``logits_BTV`` of the last block's output, or the loss of the labels."""
        assert self.norm is not None
        x_BTW = self.norm(x_BTW)
        if self.prompt_tokens:
            x_BTW = self.gather_tokens(x_BTW)[:, self.prompt_tokens :]
        if self.loss is None or labels_BT is None:
            return self.logits(x_BTW)
        return self.loss(self.logits, self.gather_tokens(x_BTW), labels_BT)

    def logits(self, x_BTW: Tensor) -> Tensor:
        """Return ``logits_BTV`` of normalized features."""
        assert self.head is not None
        if self.spec.tied:
            assert self.embedding is not None
            return cast(Tensor, self.head(x_BTW, self.embedding.weight))
        return cast(Tensor, self.head(x_BTW))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize every parameter from ``seed`` and its name, and fill the buffers.

        Matrices are drawn from N(0, ``initial_std``^2). Those that write to the residual stream are
        scaled by ``1 / sqrt(2 layers)``, so that its variance does not grow with depth (Radford et
        al. 2019, GPT-2, section 2.3). Norms are one, biases zero.
        """
        self.init_buffers()
        residual_std = self.spec.initial_std / sqrt(2 * self.spec.layers)
        for name, parameter in self.base_parameters():
            if isinstance(parameter, nn.Parameter) and name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif isinstance(parameter, nn.Parameter) and "norm" in name:
                nn.init.ones_(parameter)
            else:
                writes_residual = name.endswith(
                    ("attention.output.weight", "feedforward.down.weight")
                )
                std = residual_std if writes_residual else self.spec.initial_std
                init.init_normal(name, parameter, seed, std)

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fill the rotary table, which is not part of a checkpoint."""
        if self.rope is not None:
            self.rope.copy_(build_rope_table(self.spec))


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
    """Transformer block: ``x_BTW, rope_2TD, mask_B1SS -> x_BTW``."""

    def __init__(self, spec: DecoderConfig) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.attention_norm = build_norm(spec)
        self.attention = SelfAttention(spec)
        self.feedforward_norm = build_norm(spec)
        self.feedforward = (
            SwiGLUFeedForward(spec)
            if spec.activation is ActivationKind.swiglu
            else GELUFeedForward(spec)
        )

    def forward(
        self, x_BTW: Tensor, rope_2TD: Tensor | None, mask_B1SS: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream after this layer."""
        x_BTW = x_BTW + self._dropout(
            self.attention(self.attention_norm(x_BTW), rope_2TD, mask_B1SS)
        )
        return x_BTW + self._dropout(self.feedforward(self.feedforward_norm(x_BTW)))

    def _dropout(self, x_BTW: Tensor) -> Tensor:
        return F.dropout(x_BTW, self.dropout, self.training)


class SelfAttention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions.

    The number of heads is inferred from the projections, so that a tensor-parallel rank may have a
    subset of them.
    """

    def __init__(self, spec: DecoderConfig) -> None:
        super().__init__()
        self.head_size = spec.head_size
        self.query = nn.Linear(spec.width, spec.query_width, bias=spec.bias)
        self.key = nn.Linear(spec.width, spec.kv_width, bias=spec.bias)
        self.value = nn.Linear(spec.width, spec.kv_width, bias=spec.bias)
        self.output = nn.Linear(spec.query_width, spec.width, bias=spec.bias)
        self.mix: nn.Module = CausalAttention(spec.dropout)

    def forward(self, x_BTW: Tensor, rope_2TD: Tensor | None, mask_B1SS: Tensor | None) -> Tensor:
        """Return the attention output ``x_BTW``."""
        query_BTHD = self.query(x_BTW).unflatten(-1, (-1, self.head_size))
        key_BTKD = self.key(x_BTW).unflatten(-1, (-1, self.head_size))
        value_BTKD = self.value(x_BTW).unflatten(-1, (-1, self.head_size))
        if rope_2TD is not None:
            query_BTHD = apply_rope(query_BTHD, rope_2TD)
            key_BTKD = apply_rope(key_BTKD, rope_2TD)
        mixed_BTHD = self.mix(query_BTHD, key_BTKD, value_BTKD, mask_B1SS)
        return cast(Tensor, self.output(mixed_BTHD.flatten(-2)))


class CausalAttention(nn.Module):
    """``softmax(query key^T / sqrt(D)) value`` over a token and those before it.

    A module without parameters, so that context parallelism and prefix tuning can replace it.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, mask_B1SS: Tensor | None
    ) -> Tensor:
        """Return ``mixed_BTHD``; the mask is added to the scores."""
        mixed_BHTD = F.scaled_dot_product_attention(
            query_BTHD.transpose(1, 2),
            key_BTKD.transpose(1, 2),
            value_BTKD.transpose(1, 2),
            attn_mask=mask_B1SS,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask_B1SS is None,
            enable_gqa=query_BTHD.shape[2] != key_BTKD.shape[2],
        )
        return mixed_BHTD.transpose(1, 2)


class PrefixAttention(CausalAttention):
    """Causal attention with trained keys and values before those of the sequence (prefix tuning).

    Every token attends to them.
    """

    def __init__(self, spec: DecoderConfig, tokens: int) -> None:
        super().__init__(spec.dropout)
        self.prefix_keys = PrefixVectors(tokens, spec.kv_width)
        self.prefix_values = PrefixVectors(tokens, spec.kv_width)

    def forward(
        self, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, mask_B1SS: Tensor | None
    ) -> Tensor:
        """Return ``mixed_BTHD``; the mask has a column for each trained key."""
        key_BSKD, value_BSKD = self.prefix_keys(key_BTKD), self.prefix_values(value_BTKD)
        return super().forward(query_BTHD, key_BSKD, value_BSKD, mask_B1SS)


class PrefixVectors(nn.Module):
    """Trained keys, or values, before those of the sequence: ``x_BTKD`` with a longer T."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width))

    def forward(self, x_BTKD: Tensor) -> Tensor:
        """Return ``x_BTKD`` with the vectors prepended."""
        prefix_PKD = self.weight.to(x_BTKD.dtype).view(-1, *x_BTKD.shape[2:])
        return torch.cat((prefix_PKD.expand(len(x_BTKD), -1, -1, -1), x_BTKD), dim=1)


class SwiGLUFeedForward(nn.Module):
    """SwiGLU feedforward: ``x_BTW -> down(SiLU(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, spec: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.width, spec.feedforward, bias=spec.bias)
        self.up = nn.Linear(spec.width, spec.feedforward, bias=spec.bias)
        self.down = nn.Linear(spec.feedforward, spec.width, bias=spec.bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return ``x_BTW``."""
        return cast(Tensor, self.down(F.silu(self.gate(x_BTW)) * self.up(x_BTW)))


class GELUFeedForward(nn.Module):
    """GELU feedforward: ``x_BTW -> down(GELU(up(x)))``, with the tanh approximation of GPT-2."""

    def __init__(self, spec: DecoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(spec.width, spec.feedforward, bias=spec.bias)
        self.down = nn.Linear(spec.feedforward, spec.width, bias=spec.bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return ``x_BTW``."""
        return cast(Tensor, self.down(F.gelu(self.up(x_BTW), approximate="tanh")))


class TiedHead(nn.Module):
    """Output head that uses the embedding's weight; a module so that hooks can be registered."""

    def forward(self, x_BTW: Tensor, weight_VW: Tensor) -> Tensor:
        """Return ``logits_BTV``."""
        return F.linear(x_BTW, weight_VW)


def build_head(spec: DecoderConfig) -> nn.Module:
    """Return the output head."""
    return TiedHead() if spec.tied else nn.Linear(spec.width, spec.output_size, bias=False)


def build_norm(spec: DecoderConfig) -> nn.Module:
    """Return the normalization layer over the last dim, with a weight per feature."""
    if spec.norm is NormKind.rmsnorm:
        return nn.RMSNorm(spec.width, eps=spec.norm_epsilon)
    return nn.LayerNorm(spec.width, eps=spec.norm_epsilon, bias=spec.bias)


def apply_rope(x_BTHD: Tensor, rope_2TD: Tensor) -> Tensor:
    """Rotate the feature pairs (i, i + D/2) of each head by the angle of their position.

    ``(a, b) -> (a cos - b sin, b cos + a sin)``: rolling by D/2 swaps a and b, and the sines in the
    table have the signs. The result has the dtype of ``x_BTHD``. Source: Su et al. 2021, RoFormer,
    with the feature pairs of Hugging Face's Llama.
    """
    cos_T1D, sin_T1D = rope_2TD.unsqueeze(-2).unbind(0)
    swapped_BTHD = x_BTHD.roll(x_BTHD.shape[-1] // 2, dims=-1)
    return (x_BTHD * cos_T1D + swapped_BTHD * sin_T1D).to(x_BTHD.dtype)


def build_block_mask(positions_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``mask_B1SS`` of packed sequences, which is added to the scores: 0 or -inf.

    A token attends to itself and to earlier tokens of its own text; a text starts at position 0.
    The mask is not boolean, since torch would convert a boolean mask again in every layer.
    """
    text_BS = (positions_BS == 0).cumsum(1)
    visible_BSS = (text_BS[:, :, None] == text_BS[:, None, :]).tril()
    mask_BSS = torch.full_like(visible_BSS, -torch.inf, dtype=dtype).masked_fill_(visible_BSS, 0.0)
    return mask_BSS[:, None]


def _attention_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of attention: autocast's if enabled, else that of the block input."""
    device_type = x.device.type
    uses_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
        device_type
    )
    return torch.get_autocast_dtype(device_type) if uses_autocast else x.dtype


def build_rope_table(spec: DecoderConfig) -> Tensor:
    """Return cosines and signed sines as a float32 CPU tensor ``(2, context, D)``.

    Pair i turns by ``theta^(-2i / D)`` radians per token. With ``rope_scaling``, wavelengths longer
    than ``original / low`` tokens are multiplied by the factor, and those shorter than ``original /
    high`` stay unchanged. Between them the two frequencies are interpolated linearly in ``original
    / wavelength`` (Llama 3.1, Hugging Face's ``rope_type: llama3``).
    """
    with torch.device("cpu"):
        exponents = torch.arange(0, spec.head_size, 2, dtype=torch.float32) / spec.head_size
        positions_T = torch.arange(spec.context, dtype=torch.float32)
    frequencies = 1.0 / spec.rope_theta**exponents
    if spec.rope_scaling:
        turns = spec.rope_original_context * frequencies / (2 * pi)
        low, high = spec.rope_low_frequency, spec.rope_high_frequency
        unscaled = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = frequencies * (unscaled + (1 - unscaled) / spec.rope_factor)
    angles = torch.outer(positions_T, frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
