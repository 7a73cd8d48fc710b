"""Evaluation of the reward of greedily decoded answers to validation prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scalewise.data.base import DataConfig
from scalewise.data.dataloader import BatchShare, ValidationLoader
from scalewise.data.prepare import TokenDataset
from scalewise.models.base_module import ModelModule
from scalewise.objectives import GRPO, IGNORED
from scalewise.strategies.base import ScaledLoss
from scalewise.training.rollout import Rollout


@dataclass(frozen=True)
class RewardMetrics:
    """Means over the answers to the validation prompts."""

    rows: int
    """Number of prompts."""
    reward: float
    """Reward of an answer, at most 1."""
    right: float
    """Fraction of completely correct answers."""

    @property
    def loss(self) -> float:
        """Validation loss, as in training: ``1 - reward``."""
        return 1 - self.reward

    def __str__(self) -> str:
        return f"reward {self.reward:.4f}, {self.right:.1%} of the answers are correct"


@torch.no_grad()
def measure_rewards(
    module: ModelModule,
    objective: GRPO,
    data: DataConfig,
    dataset: TokenDataset,
    count: int,
    micro_batch: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> RewardMetrics:
    """Evaluate an unsharded model on the first ``count`` prompts of a dataset.

    Args:
        module: Model.
        objective: Objective of the run.
        data: Data config with the reward function.
        dataset: Validation prompts.
        count: Number of prompts.
        micro_batch: Micro-batch size.
        on_progress: Function that is called with the number of evaluated prompts.
    """
    count, device = min(count, len(dataset)), next(module.parameters()).device
    rollout = Rollout(objective, data)
    sums, done = torch.zeros(2, dtype=torch.float64, device=device), 0
    for batch in ValidationLoader(dataset, BatchShare(count, min(micro_batch, count))):
        prompts = {key: batch[key].to(device) for key in ("inputs", "labels")}
        answers = rollout.generate_greedy(
            prompts, lambda objective, batch: ScaledLoss(objective).compute(module, batch)
        )
        real_B = (prompts["labels"] != IGNORED).any(1)
        correct_B = (answers["labels"] == prompts["labels"]).all(1)
        sums += torch.stack([answers["reward"][real_B].sum(), correct_B[real_B].sum()]).double()
        done = min(done + micro_batch, count)
        on_progress(done)
    return RewardMetrics(count, *(sums / count).tolist())
