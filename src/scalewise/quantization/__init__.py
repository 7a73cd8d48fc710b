"""Frozen matrices in few bits."""

from scalewise.quantization.spec import NoQuantization, Quantization

__all__ = ["NoQuantization", "Quantization"]
