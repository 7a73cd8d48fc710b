"""Data loaders of micro-batches: a training loader that can seek, and a validation loader.

Shapes: B sequences of a micro-batch, T tokens, S = T + 1. The two sequences of a pair are adjacent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scalewise.data.datasets import ShuffleOrder
from scalewise.data.mixture_dataset import MixtureDataset
from scalewise.data.mixture_order import MixtureOrder
from scalewise.data.prepare import FIRST_TOKEN_OFFSET, NO_TOKEN, CaptionedTokenDataset, TokenDataset
from scalewise.objectives import IGNORED
from scalewise.step_counts import StepCounts

Batch = dict[str, torch.Tensor]
Gather = Callable[[NDArray[np.int64]], NDArray[Any]]
"""Function that returns data of the samples at the given indices."""
SampleOrder = ShuffleOrder | MixtureOrder
"""Sample indices of every step."""
PADDING_INDEX = -1
"""Index of a sample that only fills a micro-batch."""


@dataclass(frozen=True)
class BatchShare:
    """Part of each global batch that one data-parallel rank reads, in samples.

    All micro-batches have the same shape. If a global batch does not fill those of all ranks, the
    last ones are padded with samples without labels.
    """

    global_batch: int
    """Samples of one optimizer step over all ranks, after any warm-up."""
    micro_batch: int
    """Samples of one forward pass on one rank."""
    rank: int = 0
    """Data-parallel rank."""
    ranks: int = 1
    """Number of data-parallel ranks."""
    warmup: tuple[tuple[int, int], ...] = ()
    """Stages with other global batches, as in ``StepCounts``."""
    sequence_per_step: StepCounts | None = None
    """Tokens to which the sequences of each step are truncated; None: they are not."""

    @cached_property
    def samples_per_step(self) -> StepCounts:
        """Samples of each optimizer step over all ranks."""
        return StepCounts(self.global_batch, self.warmup)

    @cached_property
    def micro_batches_per_step(self) -> StepCounts:
        """Number of micro-batches of each optimizer step on one rank."""
        size = self.micro_batch * self.ranks
        return self.samples_per_step.convert(lambda samples: ceil(samples / size))

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of one optimizer step on one rank, after any warm-up."""
        return self.micro_batches_per_step.final

    def read_micro_batch(
        self, gather: Gather, shuffle_order: SampleOrder, micro_steps: int, fill_value: int = ~0
    ) -> NDArray[Any]:
        """Return the data of ``gather`` for the micro-batch after ``micro_steps`` others."""
        step, micro_step = self.micro_batches_per_step.locate(micro_steps)
        first = (micro_step * self.ranks + self.rank) * self.micro_batch
        num_samples = min(max(self.samples_per_step.at(step) - first, 0), self.micro_batch)
        samples_B = gather(shuffle_order.indices(step, first, max(num_samples, 1)))
        if num_samples == self.micro_batch:
            return samples_B
        padded_B = np.full((self.micro_batch, *samples_B.shape[1:]), fill_value, samples_B.dtype)
        padded_B[:num_samples] = samples_B[:num_samples]
        return padded_B

    def has_masked_labels(self, dataset: TokenDataset) -> bool:
        """Whether some labels of a global batch may be masked or padding."""
        size = self.micro_batch * self.ranks
        batches = (self.global_batch, *(samples for _, samples in self.warmup))
        return dataset.masked or any(samples % size for samples in batches)


