"""The decoder alive.

Shape suffixes: B rows, T tokens of a row on this rank, S on all, W width, F feedforward,
V vocabulary, H query heads, K key (and value) heads, D features per head.
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
    """``tokens_BT -> logits_BTV``; parameters are those of ``spec.weight_census()``, in its order.

    Made on the meta device; lives after ``to_empty(device=...)`` and ``init_weights(seed)``,
    sharded in between or not. A ``stage`` holds some layers: unless it is first it reads
    ``x_BTW``, unless it is last it gives that.
    """

    rope: Tensor | None

    def __init__(self, spec: DecoderConfig, stage: StageSlice) -> None:
        super().__init__()
        self.spec, self.stage = spec, stage
        learned = spec.position is PositionKind.learned
        embeds = stage.is_first or (stage.is_last and spec.tied)
        with torch.device("meta"):  # so that torch's own initialization costs nothing
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
        self.places_T: Tensor | None = None
        self.prompt: PromptVectors | None = None
        self.prompt_tokens = self.prefix_tokens = 0

    def layers(self) -> list[nn.Module]:
        """Returns the blocks, in order."""
        return list(self.blocks.values())

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the head's own, and the embedding's if it reads that."""
        assert self.head is not None
        yield from self.head.parameters()
        if self.spec.tied:
            assert self.embedding is not None
            yield cast(nn.Parameter, self.embedding.weight)

    def replace_attention(self, make: Callable[[float], nn.Module]) -> None:
        """Puts another attention into every block."""
        for block in self.blocks.values():
            assert isinstance(block, TransformerBlock)
            block.attention.mix = make(self.spec.dropout)

    def add_prompt_tokens(self, tokens: int) -> None:
        """Puts vectors before the embedded tokens, if they are embedded here."""
        self.prompt_tokens = tokens
        if self.stage.is_first:
            with torch.device("meta"):
                self.prompt = PromptVectors(tokens, self.spec.width)

    def add_prefix_kv(self, tokens: int) -> None:
        """Puts learnt keys and values before those of each layer."""
        self.prefix_tokens = tokens
        with torch.device("meta"):
            self.replace_attention(lambda _: PrefixAttention(self.spec, tokens))

    def set_position_ids(self, places_T: Tensor) -> None:
        """Says which places of a row the tokens have."""
        self.places_T = places_T

    def forward(
        self, x: Tensor, labels_BT: Tensor | None = None, places_BS: Tensor | None = None
    ) -> Tensor:
        """Returns ``logits_BTV`` of ``tokens_BT``, or their loss; parts read or give ``x_BTW``."""
        places_T = self.places_T
        if places_T is None:
            places_T = torch.arange(self.prompt_tokens + x.shape[1], device=x.device)
        if places_BS is not None:
            places_T = places_BS[:, places_T]
        if self.prefix_tokens:
            places_T = places_T + self.prefix_tokens
        if self.stage.is_first:
            x = self.embed(x, places_T)
        if self.prefix_tokens and places_BS is None:
            places_BS = torch.arange(len(places_T), device=x.device)[None]
        rope_2TD, mask_B1SS = self.rotation(places_T), self.mask(x, places_BS)
        for block in self.blocks.values():
            x = block(x, rope_2TD, mask_B1SS)
        return self.unembed(x, labels_BT) if self.stage.is_last else x

    def mask(self, x_BTW: Tensor, places_BS: Tensor | None) -> Tensor | None:
        """Returns ``mask_B1SS``, with a column more for each key before the rows; None: causal."""
        if places_BS is None:
            return None
        mask_B1SS = build_block_mask(places_BS, _attention_dtype(x_BTW))
        return F.pad(mask_B1SS, (self.prefix_tokens, 0)) if self.prefix_tokens else mask_B1SS

    def embed(self, tokens_BT: Tensor, places_T: Tensor) -> Tensor:
        """Returns ``x_BTW``, what the first block reads; rows may have places of their own."""
        assert self.embedding is not None
        x_BTW = cast(Tensor, self.embedding(tokens_BT))
        if self.prompt is not None:
            x_BTW = self.prompt(x_BTW)
        if self.position is not None:
            x_BTW = x_BTW + self.position(places_T)
        return F.dropout(x_BTW, self.spec.dropout, self.training)

    def rotation(self, places_T: Tensor) -> Tensor | None:
        """Returns ``rope_2TD``, what ``rotate`` reads; None with learned positions."""
        return None if self.rope is None else self.rope[:, places_T]

    def unembed(self, x_BTW: Tensor, labels_BT: Tensor | None) -> Tensor:
        """Returns ``logits_BTV`` from what the last block wrote, or the loss of the labels."""
        assert self.norm is not None
        x_BTW = self.norm(x_BTW)
        if self.prompt_tokens:
            x_BTW = self.gather_tokens(x_BTW)[:, self.prompt_tokens :]
        if self.loss is None or labels_BT is None:
            return self.logits(x_BTW)
        return self.loss(self.logits, self.gather_tokens(x_BTW), labels_BT)

    def logits(self, x_BTW: Tensor) -> Tensor:
        """Returns ``logits_BTV`` from normalized features."""
        assert self.head is not None
        if self.spec.tied:
            assert self.embedding is not None
            return cast(Tensor, self.head(x_BTW, self.embedding.weight))
        return cast(Tensor, self.head(x_BTW))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws every parameter afresh, each from ``seed`` and its name, and fills the buffers.

        Matrices are normal(0, ``initial_std``), those that write to the residual stream
        ``1 / sqrt(2 layers)`` of it, so that its variance does not grow with depth (Radford et
        al. 2019, GPT-2, section 2.3); norms are one, biases zero.
        """
        self.init_buffers()
        residual = self.spec.initial_std / sqrt(2 * self.spec.layers)
        for name, parameter in self.own_parameters():
            if isinstance(parameter, nn.Parameter) and name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif isinstance(parameter, nn.Parameter) and "norm" in name:
                nn.init.ones_(parameter)
            else:
                writes = name.endswith(("attention.output.weight", "feedforward.down.weight"))
                init.init_normal(
                    name, parameter, seed, residual if writes else self.spec.initial_std
                )

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fills the table of rotations, which no checkpoint holds."""
        if self.rope is not None:
            self.rope.copy_(build_rope_table(self.spec))


