"""Matrices in few bits: frozen ones that lie packed, and trained ones that are rounded."""

from scalewise.quantization.spec import NoQuantization, Quantization

__all__ = ["NoQuantization", "Quantization"]
