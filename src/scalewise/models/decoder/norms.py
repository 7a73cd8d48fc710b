"""Normalization layers of the decoder, in the dtype of their input."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.models.autocast import without_autocast
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import NormKind


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input, computed in fp32: ``x_BTW -> x_BTW``.

    Autocast would return fp32 on CUDA, and save an fp32 copy of the input for the backward pass.
    """

    def __init__(self, size: int, spec: DecoderConfig, epsilon: float | None = None) -> None:
        super().__init__(size, eps=spec.norm_epsilon if epsilon is None else epsilon)
        self.is_zero_centered = spec.norm is NormKind.zero_centered_rmsnorm

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return normalized features."""
        assert self.weight is not None
        weight_W = self.weight + 1.0 if self.is_zero_centered else self.weight
        weight_W = weight_W.to(x_BTW.dtype)
        with without_autocast(x_BTW):
            return F.rms_norm(x_BTW, self.normalized_shape, weight_W, self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the dtype of its input, computed in fp32: ``x_BTW -> x_BTW``."""

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return normalized features."""
        weight_W = self.weight.to(x_BTW.dtype)
        bias_W = None if self.bias is None else self.bias.to(x_BTW.dtype)
        with without_autocast(x_BTW):
            return F.layer_norm(x_BTW, self.normalized_shape, weight_W, bias_W, self.eps)


def build_norm(spec: DecoderConfig) -> nn.Module:
    """Return the normalization layer over the last dim, with a weight per feature."""
    if spec.norm is NormKind.layernorm:
        return LayerNorm(spec.width, eps=spec.norm_epsilon, bias=spec.bias)
    return RMSNorm(spec.width, spec)
