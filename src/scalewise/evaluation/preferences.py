"""Evaluation of a model on validation pairs of preferred and rejected answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from scalewise.data.dataloader import BatchShare, ValidationLoader
from scalewise.data.prepare import TokenDataset
from scalewise.evaluation.validation_metrics import LOGITS_CHUNK
from scalewise.models.base_module import ModelModule
from scalewise.objectives import DPO
from scalewise.objectives.losses import compute_loss, set_chunked_loss


@dataclass(frozen=True)
class PreferenceMetrics:
    """Means over the validation pairs."""

    rows: int
    """Number of pairs."""
    loss: float
    """DPO loss, in nats per pair."""
    reward_margin: float
    """Reward of the chosen answer minus that of the rejected one."""
    reward_accuracy: float
    """Fraction of pairs whose chosen answer has the higher reward."""
    likelier: float
    """Fraction of pairs whose chosen answer is more likely, without the reference model."""

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} nats per pair, reward margin {self.reward_margin:.4f}, the "
            f"chosen answer has the higher reward in {self.reward_accuracy:.1%} and is more "
            f"likely in {self.likelier:.1%} of pairs"
        )


@torch.no_grad()
def measure_preferences(
    module: ModelModule,
    reference: ModelModule,
    objective: DPO,
    dataset: TokenDataset,
    count: int,
    micro_batch: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> PreferenceMetrics:
    """Evaluate an unsharded model on the first ``count`` pairs of a dataset.

    Args:
        module: Model.
        reference: Reference model.
        objective: Objective of the run.
        dataset: Validation pairs.
        count: Number of pairs.
        micro_batch: Micro-batch size.
        on_progress: Function that is called with the number of evaluated pairs.
    """
    count, device = min(count, len(dataset)), next(module.parameters()).device
    logprobs = replace(objective.reference_objective, loss_chunk=LOGITS_CHUNK)
    for model in (module, reference):
        set_chunked_loss(logprobs, model, in_forward=False)
    sums, done = torch.zeros(4, dtype=torch.float64, device=device), 0
    for batch in ValidationLoader(dataset, BatchShare(count, min(micro_batch, count))):
        inputs, labels = batch["inputs"].to(device), batch["labels"].to(device)
        logp_B, reference_B = module(inputs, labels), reference(inputs, labels)
        metrics_3 = compute_loss(objective, logp_B, {"labels": labels, "reference": reference_B})
        chosen_more_likely = logp_B[::2] > logp_B[1::2]
        sums += torch.cat([metrics_3.double(), chosen_more_likely.sum().view(1).double()])
        done = min(done + micro_batch, count)
        on_progress(done)
    return PreferenceMetrics(count, *(sums / count).tolist())
