"""Attention of the decoder: its module, prefix keys and rotary positions.

Shape suffixes are those of ``model.py``; P prefix vectors.
"""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt
from typing import cast

import torch
from torch import Tensor, nn

from scalewise.models.attention_backends import attend
from scalewise.models.attention_segments import AttentionSegments
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import QKNorm, RopeScaling
from scalewise.models.decoder.norms import RMSNorm


class SelfAttention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions.

    The number of heads is inferred from the projections, so that a tensor-parallel rank may have a
    subset of them.
    """

    def __init__(self, spec: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.head_size, self.window = spec.head_size, spec.layer_window(layer)
        self.softcap, self.rotary_size = spec.attention_softcap, spec.rotary_size
        self.query_factor = spec.attention_scale * sqrt(spec.head_size)
        qkv_bias = spec.bias or spec.qkv_bias
        self.query = nn.Linear(spec.width, spec.query_width, bias=qkv_bias)
        self.key = nn.Linear(spec.width, spec.kv_width, bias=qkv_bias)
        self.value = nn.Linear(spec.width, spec.kv_width, bias=qkv_bias)
        self.output = nn.Linear(spec.query_width, spec.width, bias=spec.bias)
        self.qk_norm, self.query_norm, self.key_norm = spec.qk_norm, None, None
        if spec.qk_norm is not QKNorm.none:
            self.query_norm, self.key_norm = (RMSNorm(size, spec) for size in spec.qk_norm_sizes)
        # ``mix`` is in the parameter names of prefix tuning, and so in checkpoints.
        self.mix: nn.Module = CausalAttention(spec.dropout)

    def forward(
        self, x_BTW: Tensor, rope_2TD: Tensor | None, segments: AttentionSegments | None
    ) -> Tensor:
        """Return the attention output ``x_BTW``."""
        query_BTHD = self._split_heads(self.query(x_BTW), self.query_norm)
        key_BTKD = self._split_heads(self.key(x_BTW), self.key_norm)
        value_BTKD = self._split_heads(self.value(x_BTW), None)
        if self.query_factor != 1.0:
            query_BTHD = query_BTHD * self.query_factor
        if rope_2TD is not None:
            query_BTHD = apply_rope(query_BTHD, rope_2TD, self.rotary_size)
            key_BTKD = apply_rope(key_BTKD, rope_2TD, self.rotary_size)
        attention_BTHD = self.mix(
            query_BTHD, key_BTKD, value_BTKD, segments, self.window, self.softcap
        )
        return cast(Tensor, self.output(attention_BTHD.flatten(-2)))

    def _split_heads(self, features_BTA: Tensor, norm: RMSNorm | None) -> Tensor:
        """Return ``x_BTHD``, normalized over the features of all heads, of each head, or not."""
        if norm is not None and self.qk_norm is QKNorm.projection:
            features_BTA, norm = norm(features_BTA), None
        x_BTHD = features_BTA.unflatten(-1, (-1, self.head_size))
        return x_BTHD if norm is None else cast(Tensor, norm(x_BTHD))


class CausalAttention(nn.Module):
    """``softmax(query key^T / sqrt(D)) value`` over a token and those before it.

    A module without parameters, so that context parallelism and prefix tuning can replace it.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self,
        query_BTHD: Tensor,
        key_BTKD: Tensor,
        value_BTKD: Tensor,
        segments: AttentionSegments | None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return ``attention_BTHD``; without segments each sequence is one."""
        dropout = self.dropout if self.training else 0.0
        return attend(query_BTHD, key_BTKD, value_BTKD, segments, dropout, window, softcap)


class PrefixAttention(CausalAttention):
    """Causal attention with trained keys and values before those of the sequence (prefix tuning).

    Every token attends to them.
    """

    def __init__(self, spec: DecoderConfig, tokens: int) -> None:
        super().__init__(spec.dropout)
        self.prefix_keys = PrefixVectors(tokens, spec.kv_width)
        self.prefix_values = PrefixVectors(tokens, spec.kv_width)

    def forward(
        self,
        query_BTHD: Tensor,
        key_BTKD: Tensor,
        value_BTKD: Tensor,
        segments: AttentionSegments | None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return ``attention_BTHD``; the segments include the trained keys."""
        key_BSKD, value_BSKD = self.prefix_keys(key_BTKD), self.prefix_values(value_BTKD)
        return super().forward(query_BTHD, key_BSKD, value_BSKD, segments, window, softcap)


