"""Quantization: packed frozen weights (QLoRA) and quantization-aware training."""

from scalewise.quantization.config import NoQuantizationConfig, QuantizationConfig

__all__ = ["NoQuantizationConfig", "QuantizationConfig"]
