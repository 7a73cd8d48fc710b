"""Fields of a decoder with multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

LATENT_NORM_EPSILON = 1e-6
"""Constant in the RMSNorms of latents, whatever ``norm_epsilon`` (DeepSeek-V2 and -V3)."""


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-AI, 2024, DeepSeek-V2, section 2.1).

    Keys and values are projections of one small vector per token, the latent. Rotary positions
    have features of their own: those of the key are projected from the residual stream, and all
    heads share them. A head of queries and keys has ``head_width`` features, the last
    ``rope_head_dim`` of them with rotary positions.
    """

    kv_latent_dim: int | None = None
    """Width of the latent of keys and values, in features (DeepSeek-V2: 512); null: keys and values
    are projections of the residual stream, without latent attention."""
    query_latent_dim: int | None = None
    """Width of the latent of queries, in features (DeepSeek-V2: 1536); null: queries are
    projections of the residual stream."""
    rope_head_dim: int | None = None
    """Width of the part of a head with rotary positions, in features, with ``kv_latent_dim``
    (DeepSeek-V2: 64); null: without latent attention."""
    value_head_dim: int | None = None
    """Width of a head of values, in features, with ``kv_latent_dim``; null: that of a key without
    rotary positions, ``head_width - rope_head_dim``."""

    @property
    def has_latent_attention(self) -> bool:
        """Whether keys and values are projections of a latent."""
        return self.kv_latent_dim is not None
