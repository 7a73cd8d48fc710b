"""Direct preference optimization (DPO).

Shape suffixes: B sequences, in pairs with the chosen answer first; T tokens; P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.errors import ConfigIssue
from scalewise.objectives.base import IGNORED
from scalewise.objectives.likelihood import LogProbabilities
from scalewise.registry import register_option

if TYPE_CHECKING:
    from torch import Tensor


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

    def count_targets(self, labels_BT: Tensor) -> Tensor:
        """Number of pairs with labels; the other ones are padding."""
        return self._real_pairs(labels_BT).sum()

    def loss(self, token_sums: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Sums over the pairs of loss, reward margin and reward accuracy.

        The reward of an answer is ``beta (log p - log p_ref)``; the margin is the reward of the
        chosen answer minus that of the rejected one. The accuracy is 1 for a positive margin and
        1/2 for a margin of 0, so that an untrained model has chance level.
        """
        import torch
        from torch.nn import functional as F

        log_ratio_P2 = (token_sums - batch["reference"]).view(-1, 2)
        margin_P = self.beta * (log_ratio_P2[:, 0] - log_ratio_P2[:, 1])
        detached_P = margin_P.detach()
        accuracy_P = (detached_P.sign() + 1) / 2
        metrics_3P = torch.stack([-F.logsigmoid(margin_P), detached_P, accuracy_P])
        return torch.where(self._real_pairs(batch["labels"]), metrics_3P, 0.0).sum(1)

    def _real_pairs(self, labels_BT: Tensor) -> Tensor:
        return (labels_BT != IGNORED).view(len(labels_BT) // 2, -1).any(1)
