"""What a model's likeliest answers earn on prompts that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scalewise.data.base import DataConfig, Sequences
from scalewise.data.dataloader import BatchShare, ValidationLoader
from scalewise.models.base_module import ModelModule
from scalewise.objectives import GRPO, IGNORED
from scalewise.strategies.base import ScaledLoss
from scalewise.training.rollout import Rollout


@dataclass(frozen=True)
class RewardMetrics:
    """Means over answers: ``reward``, and how many are ``right`` as a whole."""

    rows: int
    reward: float
    right: float

    @property
    def loss(self) -> float:
        """Returns what is lost of the whole reward, as training calls it."""
        return 1 - self.reward

    def __str__(self) -> str:
        return f"reward {self.reward:.4f}, {self.right:.1%} of the answers are right as a whole"


@torch.no_grad()
def measure_rewards(
    module: ModelModule,
    objective: GRPO,
    data: DataConfig,
    dataset: Sequences,
    count: int,
    micro_batch: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> RewardMetrics:
    """Returns how a whole model answers the first ``count`` prompts; ``on_progress`` hears of
    them."""
    count, device = min(count, len(dataset)), next(module.parameters()).device
    answering = Rollout(objective, data)
    sums, done = torch.zeros(2, dtype=torch.float64, device=device), 0
    for batch in ValidationLoader(dataset, BatchShare(count, min(micro_batch, count))):
        given = {key: batch[key].to(device) for key in ("inputs", "labels")}
        found = answering.generate_greedy(
            given, lambda asked, batch: ScaledLoss(asked).compute(module, batch)
        )
        real_B = (given["labels"] != IGNORED).any(1)
        right_B = (found["labels"] == given["labels"]).all(1)
        sums += torch.stack([found["reward"][real_B].sum(), right_B[real_B].sum()]).double()
        done = min(done + micro_batch, count)
        on_progress(done)
    return RewardMetrics(count, *(sums / count).tolist())
