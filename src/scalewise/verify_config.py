"""Config group ``verify``: length and size of the runs that ``scalewise verify`` compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option
from scalewise.typed_override import format_override

MIN_WIDTH = 16
"""Smallest width of a reduced decoder, in features: two heads of 8."""


@register_option("verify", "comparison")
@dataclass(frozen=True)
class VerifyConfig:
    """Comparison of a parallelism strategy with one device."""

    steps: int = 3
    """Length of each run, in optimizer steps."""
    layers: int = 2
    """Largest number of layers; a pipeline has at least one per stage."""
    width: int | None = 64
    """Largest width of the residual stream of a decoder, in features; null: as configured."""
    sequence: int | None = 128
    """Largest sequence length, in tokens; null: as configured."""
    micro_batch: int = 2
    """Largest micro-batch size, in samples; a pipeline has at least one per pipeline
    micro-batch."""
    accumulation: int = 2
    """Largest number of accumulated micro-batches of one optimizer step, in micro-batches."""
    learning_rate: float = 0.1
    """Learning rate of SGD with momentum, which replaces the optimizer except that of a
    user-defined module: the update of an adaptive optimizer hides a wrong gradient scale."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each value out of range."""
        minimums = {"steps": 1, "layers": 1, "width": MIN_WIDTH, "sequence": 2}
        minimums |= {"micro_batch": 1, "accumulation": 1}
        for name, minimum in minimums.items():
            key, value = f"verify.{name}", getattr(self, name)
            if value is not None and value < minimum:
                fix = f"set {format_override(key, getattr(VerifyConfig, name))}"
                yield ConfigIssue(key, value, f"must be {minimum} or more", fix)
        if not self.learning_rate > 0:
            key, fix = "verify.learning_rate", "set verify.learning_rate=0.1"
            yield ConfigIssue(key, self.learning_rate, "must be positive", fix)
