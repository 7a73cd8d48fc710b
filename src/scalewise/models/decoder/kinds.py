"""Architecture options of the decoder that have several values."""

from __future__ import annotations

from enum import StrEnum


class NormKind(StrEnum):
    """Normalization layer."""

    rmsnorm = "rmsnorm"
    """RMSNorm (Zhang and Sennrich, 2019)."""
    layernorm = "layernorm"
    """LayerNorm (Ba et al., 2016)."""


class PositionKind(StrEnum):
    """Position encoding."""

    rope = "rope"
    """Rotary embedding of queries and keys (Su et al., 2021)."""
    learned = "learned"
    """Trained table that is added to the token embedding."""


class ActivationKind(StrEnum):
    """Activation of the feedforward."""

    swiglu = "swiglu"
    """``SiLU(gate) * up`` (Shazeer, 2020)."""
    gelu = "gelu"
    """GELU with the tanh approximation."""


class QKNorm(StrEnum):
    """RMSNorm of queries and keys, before their rotary positions."""

    none = "none"
    """No normalization."""
    head = "head"
    """Over the features of each head, with one weight for all heads (Qwen3, Gemma 3)."""
