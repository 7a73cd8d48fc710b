"""Group relative policy optimization (GRPO).

Shape suffixes: B sequences, in groups of G answers to one prompt; T tokens; P prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.errors import ConfigIssue
from scalewise.objectives.base import IGNORED
from scalewise.objectives.likelihood import TokenLogProbabilities
from scalewise.registry import register_option

if TYPE_CHECKING:
    from torch import Tensor


STD_EPSILON = 1e-4
"""Term added to the standard deviation of the rewards of a group, to avoid division by zero."""


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

    def count_targets(self, labels_BT: Tensor) -> Tensor:
        """Number of answers with labels; the other ones are padding."""
        return (labels_BT != IGNORED).any(1).sum()

    def compute_advantages(self, reward_B: Tensor) -> Tensor:
        """Advantage of each answer: its reward, standardized within its group."""
        reward_PG = reward_B.view(-1, self.answers)
        centered_PG = reward_PG - reward_PG.mean(1, keepdim=True)
        return (centered_PG / (reward_PG.std(1, keepdim=True) + STD_EPSILON)).flatten()

    def loss(self, token_sums: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Sums over the answers of loss, reward and, with ``beta``, KL divergence.

        The advantages of a group sum to 0, and so would a loss of them alone. Therefore the loss
        contains the constant ``1 - reward``, which makes its value meaningful.
        """
        import torch

        real_BT = batch["labels"] != IGNORED
        tokens_B = real_BT.sum(1).clamp(min=1)
        ratio_BT = (token_sums - token_sums.detach()).exp()
        constant_B1, advantage_B1 = 1 - batch["reward"][:, None], batch["advantage"][:, None]
        loss_BT = constant_B1 - advantage_B1 * (ratio_BT - 1)
        metrics = [batch["reward"]]
        if self.beta:
            gap_BT = batch["reference"] - token_sums
            kl_BT = gap_BT.exp() - gap_BT - 1
            loss_BT = loss_BT + self.beta * kl_BT
            metrics.append((kl_BT.detach() * real_BT).sum(1) / tokens_B)
        loss_B = (loss_BT * real_BT).sum(1) / tokens_B
        return torch.where(real_BT.any(1), torch.stack([loss_B, *metrics]), 0.0).sum(1)