class MicroBatches:
    """Micro-batches of one rank, by their number."""

    reference_logprobs: NDArray[np.float32] | None = None
    """``logp_N2``, log-probabilities of a reference model for each pair; part of batches if set."""

    def __init__(
        self,
        dataset: TokenDataset,
        batch_share: BatchShare,
        order: SampleOrder,
        *,
        pin_memory: bool,
    ) -> None:
        self._dataset, self._batch_share, self._pin_memory = dataset, batch_share, pin_memory
        self._order = order
        # Checked once: isinstance with a protocol costs as much as a batch.
        self._gather_pixels = (
            dataset.gather_pixels if isinstance(dataset, CaptionedTokenDataset) else None
        )

    @property
    def num_samples(self) -> int:
        """Number of samples of the dataset."""
        return len(self._dataset)

    def iter_indexed_batches(self, steps: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yield the sample indices and the batch of each micro-batch, for at most one epoch."""
        steps = min(steps, self._batch_share.samples_per_step.steps_for(len(self._dataset)))
        for number in range(self._batch_share.micro_batches_per_step.before(steps)):
            index_B = self._batch_share.read_micro_batch(
                lambda index_B: index_B, self._order, number, PADDING_INDEX
            )
            yield index_B, self._to_batch(number, self._read_tokens(number))

    def _read_tokens(self, number: int) -> NDArray[np.int64]:
        share = self._batch_share
        tokens_BS = share.read_micro_batch(self._dataset.gather, self._order, number)
        if share.sequence_per_step is None:
            return tokens_BS
        step, _ = share.micro_batches_per_step.locate(number)
        return tokens_BS[:, : share.sequence_per_step.at(step) + 1]

    def _to_batch(self, number: int, tokens_BS: NDArray[np.int64]) -> Batch:
        batch = as_batch(
            tokens_BS,
            self._pin_memory,
            masked=self._batch_share.has_masked_labels(self._dataset),
            packing=self._dataset.packing,
            target_length=self._dataset.target_length,
        )
        if self._gather_pixels:
            pixels_BCHW = self._batch_share.read_micro_batch(
                self._gather_pixels, self._order, number, fill_value=0
            )
            pixels = torch.from_numpy(pixels_BCHW)
            batch["inputs"] = pixels.pin_memory() if self._pin_memory else pixels
        if self.reference_logprobs is None:
            return batch
        logp_B2 = self._batch_share.read_micro_batch(
            self.reference_logprobs.__getitem__, self._order, number, fill_value=0
        )
        logp_B = torch.from_numpy(logp_B2).flatten()
        return {**batch, "reference": logp_B.pin_memory() if self._pin_memory else logp_B}


class TrainLoader(MicroBatches):
    """Training samples in shuffled order, over as many epochs as a number of optimizer steps needs.

    ``micro_steps`` is the number of micro-batches yielded so far; iteration resumes there. Streamed
    datasets are read in stream order. If samples are masked, the first micro-batch of a step
    contains ``labels_of_step``, the number of labels on this rank in the whole step.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        batch_share: BatchShare,
        *,
        seed: int,
        steps: int,
        start: int = 0,
        pin_memory: bool = False,
    ) -> None:
        samples_per_step, order_seed = (
            batch_share.samples_per_step,
            None if dataset.streamed else seed,
        )
        order: SampleOrder = (
            dataset.build_order(seed, samples_per_step, steps)
            if isinstance(dataset, MixtureDataset)
            else ShuffleOrder(len(dataset), order_seed, batch_share.global_batch, samples_per_step)
        )
        super().__init__(dataset, batch_share, order, pin_memory=pin_memory)
        self._micro_batches_per_step = batch_share.micro_batches_per_step
        self._length = self._micro_batches_per_step.before(steps)
        self.micro_steps = start

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        prefetched: list[NDArray[np.int64]] = []
        while self.micro_steps < self._length:
            num_labels, per_step = None, self._micro_batches_per_step
            if self._dataset.masked and per_step.is_step_end(self.micro_steps):
                count = per_step.at(per_step.locate(self.micro_steps)[0])
                numbers = range(self.micro_steps, self.micro_steps + count)
                prefetched = [self._read_tokens(number) for number in numbers]
                label_slice = slice(-self._dataset.target_length or 1, None)
                num_labels = sum(
                    int((tokens_BS[..., label_slice] >= 0).sum()) for tokens_BS in prefetched
                )
            number = self.micro_steps
            tokens_BS = prefetched.pop(0) if prefetched else self._read_tokens(number)
            # Before the yield: a checkpoint that is saved during this batch counts it.
            self.micro_steps += 1
            batch = self._to_batch(number, tokens_BS)
            if num_labels is not None:
                batch["labels_of_step"] = torch.tensor(num_labels)
            yield batch

    def seek(self, micro_steps: int) -> None:
        """Continue with the micro-batch that follows ``micro_steps`` others."""
        self.micro_steps = micro_steps

    def state_dict(self) -> dict[str, int]:
        """Return ``{"micro_steps": n}``, the number of micro-batches yielded so far."""
        return {"micro_steps": self.micro_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after ``state["micro_steps"]`` micro-batches."""
        self.seek(state["micro_steps"])


class ValidationLoader(MicroBatches):
    """First held-out samples in stored order, each once, in as many batches on every rank.

    ``batch_share.global_batch`` is the maximum number of samples.
    """

    def __init__(
        self, dataset: TokenDataset, batch_share: BatchShare, *, pin_memory: bool = False
    ) -> None:
        batch_share = replace(batch_share, global_batch=min(batch_share.global_batch, len(dataset)))
        order = ShuffleOrder(len(dataset), None, batch_share.global_batch)
        super().__init__(dataset, batch_share, order, pin_memory=pin_memory)

    def __len__(self) -> int:
        return self._batch_share.accumulation

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            yield self._to_batch(number, self._read_tokens(number))


def as_batch(
    tokens_BS: NDArray[np.int64],
    pin_memory: bool,
    *,
    masked: bool,
    packing: bool = False,
    target_length: int = 0,
) -> Batch:
    """Return ``inputs`` and ``labels``, both int64 ``x_BT``: views of ``tokens_BS``, or copies.

    The two sequences of each pair in ``tokens_B2S`` become adjacent sequences.

    ``masked``: negative ids become inputs without a label. ``packing``: adds ``positions``, the
    position of each token in its own text, from 0. ``target_length``: ``inputs_BS`` contains -1 at
    positions without a token, and ``labels_BT`` the decoder's tokens. Pinned tensors are contiguous
    copies, so that each is transferred to the device at once.
    """
    tokens = torch.from_numpy(tokens_BS).view(-1, tokens_BS.shape[-1])
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    if target_length:
        batch = {"inputs": tokens[:, :-target_length], "labels": tokens[:, -target_length:]}
    if masked:
        inputs, labels = batch["inputs"], batch["labels"]
        batch = {
            "inputs": torch.where(inputs < 0, ~inputs, inputs),
            "labels": labels.masked_fill(labels < 0, IGNORED),
        }
    if target_length:
        batch["inputs"] = batch["inputs"].masked_fill(batch["inputs"] == ~NO_TOKEN, -1)
    if packing:
        first_BT = batch["inputs"] >= FIRST_TOKEN_OFFSET
        index_T = torch.arange(first_BT.shape[1])
        batch["positions"] = index_T - torch.where(first_BT, index_T, 0).cummax(1).values
        batch["inputs"] = torch.where(
            first_BT, batch["inputs"] - FIRST_TOKEN_OFFSET, batch["inputs"]
        )
    if pin_memory:
        return {name: x_BT.contiguous().pin_memory() for name, x_BT in batch.items()}
    return batch
