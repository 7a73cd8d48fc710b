"""Matrices in few bits: frozen ones that lie packed, and trained ones that are rounded."""

from scalewise.quantization.config import NoQuantizationConfig, QuantizationConfig

__all__ = ["NoQuantizationConfig", "QuantizationConfig"]
