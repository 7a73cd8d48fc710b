"""Metrics of a model on validation data: loss, preferences, rewards and exact captions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import exp
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from scalewise.data.base import DataConfig
from scalewise.data.dataloader import Batch, BatchShare, ValidationLoader
from scalewise.data.prepare import TokenDataset
from scalewise.evaluation.generation import generate_captions
from scalewise.models.base_module import ModelModule
from scalewise.objectives import DPO, GRPO, IGNORED
from scalewise.objectives.losses import compute_loss, set_chunked_loss
from scalewise.strategies.base import ScaledLoss
from scalewise.training.rollout import Rollout

LOGITS_CHUNK = 1024
"""Positions of a sequence whose logits are computed at a time."""
MAX_SHOWN = 3
"""Number of captions that are shown."""


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
class MixtureMetrics(ValidationMetrics):
    """Validation metrics of a mixture, over the labels of all sources."""

    sources: Mapping[str, float]
    """Cross-entropy of each source, in nats per label."""

    @classmethod
    def combine(cls, sources: Mapping[str, ValidationMetrics]) -> Self:
        """Means over the labels of all sources."""
        rows, labels = (
            sum(getattr(it, key) for it in sources.values()) for key in ("rows", "labels")
        )
        loss, accuracy = (
            sum(getattr(it, key) * it.labels for it in sources.values()) / max(labels, 1)
            for key in ("loss", "accuracy")
        )
        losses = {name: metrics.loss for name, metrics in sources.items()}
        return cls(rows, labels, loss, accuracy, losses)

    def __str__(self) -> str:
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in self.sources.items())
        return f"{super().__str__()}; loss by source: {losses}"


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
        sums += module(tensors["inputs"], tensors["labels"], batch.get("positions"))
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
            model(tensors["inputs"], tensors["labels"], batch.get("positions"))
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


@dataclass(frozen=True)
class CaptionMetrics(ValidationMetrics):
    """Validation metrics of image captioning."""

    exact: float
    """Fraction of the generated captions that equal their reference."""
    told: tuple[tuple[list[int], list[int]], ...]
    """Tokens of the first captions, as pairs of reference and generated caption."""

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.exact:.1%} of captions match exactly"


@torch.no_grad()
def measure_captions(
    module: ModelModule,
    dataset: TokenDataset,
    count: int,
    micro_batch: int,
    end_token_ids: Collection[int],
    on_progress: Callable[[int], None] = lambda done: None,
) -> CaptionMetrics:
    """Evaluate an unsharded model on the first ``count`` samples of a dataset.

    Args:
        module: Model.
        dataset: Validation samples.
        count: Number of samples.
        micro_batch: Micro-batch size.
        end_token_ids: Tokens that end a caption.
        on_progress: Function that is called with the number of evaluated samples.
    """
    metrics = measure_loss(module, dataset, count, micro_batch, on_progress)
    captions: list[tuple[list[int], list[int]]] = []
    batch_share = BatchShare(metrics.rows, min(micro_batch, metrics.rows))
    for batch in ValidationLoader(dataset, batch_share):
        captions += _iter_captions(module, batch, end_token_ids)
    captions = captions[: metrics.rows]  # without the padding of the last micro-batch
    exact = sum(reference == generated for reference, generated in captions) / len(captions)
    return CaptionMetrics(**asdict(metrics), exact=exact, told=tuple(captions[:MAX_SHOWN]))


def _iter_captions(
    module: ModelModule, batch: Batch, end_token_ids: Collection[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Reference and generated caption of each sample of a batch."""
    tokens = generate_captions(module, batch["inputs"], 0.0, 1)
    generated_BT = torch.stack([next(tokens) for _ in range(batch["labels"].shape[1])], dim=1)
    for label_T, generated_T in zip(batch["labels"], generated_BT, strict=True):
        yield (
            truncate_at_end(label_T[label_T != IGNORED].tolist(), end_token_ids),
            truncate_at_end(generated_T.tolist(), end_token_ids),
        )


def truncate_at_end(tokens: list[int], end_token_ids: Collection[int]) -> list[int]:
    """Tokens before the first end token."""
    ends = (index for index, token in enumerate(tokens) if token in end_token_ids)
    return tokens[: next(ends, None)]