class PromptVectors(nn.Module):
    """Vectors before the embedded tokens of every row: ``x_BTW -> x_BTW``, T then more by them."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width))

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Returns ``x_BTW``."""
        ahead_BTW = self.weight.to(x_BTW.dtype).expand(len(x_BTW), -1, -1)
        return torch.cat((ahead_BTW, x_BTW), dim=1)


class TransformerBlock(nn.Module):
    """One layer: ``x_BTW, rope_2TD, mask_B1SS -> x_BTW``."""

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
        """Returns the residual stream after this layer."""
        x_BTW = x_BTW + self._dropout(
            self.attention(self.attention_norm(x_BTW), rope_2TD, mask_B1SS)
        )
        return x_BTW + self._dropout(self.feedforward(self.feedforward_norm(x_BTW)))

    def _dropout(self, x_BTW: Tensor) -> Tensor:
        return F.dropout(x_BTW, self.dropout, self.training)


class SelfAttention(nn.Module):
    """Causal attention with grouped queries (Ainslie et al. 2023) and rotary positions.

    Heads are counted from the features that arrive, so that a tensor-parallel rank may hold some.
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
        """Returns ``x_BTW``, each token a mix of itself and those before it."""
        query_BTHD = self.query(x_BTW).unflatten(-1, (-1, self.head_size))
        key_BTKD = self.key(x_BTW).unflatten(-1, (-1, self.head_size))
        value_BTKD = self.value(x_BTW).unflatten(-1, (-1, self.head_size))
        if rope_2TD is not None:
            query_BTHD = apply_rope(query_BTHD, rope_2TD)
            key_BTKD = apply_rope(key_BTKD, rope_2TD)
        mixed_BTHD = self.mix(query_BTHD, key_BTKD, value_BTKD, mask_B1SS)
        return cast(Tensor, self.output(mixed_BTHD.flatten(-2)))


class CausalAttention(nn.Module):
    """``softmax(query key^T / sqrt(D)) value`` over a token and those before it; no weights.

    A module of its own so that context parallelism can put another in its place.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, mask_B1SS: Tensor | None
    ) -> Tensor:
        """Returns ``mixed_BTHD``; a mask says which of those before it."""
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
    """The same with learnt keys and values, which every token sees, before those of the row."""

    def __init__(self, spec: DecoderConfig, tokens: int) -> None:
        super().__init__(spec.dropout)
        self.prefix_keys = PrefixVectors(tokens, spec.kv_width)
        self.prefix_values = PrefixVectors(tokens, spec.kv_width)

    def forward(
        self, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, mask_B1SS: Tensor | None
    ) -> Tensor:
        """Returns ``mixed_BTHD``; the mask has a column for each of the learnt keys as well."""
        key_BSKD, value_BSKD = self.prefix_keys(key_BTKD), self.prefix_values(value_BTKD)
        return super().forward(query_BTHD, key_BSKD, value_BSKD, mask_B1SS)


