"""Architecture options of the decoder that have several values."""

from __future__ import annotations

from enum import StrEnum


class NormKind(StrEnum):
    """Normalization layer."""

    rmsnorm = "rmsnorm"
    """RMSNorm (Zhang and Sennrich, 2019)."""
    zero_centered_rmsnorm = "zero_centered_rmsnorm"
    """RMSNorm whose factor is one plus the weight, which starts at zero (Gemma)."""
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
    geglu = "geglu"
    """``GELU(gate) * up`` with the tanh approximation (Gemma)."""
    gelu = "gelu"
    """GELU with the tanh approximation."""
    gelu_exact = "gelu_exact"
    """GELU by the error function (GPT-NeoX)."""


class QKNorm(StrEnum):
    """RMSNorm of queries and keys, before their rotary positions."""

    none = "none"
    """No normalization."""
    head = "head"
    """Over the features of each head, with one weight for all heads (Qwen3, Gemma 3)."""
    projection = "projection"
    """Over the features of all heads (OLMo 2)."""


class NormPlacement(StrEnum):
    """Position of the norms in a block."""

    pre = "pre"
    """Before each sublayer: ``x + sublayer(norm(x))``."""
    post = "post"
    """After each sublayer: ``x + norm(sublayer(x))`` (OLMo 2)."""
    sandwich = "sandwich"
    """Before and after each sublayer: ``x + norm(sublayer(norm(x)))`` (Gemma 2 and 3)."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides of a sublayer that have a norm: ``before``, ``after`` or both."""
        return {"pre": ("before",), "post": ("after",)}.get(self.value, ("before", "after"))


class Residual(StrEnum):
    """Input of the sublayers of a block."""

    sequential = "sequential"
    """The feedforward reads the residual stream after attention."""
    parallel = "parallel"
    """Attention and feedforward read the same residual stream, each through its own norm
    (GPT-NeoX)."""
    parallel_one_norm = "parallel_one_norm"
    """Attention and feedforward read the same normalized residual stream (Phi)."""


class RopeScaling(StrEnum):
    """Method that stretches the rotary wavelengths for longer contexts."""

    llama3 = "llama3"
    """Long wavelengths by the factor, short ones not at all (Llama 3.1)."""
    linear = "linear"
    """All wavelengths by the factor (Chen et al., 2023)."""
    yarn = "yarn"
    """As ``llama3`` with a ramp over the feature pairs, and larger attention scores (Peng et al.,
    2023)."""
