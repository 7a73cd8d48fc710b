"""Group relative policy optimization (GRPO)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.errors import ConfigIssue
from scalewise.objectives.likelihood import TokenLogProbabilities
from scalewise.registry import register_option


@register_option("objective", "grpo")
@dataclass(frozen=True)
class GRPO(TokenLogProbabilities):
    """Group relative policy optimization: several answers per prompt, rewarded against their mean.

    The mean over tokens of ``1 - r - (ratio - 1) A + beta KL``, with ``A = (r - mean(r)) / std(r)``
    in a group and ``KL = p_ref / p - log(p_ref / p) - 1`` (Shao et al., 2024, DeepSeekMath,
    equations 3 and 4). Answers are used for one step, so that the ratio is 1 and never clipped.
    """

    answers: int = 8
    """Number of sampled answers per prompt and step."""
    beta: float = 0.0
    """Weight of the KL penalty against the reference, which is the model without its adapter."""

    extra_metrics = ("reward",)

    @property
    def rollouts_per_sample(self) -> int:
        """Number of sampled answers per prompt."""
        return self.answers

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Suffixes of the metric keys of the loss and its extra metrics."""
        return (*super().metric_keys, "kl") if self.beta else super().metric_keys

    @property
    def reference_objective(self) -> TokenLogProbabilities | None:
        """Log-probability of each token; None without KL penalty."""
        return TokenLogProbabilities() if self.beta else None

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        if self.loss_chunk is not None:
            reason = "is not supported: this loss weighs each token by the reward of its answer"
            fix = "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, fix)
        if self.answers < 2:
            reason = "must be 2 or more: advantages compare the answers of a group"
            yield ConfigIssue("objective.answers", self.answers, reason, "set objective.answers=8")
        if not self.beta >= 0:
            fix = "set objective.beta=0"
            yield ConfigIssue("objective.beta", self.beta, "must be 0 or more", fix)
