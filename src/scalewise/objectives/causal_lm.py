"""Causal language modeling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from scalewise.errors import ConfigIssue
from scalewise.objectives.base import ObjectiveConfig
from scalewise.registry import register_option


@register_option("objective", "causal_lm")
@dataclass(frozen=True)
class CausalLM(ObjectiveConfig):
    """Next-token prediction: cross-entropy, in nats."""

    is_scalar: ClassVar[bool] = True

    label_smoothing: float = 0.0
    """Fraction of the target probability that is spread over the whole vocabulary."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        yield from super().validate()
        if not 0 <= self.label_smoothing < 1:
            reason = "must be a fraction in [0, 1)"
            yield ConfigIssue("objective.label_smoothing", self.label_smoothing, reason)

    @property
    def unregularized(self) -> CausalLM:
        """Objective without label smoothing."""
        return replace(self, label_smoothing=0.0)
