"""Multi-head latent attention of the decoder.

Shape suffixes are those of ``model.py``; C features of a latent, R those of a head with rotary
positions, N those without, P those of a value.
"""

from __future__ import annotations

from math import sqrt
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.models.attention_segments import AttentionSegments
from scalewise.models.decoder.attention import CausalAttention, apply_rope
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.latent_attention_config import LATENT_NORM_EPSILON
from scalewise.models.decoder.norms import RMSNorm


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are projections of a latent (DeepSeek-V2).

    ``c = norm(kv_latent(x))``; head h has the query ``[query_h(x), rope(query_rope_h(x))]``, the
    key ``[key_h(c), rope(key_rope(x))]`` and the value ``value_h(c)``. With ``query_latent_dim``,
    ``norm(query_latent(x))`` replaces the ``x`` of the queries. Values are padded to the width of
    the keys, which flash attention requires.

    Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1 and appendix C.
    """

    def __init__(self, spec: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.rotary_size, self.value_size = (
            spec.heads,
            spec.rotary_size,
            spec.value_size,
        )
        self.padding = spec.head_size - spec.value_size
        self.window, self.softcap = spec.layer_window(layer), spec.attention_softcap
        self.query_factor = spec.attention_scale * sqrt(spec.head_size)
        linears = {
            name.removeprefix("attention."): nn.Linear(into, out, bias=False)
            for name, out, into in spec.attention_linears
        }
        norms = {
            name.removeprefix("attention."): RMSNorm(size, spec, LATENT_NORM_EPSILON)
            for name, size in spec.attention_norms
        }
        self.query_latent = linears.get("query_latent")
        self.query, self.query_rope = linears["query"], linears["query_rope"]
        self.kv_latent, self.key_rope = linears["kv_latent"], linears["key_rope"]
        self.key, self.value, self.output = linears["key"], linears["value"], linears["output"]
        self.query_latent_norm = norms.get("query_latent_norm")
        self.kv_latent_norm = norms["kv_latent_norm"]
        self.mix: nn.Module = CausalAttention(spec.dropout)

    def forward(
        self, x_BTW: Tensor, rope_2TR: Tensor | None, segments: AttentionSegments | None
    ) -> Tensor:
        """Return the attention output ``x_BTW``."""
        # No local variables: queries, keys and values would live until ``output`` returns.
        return cast(
            Tensor,
            self.output(
                self._merge(
                    self.mix(
                        self._queries(x_BTW, rope_2TR),
                        *self._keys_values(x_BTW, rope_2TR),
                        segments,
                        self.window,
                        self.softcap,
                    )
                )
            ),
        )

    def _merge(self, attention_BTHD: Tensor) -> Tensor:
        """Return the features of all heads without padding."""
        if self.padding:
            attention_BTHD = attention_BTHD[..., : self.value_size]
        return attention_BTHD.flatten(-2)

    def _queries(self, x_BTW: Tensor, rope_2TR: Tensor | None) -> Tensor:
        """Return ``query_BTHD``."""
        if self.query_latent is not None and self.query_latent_norm is not None:
            x_BTW = self.query_latent_norm(self.query_latent(x_BTW))
        query_BTHD = self._concatenate(self.query, x_BTW, self.query_rope(x_BTW), rope_2TR)
        return query_BTHD if self.query_factor == 1.0 else query_BTHD * self.query_factor

    def _keys_values(self, x_BTW: Tensor, rope_2TR: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``key_BTHD`` and ``value_BTHD``, whose last features are padding."""
        latent_BTC = self.kv_latent_norm(self.kv_latent(x_BTW))
        key_BTHD = self._concatenate(self.key, latent_BTC, self.key_rope(x_BTW), rope_2TR)
        value_BTHP = self._split(self.value(latent_BTC))
        return key_BTHD, F.pad(value_BTHP, (0, self.padding)) if self.padding else value_BTHP

    def _concatenate(
        self, linear: nn.Linear, x_BTC: Tensor, rotary_BTA: Tensor, rope_2TR: Tensor | None
    ) -> Tensor:
        """Return ``x_BTHD``: features of ``linear``, and rotary ones of each or of all heads."""
        x_BTHR = rotary_BTA.unflatten(-1, (-1, self.rotary_size))
        if rope_2TR is not None:
            x_BTHR = apply_rope(x_BTHR, rope_2TR, self.rotary_size)
        x_BTHR = x_BTHR.expand(-1, -1, self.heads, -1)
        return torch.cat((self._split(linear(x_BTC)), x_BTHR), -1)

    def _split(self, features_BTA: Tensor) -> Tensor:
        """Return the features of each head."""
        return cast(Tensor, features_BTA.unflatten(-1, (self.heads, -1)))