class PrefixVectors(nn.Module):
    """Trained keys, or values, before those of the sequence: ``x_BTKD`` with a longer T."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width))

    def forward(self, x_BTKD: Tensor) -> Tensor:
        """Return ``x_BTKD`` with the vectors prepended."""
        prefix_PKD = self.weight.to(x_BTKD.dtype).view(-1, *x_BTKD.shape[2:])
        return torch.cat((prefix_PKD.expand(len(x_BTKD), -1, -1, -1), x_BTKD), dim=1)


def apply_rope(x_BTHD: Tensor, rope_2TD: Tensor, rotary_size: int) -> Tensor:
    """Rotate the feature pairs (i, i + R/2) of each head by the angle of their position.

    R is ``rotary_size``; the table leaves the other features unchanged.

    ``(a, b) -> (a cos - b sin, b cos + a sin)``, with the signs in the table. The result has the
    dtype of ``x_BTHD``. Source: Su et al. 2021, RoFormer, with the feature pairs of Hugging Face's
    Llama.
    """
    cos_T1D, sin_T1D = rope_2TD.unsqueeze(-2).unbind(0)
    rest: list[Tensor] = []
    if others := x_BTHD.shape[-1] - rotary_size:
        first, second, *rest = x_BTHD.split((rotary_size // 2, rotary_size // 2, others), -1)
    else:  # Tensor.split is a function in Python, and slower
        first, second = x_BTHD.chunk(2, -1)
    swapped_BTHD = torch.cat((second, first, *rest), -1)  # TorchInductor does not vectorize a roll
    return (x_BTHD * cos_T1D + swapped_BTHD * sin_T1D).to(x_BTHD.dtype)


def build_rope_table(spec: DecoderConfig, theta: float, *, scales: bool) -> Tensor:
    """Return cosines and signed sines as a float32 CPU tensor ``(2, context, D)``.

    Pair i turns by ``theta^(-2i / R)`` radians per token, R = ``rotary_size``; features from R on
    do not turn. If ``scales``, wavelengths longer than
    ``original / low`` tokens are multiplied by the factor, and those shorter than ``original /
    high`` stay unchanged. Between them the two frequencies are interpolated linearly in ``original
    / wavelength`` (Llama 3.1, Hugging Face's ``rope_type: llama3``), or linearly in i (YaRN), which
    also multiplies cosines and sines.
    """
    with torch.device("cpu"):
        exponents = torch.arange(0, spec.rotary_size, 2, dtype=torch.float32) / spec.rotary_size
        positions_T = torch.arange(spec.context, dtype=torch.float32)
    frequencies = 1.0 / theta**exponents
    factor = 1.0
    if scales:
        low, high = spec.rope_low_frequency, spec.rope_high_frequency
        if spec.rope_method is RopeScaling.llama3:
            turns = spec.rope_original_context * frequencies / (2 * pi)
            unscaled = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        elif spec.rope_method is RopeScaling.yarn:
            factor = spec.rope_attention_factor or 0.1 * log(spec.rope_factor) + 1
            first, last = (_pair_of_turns(spec, theta, turns) for turns in (high, low))
            first, last = max(floor(first), 0), min(ceil(last), spec.rotary_size - 1)
            pairs = torch.arange(len(frequencies), dtype=torch.float32, device="cpu")
            unscaled = 1 - ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)
        else:
            unscaled = torch.zeros_like(frequencies)
        frequencies = frequencies * (unscaled + (1 - unscaled) / spec.rope_factor)
    angles = torch.outer(positions_T, frequencies)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    rest = torch.ones(spec.context, spec.rope_table_size - spec.rotary_size, device="cpu")
    return torch.stack((torch.cat((cos, cos, rest), -1), torch.cat((-sin, sin, 0 * rest), -1)))


def _pair_of_turns(spec: DecoderConfig, theta: float, turns: float) -> float:
    """Return the feature pair that turns so often within the original context."""
    return spec.rotary_size * log(spec.rope_original_context / (turns * 2 * pi)) / (2 * log(theta))
