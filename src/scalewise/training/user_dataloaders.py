"""Data loaders of user-defined modules: sharded over ranks, and resumed at their position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from math import ceil
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from scalewise.compat.hugging_face import is_split_by_node
from scalewise.compat.lightning import data_fetcher, replace_loader_preparation
from scalewise.planner.plan import amount_text

POSITION_KEY = "position"
"""Key of a loader position in a checkpoint."""


class ShardedSampler(Sampler[int]):
    """Every N-th index of a sampler, so that N ranks together read its samples in its order.

    All ranks use the order of rank 0. If it is not divisible by the number of ranks, its first
    samples are repeated, as by ``torch.utils.data.DistributedSampler``.

    Args:
        source: Sampler of all indices.
        rank: Data-parallel rank.
        ranks: Number of data-parallel ranks.
        broadcast: Function that returns the argument of rank 0 on every rank.
    """

    def __init__(
        self, source: Iterable[int], rank: int, ranks: int, broadcast: Callable[[Any], Any]
    ) -> None:
        self._source, self._rank, self._ranks, self._broadcast = source, rank, ranks, broadcast

    def __iter__(self) -> Iterator[int]:
        order: list[int] = self._broadcast(list(self._source))
        padding = -len(order) % self._ranks
        yield from [*order, *islice(cycle(order), padding)][self._rank :: self._ranks]

    def __len__(self) -> int:
        return -(-count_samples(self) // self._ranks)

    def unique_indices(self) -> list[int]:
        """Indices of this rank without repeated samples."""
        return list(self._broadcast(list(self._source)))[self._rank :: self._ranks]


class ValidationBatches(Sampler[list[int]]):
    """Validation batches without repeated samples, the same number on every rank.

    If some ranks have one more sample and therefore one more batch, the other ranks split their
    last batch in two.

    Args:
        sampler: Indices of this rank; there are at least as many samples as ranks.
        ranks: Number of data-parallel ranks.
        batch_size: Maximum batch size, at least 2 unless ``drop_last``.
        drop_last: Whether smaller batches are dropped.
    """

    def __init__(
        self, sampler: ShardedSampler, ranks: int, batch_size: int, *, drop_last: bool
    ) -> None:
        self._sampler, self._batch_size = sampler, batch_size
        if drop_last:
            self._length = count_samples(sampler) // ranks // batch_size
        else:
            self._length = ceil(count_samples(sampler) / ranks / batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices, size = self._sampler.unique_indices(), self._batch_size
        batches = [indices[first : first + size] for first in range(0, len(indices), size)]
        if len(batches) < self._length:
            batches[-1:] = [batches[-1][:-1], batches[-1][-1:]]
        yield from batches[: self._length]

    def __len__(self) -> int:
        return self._length


class ShardedIterable(IterableDataset[Any]):
    """Every N-th item of an iterable, so that N ranks together read its items in its order.

    Every rank iterates over all items, which must have the same order on all ranks. In a loader
    with workers, each worker shards the items that it reads on a single device. If their number
    is not divisible by the number of ranks, the first items are repeated.

    Args:
        source: Iterable of all items.
        rank: Data-parallel rank.
        ranks: Number of data-parallel ranks.
    """

    def __init__(self, source: Iterable[Any], rank: int, ranks: int) -> None:
        self._source, self._rank, self._ranks = source, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        group: list[Any] = []  # one item per rank; complete before any rank yields
        for item in self._source:
            if len(first) < self._ranks:
                first.append(item)
            group.append(item)
            if len(group) == self._ranks:
                yield group[self._rank]
                group = []
        if group:
            yield [*group, *islice(cycle(first), self._ranks)][self._rank]

    def __len__(self) -> int:
        return -(-count_samples(self) // self._ranks)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle read attributes before __init__
            raise AttributeError(name)
        return getattr(self._source, name)


def shard_dataloaders(
    trainer: Trainer, rank: int, ranks: int, *, split_iterable: bool
) -> list[str]:
    """Make a trainer shard its data loaders by ``ShardedSampler`` and ``ShardedIterable``.

    Lightning's own sampler would also shuffle the samples.

    Args:
        trainer: Trainer whose loaders are sharded.
        rank: Data-parallel rank.
        ranks: Number of data-parallel ranks.
        split_iterable: Whether to shard iterable datasets, which Lightning does not.

    Returns:
        List that receives a note on repeated or dropped samples when a loader is prepared.
    """

    def build_sampler(loader: DataLoader[Any]) -> ShardedSampler:
        return ShardedSampler(loader.sampler, rank, ranks, trainer.strategy.broadcast)

    def prepare_dataloader(loader: Any, is_validation: bool) -> Any:
        if split_iterable and ranks > 1:
            loader = _shard_iterable_loader(loader, rank, ranks)
        if is_validation:
            _avoid_repeats(loader, ranks)
        new_notes = _iter_notes(loader, ranks, is_validation)
        notes.extend(note for note in new_notes if note not in notes)
        return loader

    def reduce_counts_as_float(tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        is_integer = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if is_integer and reduce_op in ("mean", "avg"):
            # Lightning weights means by sample counts; an integer mean of uneven counts truncates.
            tensor = tensor.double()
        return lightning_reduce(tensor, group=group, reduce_op=reduce_op)

    notes = list[str]()
    lightning_reduce = trainer.strategy.reduce
    trainer.strategy.reduce = reduce_counts_as_float  # type: ignore[method-assign]  # Lightning #21859
    replace_loader_preparation(trainer, build_sampler, prepare_dataloader)
    return notes


def _shard_iterable_loader(loader: Any, rank: int, ranks: int) -> Any:
    """Shard a loader that has no sampler; return other loaders unchanged."""
    if isinstance(loader, ShardedIterable):
        return loader
    if not isinstance(loader, DataLoader):
        return ShardedIterable(loader, rank, ranks)
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset) or is_split_by_node(dataset):
        return loader
    if not isinstance(dataset, ShardedIterable):
        # DataLoader forbids assignment, and the constructor of a subclass is unknown.
        object.__setattr__(loader, "dataset", ShardedIterable(dataset, rank, ranks))
    if loader.worker_init_fn is None:  # Lightning seeds workers by rank, so that orders differ
        loader.worker_init_fn = partial(pl_worker_init_function, rank=0)
    return loader


def _avoid_repeats(loader: Any, ranks: int) -> None:
    """Make a validation loader read each sample once, if its batches allow it."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, ShardedSampler):
        return
    sampler, size = loader.sampler, loader.batch_size
    if (
        type(loader.batch_sampler) is not BatchSampler
        or size is None
        or count_samples(sampler) < ranks
    ):
        return
    if size > 1 or loader.drop_last:
        batches = ValidationBatches(sampler, ranks, size, drop_last=loader.drop_last)
        object.__setattr__(loader, "batch_sampler", batches)  # DataLoader forbids assignment


