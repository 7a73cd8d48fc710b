"""How well a model foretells text that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor
from torch.nn import functional as F

from scalewise.data.base import Sequences
from scalewise.data.dataloader import BatchShare, ValidationLoader
from scalewise.models.base_module import ModelModule
from scalewise.objectives import IGNORED

PIECE = 1024
"""Tokens of a row whose logits exist at a time."""


@dataclass(frozen=True)
class ValidationMetrics:
    """Means over all labels of the rows: ``loss`` in nats, ``accuracy`` of the likeliest token."""

    rows: int
    labels: int
    loss: float
    accuracy: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} nats a token, perplexity {self.perplexity:,.2f}, "
            f"the likeliest token is right in {self.accuracy:.1%}"
        )

    @property
    def perplexity(self) -> float:
        """Returns e to the loss: among so many tokens the model is as unsure as among equals."""
        return exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class ClassificationMetrics(ValidationMetrics):
    """The same of rows whose one label is a class."""

    def __str__(self) -> str:
        return f"loss {self.loss:.4f} nats a row, the class is right in {self.accuracy:.1%}"


@torch.no_grad()
def measure_loss(
    module: ModelModule,
    dataset: Sequences,
    count: int,
    micro_batch: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> ValidationMetrics:
    """Returns how a whole model does on the first ``count`` rows; ``on_progress`` hears of rows
    done."""
    count = min(count, len(dataset))
    device = next(module.parameters()).device
    module.loss, sums = _loss_sums, torch.zeros(2, dtype=torch.float64, device=device)
    labels = done = 0
    for batch in ValidationLoader(dataset, BatchShare(count, min(micro_batch, count))):
        there = {name: x_BT.to(device) for name, x_BT in batch.items()}
        sums += module(there["inputs"], there["labels"], there.get("places"))
        labels += int((batch["labels"] != IGNORED).sum())
        done = min(done + micro_batch, count)
        on_progress(done)
    loss, hits = (sums / labels).tolist() if labels else (float("nan"), float("nan"))
    return ValidationMetrics(count, labels, loss, hits)


@torch.no_grad()
def logits_distance(
    module: ModelModule, other_module: ModelModule, dataset: Sequences, count: int, micro_batch: int
) -> float:
    """Returns the mean distance of two models' logits over all labels of the first rows."""
    count, device = min(count, len(dataset)), next(other_module.parameters()).device
    apart, numbers = torch.zeros((), dtype=torch.float64, device=device), 0
    said: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []

    def keep(head: Callable[[Tensor], Tensor], x_BTW: Tensor, labels_BT: Tensor) -> Tensor:
        said.append((head, x_BTW))
        return x_BTW.new_zeros(())

    module.loss = other_module.loss = keep
    for batch in ValidationLoader(dataset, BatchShare(count, min(micro_batch, count))):
        there = {name: x_BT.to(device) for name, x_BT in batch.items()}
        said.clear()
        for asked in (module, other_module):
            asked(there["inputs"], there["labels"], there.get("places"))
        for at in range(0, batch["labels"].shape[1], PIECE):
            real_BT = there["labels"][:, at : at + PIECE] != IGNORED
            one, two = (head(x_BTW[:, at : at + PIECE])[real_BT].float() for head, x_BTW in said)
            apart += (one - two).abs_().sum(dtype=torch.float64)
            numbers += one.numel()
    return float(apart / numbers) if numbers else float("nan")


def _loss_sums(head: Callable[[Tensor], Tensor], x_BTW: Tensor, labels_BT: Tensor) -> Tensor:
    """Returns the summed cross-entropy, and the labels that were the likeliest token, in fp64."""
    sums = torch.zeros(2, dtype=torch.float64, device=x_BTW.device)
    for at in range(0, labels_BT.shape[1], PIECE):
        labels_N = labels_BT[:, at : at + PIECE].flatten()
        logits_NV = head(x_BTW[:, at : at + PIECE]).flatten(0, 1).float()
        loss = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
        sums += torch.stack([loss, (logits_NV.argmax(-1) == labels_N).sum()])
    return sums
