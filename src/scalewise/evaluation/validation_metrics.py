"""Validation loss, perplexity and accuracy of a model, and the distance between two models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor
from torch.nn import functional as F

from scalewise.data.dataloader import BatchShare, ValidationLoader
from scalewise.data.prepare import TokenDataset
from scalewise.models.base_module import ModelModule
from scalewise.objectives import IGNORED

LOGITS_CHUNK = 1024
"""Positions of a sequence whose logits are computed at a time."""


@dataclass(frozen=True)
class ValidationMetrics:
    """Means over all labels of the validation samples."""

    rows: int
    """Number of samples."""
    labels: int
    """Number of labels."""
    loss: float
    """Cross-entropy, in nats per label."""
    accuracy: float
    """Fraction of labels that are predicted correctly."""

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} nats per token, perplexity {self.perplexity:,.2f}, "
            f"accuracy {self.accuracy:.1%} of next tokens"
        )

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class ClassificationMetrics(ValidationMetrics):
    """Validation metrics of classification, with one label per sample."""

    def __str__(self) -> str:
        return f"loss {self.loss:.4f} nats per sample, accuracy {self.accuracy:.1%}"


@torch.no_grad()
def measure_loss(
    module: ModelModule,
    dataset: TokenDataset,
    count: int,
    micro_batch: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> ValidationMetrics:
    """Evaluate an unsharded model on the first ``count`` samples of a dataset.

    Args:
        module: Model.
        dataset: Validation samples.
        count: Number of samples.
        micro_batch: Micro-batch size.
        on_progress: Function that is called with the number of evaluated samples.
    """
    count = min(count, len(dataset))
    device = next(module.parameters()).device
    module.loss, sums = _loss_sums, torch.zeros(2, dtype=torch.float64, device=device)
    labels = done = 0
    for batch in ValidationLoader(dataset, BatchShare(count, min(micro_batch, count))):
        tensors = {name: x_BT.to(device) for name, x_BT in batch.items()}
        sums += module(tensors["inputs"], tensors["labels"], tensors.get("positions"))
        labels += int((batch["labels"] != IGNORED).sum())
        done = min(done + micro_batch, count)
        on_progress(done)
    loss, accuracy = (sums / labels).tolist() if labels else (float("nan"), float("nan"))
    return ValidationMetrics(count, labels, loss, accuracy)


@torch.no_grad()
def logits_distance(
    module: ModelModule,
    other_module: ModelModule,
    dataset: TokenDataset,
    count: int,
    micro_batch: int,
) -> float:
    """Mean absolute difference of the logits of two models over the labels of a dataset."""
    count, device = min(count, len(dataset)), next(other_module.parameters()).device
    distance, elements = torch.zeros((), dtype=torch.float64, device=device), 0
    outputs: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []

    def capture(head: Callable[[Tensor], Tensor], x_BTW: Tensor, labels_BT: Tensor) -> Tensor:
        outputs.append((head, x_BTW))
        return x_BTW.new_zeros(())

    module.loss = other_module.loss = capture
    for batch in ValidationLoader(dataset, BatchShare(count, min(micro_batch, count))):
        tensors = {name: x_BT.to(device) for name, x_BT in batch.items()}
        outputs.clear()
        for model in (module, other_module):
            model(tensors["inputs"], tensors["labels"], tensors.get("positions"))
        for start in range(0, batch["labels"].shape[1], LOGITS_CHUNK):
            chunk = slice(start, start + LOGITS_CHUNK)
            real_BT = tensors["labels"][:, chunk] != IGNORED
            logits, other_logits = (
                head(x_BTW[:, chunk])[real_BT].float() for head, x_BTW in outputs
            )
            distance += (logits - other_logits).abs_().sum(dtype=torch.float64)
            elements += logits.numel()
    return float(distance / elements) if elements else float("nan")


def _loss_sums(head: Callable[[Tensor], Tensor], x_BTW: Tensor, labels_BT: Tensor) -> Tensor:
    """Summed cross-entropy and number of correct predictions, a vector in fp64."""
    sums = torch.zeros(2, dtype=torch.float64, device=x_BTW.device)
    for start in range(0, labels_BT.shape[1], LOGITS_CHUNK):
        chunk = slice(start, start + LOGITS_CHUNK)
        labels_N = labels_BT[:, chunk].flatten()
        logits_NV = head(x_BTW[:, chunk]).flatten(0, 1).float()
        loss = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
        sums += torch.stack([loss, (logits_NV.argmax(-1) == labels_N).sum()])
    return sums
