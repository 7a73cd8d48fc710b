"""Preferences: of two answers to a question the better one is to become likelier.

Shape suffixes: B sequences, of which two by two are a pair, the preferred one first; P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import option_name, register_option
from scalewise.errors import ConfigIssue
from scalewise.objectives.base import IGNORED
from scalewise.objectives.likelihood import LogProbabilities

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.run_config import RunConfig


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
        """Yields figures out of range."""
        yield from super().validate()
        if not self.beta > 0:
            fix = "set objective.beta=0.1"
            yield ConfigIssue("objective.beta", self.beta, "must be positive", fix)

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields data without pairs."""
        if not run.data.pairs:
            chosen = run.choices.get("data", option_name(run.data))
            reason = "has no pairs of answers to compare"
            fix = "set data=preference 'data.paths=[my/*.jsonl]', or objective=causal_lm"
            yield ConfigIssue("data", chosen, reason, fix)

    @property
    def reference_objective(self) -> LogProbabilities:
        """Returns the question of what it thought of each answer."""
        return LogProbabilities(self.loss_chunk)

    def count_targets(self, labels_BT: Tensor) -> Tensor:
        """Returns the pairs that have labels; others fill batches up."""
        return self._real_pairs(labels_BT).sum()

    def loss(self, token_sums: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns sums over the pairs: the loss, the margins, and how often a margin is positive.

        A margin is the reward of the chosen answer over that of the rejected one, beta times what
        its log-probability has gained on the reference's. One of 0 is half right: a model that is
        its own reference is right by chance.
        """
        import torch
        from torch.nn import functional as F

        gained_P2 = (token_sums - batch["reference"]).view(-1, 2)
        margin_P = self.beta * (gained_P2[:, 0] - gained_P2[:, 1])
        seen_P = margin_P.detach()
        right_P = (seen_P.sign() + 1) / 2
        measured_3P = torch.stack([-F.logsigmoid(margin_P), seen_P, right_P])
        return torch.where(self._real_pairs(batch["labels"]), measured_3P, 0.0).sum(1)

    def _real_pairs(self, labels_BT: Tensor) -> Tensor:
        return (labels_BT != IGNORED).view(len(labels_BT) // 2, -1).any(1)