class PrefixVectors(nn.Module):
    """What is learnt before the keys, or values, of every row: ``x_BTKD``, T then more by it."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width))

    def forward(self, own_BTKD: Tensor) -> Tensor:
        """Returns ``x_BTKD``."""
        learnt_PKD = self.weight.to(own_BTKD.dtype).view(-1, *own_BTKD.shape[2:])
        return torch.cat((learnt_PKD.expand(len(own_BTKD), -1, -1, -1), own_BTKD), dim=1)


class SwiGLUFeedForward(nn.Module):
    """``x_BTW -> down(SiLU(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, spec: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.width, spec.feedforward, bias=spec.bias)
        self.up = nn.Linear(spec.width, spec.feedforward, bias=spec.bias)
        self.down = nn.Linear(spec.feedforward, spec.width, bias=spec.bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Returns ``x_BTW``."""
        return cast(Tensor, self.down(F.silu(self.gate(x_BTW)) * self.up(x_BTW)))


class GELUFeedForward(nn.Module):
    """``x_BTW -> down(GELU(up(x)))``, GELU by its tanh approximation as in GPT-2."""

    def __init__(self, spec: DecoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(spec.width, spec.feedforward, bias=spec.bias)
        self.down = nn.Linear(spec.feedforward, spec.width, bias=spec.bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Returns ``x_BTW``."""
        return cast(Tensor, self.down(F.gelu(self.up(x_BTW), approximate="tanh")))


class TiedHead(nn.Module):
    """Logits by a matrix that belongs to the embedding; a module so that hooks can reach it."""

    def forward(self, x_BTW: Tensor, weight_VW: Tensor) -> Tensor:
        """Returns ``logits_BTV``."""
        return F.linear(x_BTW, weight_VW)


def build_head(spec: DecoderConfig) -> nn.Module:
    """Returns what gives logits."""
    return TiedHead() if spec.tied else nn.Linear(spec.width, spec.output_size, bias=False)


def build_norm(spec: DecoderConfig) -> nn.Module:
    """Returns the normalization of the last dim, with a weight per feature."""
    if spec.norm is NormKind.rmsnorm:
        return nn.RMSNorm(spec.width, eps=spec.norm_epsilon)
    return nn.LayerNorm(spec.width, eps=spec.norm_epsilon, bias=spec.bias)


def apply_rope(x_BTHD: Tensor, rope_2TD: Tensor) -> Tensor:
    """Returns the heads with feature pairs (i, i + D/2) rotated by their place, in ``x``'s dtype.

    ``(a, b) -> (a cos - b sin, b cos + a sin)``: rolling by D/2 swaps a and b, and the table's
    sines carry the signs. Su et al. 2021, RoFormer, with the pairs of Hugging Face's Llama.
    """
    cos_T1D, sin_T1D = rope_2TD.unsqueeze(-2).unbind(0)
    swapped_BTHD = x_BTHD.roll(x_BTHD.shape[-1] // 2, dims=-1)
    return (x_BTHD * cos_T1D + swapped_BTHD * sin_T1D).to(x_BTHD.dtype)


def build_block_mask(places_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``mask_B1SS``, which is added to scores: 0 for what a token sees, else -inf.

    It sees itself and those before it in its own text, which begins where a place is 0. A number
    and not a truth each: torch would make numbers of truths once more in every layer.
    """
    text_BS = (places_BS == 0).cumsum(1)
    seen_BSS = (text_BS[:, :, None] == text_BS[:, None, :]).tril()
    mask_BSS = torch.full_like(seen_BSS, -torch.inf, dtype=dtype).masked_fill_(seen_BSS, 0.0)
    return mask_BSS[:, None]


def _attention_dtype(x: Tensor) -> torch.dtype:
    """Returns the format of attention: autocast's, or that of what the blocks read."""
    kind = x.device.type
    mixed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if mixed else x.dtype


def build_rope_table(spec: DecoderConfig) -> Tensor:
    """Returns cosines and signed sines, ``(2, context, D)``, in float32 on the host.

    Pair i turns by ``theta^(-2i / D)`` radians per token. With ``rope_scaling`` wavelengths longer
    than ``original / low`` tokens grow by the factor, those shorter than ``original / high`` stay,
    and between them the two frequencies are blended linearly in ``original / wavelength``
    (Llama 3.1, Hugging Face's ``rope_type: llama3``).
    """
    with torch.device("cpu"):
        exponents = torch.arange(0, spec.head_size, 2, dtype=torch.float32) / spec.head_size
        places_T = torch.arange(spec.context, dtype=torch.float32)
    frequencies = 1.0 / spec.rope_theta**exponents
    if spec.rope_scaling:
        turns = spec.rope_original_context * frequencies / (2 * pi)
        low, high = spec.rope_low_frequency, spec.rope_high_frequency
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / spec.rope_factor)
    angles = torch.outer(places_T, frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
