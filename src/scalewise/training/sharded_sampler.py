"""A rank's share of the rows that a user's own sampler or iterable dataset gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from math import ceil
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from scalewise.data.padding import amount_text


class ShardedSampler(Sampler[int]):
    """Every N-th row of a sampler's order, so that the N ranks together read what one would.

    The order is that of the first rank. Where it does not go evenly into the ranks, its first rows
    are read once more, as torch's ``DistributedSampler`` has it.
    """

    def __init__(
        self, source: Iterable[int], rank: int, ranks: int, broadcast: Callable[[Any], Any]
    ) -> None:
        """``broadcast`` gives every rank what the first one has."""
        self._source, self._rank, self._ranks, self._broadcast = source, rank, ranks, broadcast

    def __iter__(self) -> Iterator[int]:
        order: list[int] = self._broadcast(list(self._source))
        lacking = -len(order) % self._ranks
        yield from [*order, *islice(cycle(order), lacking)][self._rank :: self._ranks]

    def __len__(self) -> int:
        return -(-count_samples(self) // self._ranks)

    def unique_indices(self) -> list[int]:
        """Returns the rank's part of the order, in which no sample is read twice."""
        return list(self._broadcast(list(self._source)))[self._rank :: self._ranks]


class ValidationBatches(Sampler[list[int]]):
    """Batches in which no sample is read twice, as many on every rank: for validation.

    Where some ranks have one sample more, and a batch more for it, the others split the last sample
    off their last batch.

    Args:
        shared: the samples of this rank; there are at least as many samples as ranks.
        batch_size: the largest size of a batch, at least 2 unless ``drop_last``.
        drop_last: whether smaller batches are left out.
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
        own, size = self._sampler.unique_indices(), self._batch_size
        batches = [own[first : first + size] for first in range(0, len(own), size)]
        if len(batches) < self._length:
            batches[-1:] = [batches[-1][:-1], batches[-1][-1:]]
        yield from batches[: self._length]

    def __len__(self) -> int:
        return self._length


class ShardedIterable(IterableDataset[Any]):
    """Every N-th item of an iterable, so that the N ranks together read what one would.

    Every rank iterates over all items, which have to come in the same order. In a loader with
    workers each worker shares out what it would read on one device. Where the items do not go
    evenly into the ranks, the first ones are read once more, as ``Shared`` has it.
    """

    def __init__(self, source: Iterable[Any], rank: int, ranks: int) -> None:
        self._source, self._rank, self._ranks = source, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        group: list[Any] = []  # complete before any rank yields: all take the same number
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
        if name.startswith("_"):  # copies and pickles ask before there is an instance
            raise AttributeError(name)
        return getattr(self._source, name)


def shard_dataloaders(trainer: Trainer, rank: int, ranks: int, *, streams: bool) -> list[str]:
    """Has a trainer share rows out by ``Shared``: Lightning's own would also shuffle them.

    ``streams``: whether to share out iterable datasets as well, which Lightning leaves alone.

    Returns a list that gets, as loaders are prepared, a note on the samples that each pads or
    drops.
    """

    def resolved(loader: DataLoader[Any], shuffle: bool, mode: object = None) -> Any:
        if connector._requires_distributed_sampler(loader):
            return ShardedSampler(loader.sampler, rank, ranks, trainer.strategy.broadcast)
        return loader.sampler

    def prepared(loader: Any, shuffle: bool, mode: Any) -> Any:
        loader = prepare(loader, shuffle, mode)
        if streams and ranks > 1:
            loader = _shard_iterable_loader(loader, rank, ranks)
        held_out = mode is not RunningStage.TRAINING
        if held_out:
            _without_repeats(loader, ranks)
        notes.extend(note for note in _iter_notes(loader, ranks, held_out) if note not in notes)
        return loader

    def mean_of_counts(tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        counts = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if counts and reduce_op in ("mean", "avg"):
            # Lightning weights means by counts of samples: those of uneven ranks were rounded down.
            tensor = tensor.double()
        return reduce(tensor, group=group, reduce_op=reduce_op)

    notes = list[str]()
    reduce = trainer.strategy.reduce
    trainer.strategy.reduce = mean_of_counts  # type: ignore[method-assign]  # its issue 21859
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader
    connector._resolve_sampler = resolved  # type: ignore[method-assign,assignment]  # no public way
    connector._prepare_dataloader = prepared  # type: ignore[method-assign,assignment]  # as above
    return notes


def _shard_iterable_loader(loader: Any, rank: int, ranks: int) -> Any:
    """Returns a loader whose rows, where it has no sampler to choose them by, are shared out."""
    if isinstance(loader, ShardedIterable):
        return loader
    if not isinstance(loader, DataLoader):
        return ShardedIterable(loader, rank, ranks)
    whole = loader.dataset
    by_itself = getattr(whole, "_distributed", None)  # datasets.distributed.split_dataset_by_node
    if not isinstance(whole, IterableDataset) or by_itself is not None:
        return loader
    if not isinstance(whole, ShardedIterable):
        # A DataLoader lets nobody set it, and how to build a subclass anew is not known.
        object.__setattr__(loader, "dataset", ShardedIterable(whole, rank, ranks))
    if loader.worker_init_fn is None:  # Lightning seeds workers by rank: orders would differ
        loader.worker_init_fn = partial(pl_worker_init_function, rank=0)
    return loader


def _without_repeats(loader: Any, ranks: int) -> None:
    """Has a loader of held-out samples give no sample twice, where its batches allow it."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, ShardedSampler):
        return
    shared, size = loader.sampler, loader.batch_size
    if (
        type(loader.batch_sampler) is not BatchSampler
        or size is None
        or count_samples(shared) < ranks
    ):
        return
    if size > 1 or loader.drop_last:
        batches = ValidationBatches(shared, ranks, size, drop_last=loader.drop_last)
        object.__setattr__(loader, "batch_sampler", batches)  # a DataLoader lets nobody set it


def count_samples(sharded: ShardedSampler | ShardedIterable) -> int:
    """Returns the samples that all ranks share; raises ``TypeError`` where they have no length."""
    return len(sharded._source)  # type: ignore[arg-type]  # asked for


def _iter_notes(loader: Any, ranks: int, held_out: bool) -> Iterator[str]:
    """Yields what a loader repeats or drops, as far as it has a length."""
    which = "each validation" if held_out else "each epoch"
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    shared = next((it for it in (loader, dataset) if isinstance(it, ShardedIterable)), sampler)
    if isinstance(shared, ShardedIterable) and getattr(loader, "num_workers", 0) > 1:
        return  # each worker shares out a part that only it knows the length of
    try:
        each = samples = len(shared)  # type: ignore[arg-type]  # asked for
        if isinstance(shared, ShardedSampler | ShardedIterable):
            samples = count_samples(shared)
    except TypeError:
        return
    once = isinstance(getattr(loader, "batch_sampler", None), ValidationBatches)
    if not once and isinstance(shared, ShardedSampler | ShardedIterable) and each * ranks > samples:
        twice = ", counted twice in the held-out loss" * held_out
        amount = amount_text(samples, each * ranks, "repeated")
        yield f"{which}: {amount}{twice}, to fill {ranks} ranks"
    size = getattr(loader, "batch_size", None)
    if size and getattr(loader, "drop_last", False):
        dropped = samples - len(loader) * size * ranks
        if dropped > 0:
            yield (
                f"{which}: {dropped:,} of {samples:,} samples dropped ({dropped / samples:.1%}) by "
                f"the loader's drop_last=True, of {ranks} ranks x batches of {size}"
            )