def count_samples(sharded: ShardedSampler | ShardedIterable) -> int:
    """Number of samples over all ranks; raises ``TypeError`` if the source has no length."""
    return len(sharded._source)  # type: ignore[arg-type]  # TypeError is documented


def _iter_notes(loader: Any, ranks: int, is_validation: bool) -> Iterator[str]:
    """Notes on the samples that a loader repeats or drops, if it has a length."""
    period = "each validation" if is_validation else "each epoch"
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    sharded = next((it for it in (loader, dataset) if isinstance(it, ShardedIterable)), sampler)
    if isinstance(sharded, ShardedIterable) and getattr(loader, "num_workers", 0) > 1:
        return  # each worker shards its own part, whose length is unknown here
    try:
        samples_per_rank = samples = len(sharded)  # type: ignore[arg-type]  # TypeError is caught
        if isinstance(sharded, ShardedSampler | ShardedIterable):
            samples = count_samples(sharded)
    except TypeError:
        return
    is_sharded = isinstance(sharded, ShardedSampler | ShardedIterable)
    unique = isinstance(getattr(loader, "batch_sampler", None), ValidationBatches)
    if is_sharded and not unique and samples_per_rank * ranks > samples:
        effect = ", counted twice in the validation loss" * is_validation
        amount = amount_text(samples, samples_per_rank * ranks, "repeated")
        yield f"{period}: {amount}{effect}, to fill {ranks} ranks"
    size = getattr(loader, "batch_size", None)
    if size and getattr(loader, "drop_last", False):
        dropped = samples - len(loader) * size * ranks
        if dropped > 0:
            yield (
                f"{period}: {dropped:,} of {samples:,} samples dropped ({dropped / samples:.1%}) "
                f"by drop_last=True of the loader, with {ranks} ranks x batches of {size}"
            )


class DataLoaderState(Callback):
    """Save and restore the position of the training loader and torch's random state.

    A loader shuffles with torch's default generator when an epoch starts. Lightning would restart
    the epoch from its first sample and, with several ranks, seed the generator again.
    """

    def __init__(self) -> None:
        self._initial_rng_state = torch.get_rng_state()
        self._epoch_rng_state: Tensor | None = None
        self._resume_rng_state: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the random state after module construction, the same for every strategy."""
        torch.set_rng_state(self._initial_rng_state)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the random state at the start of an epoch; the seed gives that of the first."""
        if trainer.current_epoch > 0:
            self._epoch_rng_state = torch.get_rng_state()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the random state at the start of the epoch and the current one."""
        checkpoint[POSITION_KEY] = {"began": self._epoch_rng_state, "then": torch.get_rng_state()}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load both random states."""
        self._epoch_rng_state, self._resume_rng_state = (
            checkpoint[POSITION_KEY]["began"],
            checkpoint[POSITION_KEY]["then"],
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Skip the batches that were read before the checkpoint, in the order of their epoch."""
        if self._resume_rng_state is None:
            return
        loop = trainer.fit_loop
        fetcher, done = data_fetcher(trainer), loop.epoch_loop.batch_progress.current.ready
        assert fetcher is not None
        if done >= loop.max_batches:  # the checkpoint was saved at the end of an epoch
            self._epoch_rng_state, done = self._resume_rng_state, 0
        if self._epoch_rng_state is not None:
            torch.set_rng_state(self._epoch_rng_state)
            iter(fetcher)
        for _ in range(done):
            next(fetcher)
        fetcher.fetched -= done  # Lightning adds them again
        torch.set_rng_state(self._resume_rng_state)
