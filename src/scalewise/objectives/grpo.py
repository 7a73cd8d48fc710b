"""Answers that can be checked: those better than others to the same prompt become likelier.

Shape suffixes: B sequences, G by G answers to one prompt; T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import option_name, register_option
from scalewise.errors import ConfigIssue
from scalewise.objectives.base import IGNORED
from scalewise.objectives.likelihood import TokenLogProbabilities

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.run_config import RunConfig

EQUAL = 1e-4
"""Added to the deviation of a group's rewards, so that equal ones divide by something."""


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
        """Returns ``answers``."""
        return self.answers

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Returns the ends of the keys of all that a loss holds."""
        return (*super().metric_keys, "kl") if self.beta else super().metric_keys

    @property
    def reference_objective(self) -> TokenLogProbabilities | None:
        """Returns the question of what it thinks of each token; None where it costs nothing."""
        return TokenLogProbabilities() if self.beta else None

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields figures out of range."""
        if self.loss_chunk is not None:
            reason = "sums over tokens, and this loss weighs each by its answer's reward"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, "leave it out")
        if self.answers < 2:
            reason = "must be 2 or more: an answer is as good as others to its prompt are bad"
            yield ConfigIssue("objective.answers", self.answers, reason, "set objective.answers=8")
        if not self.beta >= 0:
            fix = "set objective.beta=0"
            yield ConfigIssue("objective.beta", self.beta, "must be 0 or more", fix)

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields data without answers to check, and a reference that is nowhere."""
        if not run.data.answer_length:
            chosen = run.choices.get("data", option_name(run.data))
            reason = "has no answers that can be checked"
            fix = "set data=reversal, or objective=causal_lm"
            yield ConfigIssue("data", chosen, reason, fix)
        if self.beta > 0 and not run.adapter.turns_off:
            reason = "needs the model as it was, and nothing keeps it: no adapter can be turned off"
            fix = "set adapter=lora, or objective.beta=0"
            yield ConfigIssue("objective.beta", self.beta, reason, fix)

    def count_targets(self, labels_BT: Tensor) -> Tensor:
        """Returns the answers that have labels; others fill batches up."""
        return (labels_BT != IGNORED).any(1).sum()

    def compute_advantages(self, reward_B: Tensor) -> Tensor:
        """Returns how much better an answer is than its group, in the group's deviations."""
        reward_PG = reward_B.view(-1, self.answers)
        apart_PG = reward_PG - reward_PG.mean(1, keepdim=True)
        return (apart_PG / (reward_PG.std(1, keepdim=True) + EQUAL)).flatten()

    def loss(self, token_sums: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns sums over the answers: the loss, the rewards, and the KL where it is paid for.

        The advantages of a group add up to 0, so that a loss of them would say nothing: what is
        lost of the whole reward, 1, stands in for its constant part.
        """
        import torch

        real_BT = batch["labels"] != IGNORED
        tokens_B = real_BT.sum(1).clamp(min=1)
        ratio_BT = (token_sums - token_sums.detach()).exp()
        lost_B1, advantage_B1 = 1 - batch["reward"][:, None], batch["advantage"][:, None]
        loss_BT = lost_B1 - advantage_B1 * (ratio_BT - 1)
        measured = [batch["reward"]]
        if self.beta:
            gap_BT = batch["reference"] - token_sums
            kl_BT = gap_BT.exp() - gap_BT - 1
            loss_BT = loss_BT + self.beta * kl_BT
            measured.append((kl_BT.detach() * real_BT).sum(1) / tokens_B)
        loss_B = (loss_BT * real_BT).sum(1) / tokens_B
        return torch.where(real_BT.any(1), torch.stack([loss_B, *measured]), 0.0).sum(1)
