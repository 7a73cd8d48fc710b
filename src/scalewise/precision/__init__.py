"""Numeric precision: data types of parameters and of computation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Literal

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option

if TYPE_CHECKING:
    from scalewise.models.base import ModelConfig

LightningPrecision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


class FloatFormat(StrEnum):
    """A floating-point format."""

    fp32 = "fp32"
    """IEEE single precision, 4 bytes."""
    bf16 = "bf16"
    """bfloat16, 2 bytes."""
    fp16 = "fp16"
    """IEEE half precision, 2 bytes."""

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return 4 if self is FloatFormat.fp32 else 2


_LIGHTNING: dict[tuple[FloatFormat, FloatFormat], LightningPrecision] = {
    (FloatFormat.fp32, FloatFormat.fp32): "32-true",
    (FloatFormat.fp32, FloatFormat.bf16): "bf16-mixed",
    (FloatFormat.bf16, FloatFormat.bf16): "bf16-true",
    (FloatFormat.fp32, FloatFormat.fp16): "16-mixed",
}


@register_option("precision", "precision")
@dataclass(frozen=True)
class Precision:
    """Data types by role. Gradients and optimizer state have the type of the parameters."""

    parameters: FloatFormat = FloatFormat.fp32
    """Data type of parameters, gradients and optimizer state."""
    compute: FloatFormat = FloatFormat.fp32
    """Data type of matmuls and of activations stored for the backward pass."""
    tf32: bool = False
    """Whether fp32 matmuls may run as TF32 on CUDA (10 mantissa bits)."""

    implementation: ClassVar[str] = ""
    """Module that registers ``precision.build.apply_precision``."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue if Lightning has no precision plugin for the combination."""
        if (self.parameters, self.compute) not in _LIGHTNING:
            supported = ", ".join(f"{parameters}/{compute}" for parameters, compute in _LIGHTNING)
            yield ConfigIssue(
                "precision.parameters",
                self.parameters.value,
                f"is not supported with precision.compute={self.compute}",
                f"supported pairs (parameters/compute) are {supported}",
            )

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each missing package."""
        yield from ()

    def fp8_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the linear layers with fp8 matmuls: none."""
        return ()

    @property
    def peak_kind(self) -> str:
        """Key of a hardware profile's peak FLOP/s for matmuls."""
        return "tf32" if self.compute is FloatFormat.fp32 and self.tf32 else self.compute.value

    def lightning_precision(self) -> LightningPrecision:
        """``precision`` argument of Lightning's Trainer."""
        return _LIGHTNING[self.parameters, self.compute]

    @property
    def matmul_precision(self) -> str:
        """Argument of ``torch.set_float32_matmul_precision``, for fp32 matmuls on CUDA."""
        return "high" if self.tf32 else "highest"
