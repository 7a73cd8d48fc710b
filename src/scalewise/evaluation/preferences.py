"""How often a model prefers the better of two answers that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from scalewise.data.base import Sequences
from scalewise.data.dataloader import BatchShare, ValidationLoader
from scalewise.evaluation.validation_metrics import PIECE
from scalewise.models.base_module import ModelModule
from scalewise.objectives import DPO


@dataclass(frozen=True)
class PreferenceMetrics:
    """Means over pairs: ``loss`` in nats, and what training logs beside it.

    ``likelier``: the share of pairs whose chosen answer is the likelier one, no reference asked.
    """

    rows: int
    loss: float
    reward_margin: float
    reward_accuracy: float
    likelier: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} nats a pair, reward margin {self.reward_margin:.4f}, the chosen "
            f"answer has more reward in {self.reward_accuracy:.1%} and is likelier in "
            f"{self.likelier:.1%}"
        )


@torch.no_grad()
def measure_preferences(
    module: ModelModule,
    reference: ModelModule,
    objective: DPO,
    dataset: Sequences,
    count: int,
    micro_batch: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> PreferenceMetrics:
    """Returns how a whole model does on the first ``count`` pairs; ``on_progress`` hears of pairs
    done."""
    count, device = min(count, len(dataset)), next(module.parameters()).device
    question = replace(objective.reference_objective, loss_chunk=PIECE)
    for asked in (module, reference):
        question.apply(asked, in_forward=False)
    sums, done = torch.zeros(4, dtype=torch.float64, device=device), 0
    for batch in ValidationLoader(dataset, BatchShare(count, min(micro_batch, count))):
        inputs, labels = batch["inputs"].to(device), batch["labels"].to(device)
        own_B, said_B = module(inputs, labels), reference(inputs, labels)
        measured_3 = objective.loss(own_B, {"labels": labels, "reference": said_B})
        likelier = own_B[::2] > own_B[1::2]
        sums += torch.cat([measured_3.double(), likelier.sum().view(1).double()])
        done = min(done + micro_batch, count)
        on_progress(done)
    return PreferenceMetrics(count, *(sums / count).tolist())
