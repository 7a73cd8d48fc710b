"""Direct preference optimization (DPO)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.errors import ConfigIssue
from scalewise.objectives.likelihood import LogProbabilities
from scalewise.registry import register_option


@register_option("objective", "dpo")
@dataclass(frozen=True)
class DPO(LogProbabilities):
    """Direct preference optimization of chosen over rejected answers.

    ``-log sigmoid(beta ((log p - log p_ref)(chosen) - (log p - log p_ref)(rejected)))`` per pair
    (Rafailov et al., 2023, equation 7). The reference is the model before the first step.
    """

    beta: float = 0.1
    """Strength of the penalty for moving away from the reference model."""

    pairs = True
    extra_metrics = ("reward_margin", "reward_accuracy")

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        yield from super().validate()
        if not self.beta > 0:
            fix = "set objective.beta=0.1"
            yield ConfigIssue("objective.beta", self.beta, "must be positive", fix)

    @property
    def reference_objective(self) -> LogProbabilities:
        """Log-probability of each answer."""
        return LogProbabilities(self.loss_chunk)
