"""Ranks read different samples of a user dataloader, the same number on each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from fixtures.user_module import StreamDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from scalewise.training.user_dataloaders import ShardedIterable, shard_dataloaders


class NumberStream(IterableDataset[int]):
    """Iterable dataset without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


class SizedNumberStream(NumberStream):
    """Iterable dataset with a length."""

    def __len__(self) -> int:
        return self.count


def trainer() -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        plugins=[LightningEnvironment()],
    )


def distributed(
    loader: Any, ranks: int, mode: RunningStage
) -> tuple[list[list[list[int]]], list[str]]:
    """Batches of all ranks for a loader, and the notes about it."""
    rank_items, notes = [], list[str]()
    for rank in range(ranks):
        stub_trainer: Any = trainer()
        stub_trainer._data_connector._requires_distributed_sampler = lambda loader: True
        notes = shard_dataloaders(stub_trainer, rank, ranks, split_iterable=True)
        loader_of_rank = stub_trainer._data_connector._prepare_dataloader(loader, False, mode)
        rank_items.append([batch.tolist() for batch in loader_of_rank])
        assert len(rank_items[-1]) == len(loader_of_rank), rank
    return rank_items, notes


@settings(deadline=None, max_examples=200)
@given(
    samples=st.integers(1, 40),
    ranks=st.integers(2, 5),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    held_out=st.booleans(),
)
def test_validation_samples_are_read_once(
    samples: int,
    ranks: int,
    size: int,
    drop_last: bool,
    held_out: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks have the same number of batches, none empty or larger than those of the loader."""
    dataset: Any = list(range(samples))
    mode = RunningStage.VALIDATING if held_out else RunningStage.TRAINING
    loader = DataLoader(dataset, batch_size=size, drop_last=drop_last)
    rank_items, notes = distributed(loader, ranks, mode)
    assert len({len(rank_batches) for rank_batches in rank_items}) == 1
    assert all(0 < len(batch) <= size for rank_batches in rank_items for batch in rank_batches)
    read_samples = [
        sample for rank_batches in rank_items for batch in rank_batches for sample in batch
    ]
    is_divided = held_out and samples >= ranks and (size > 1 or drop_last)
    note_text = " ".join(notes)
    repeated_match = re.search(r"padded to (\d+) \((\d+) repeated", note_text)
    dropped_match = re.search(r"(\d+) of \d+ samples dropped", note_text)
    assert len(notes) == bool(repeated_match) + bool(dropped_match)
    if is_divided:
        assert len(set(read_samples)) == len(read_samples)
        assert not repeated_match
    elif samples % ranks:
        assert repeated_match
        assert (
            int(repeated_match[1])
            == samples + int(repeated_match[2])
            == -(-samples // ranks) * ranks
        )
    else:
        assert not repeated_match
    assert int(dropped_match[1] if dropped_match else 0) == max(0, samples - len(read_samples))
    if not drop_last:
        assert set(read_samples) == set(range(samples))
    assert ("validation loss" in note_text) == bool(held_out and repeated_match)


def test_validation_mean_equals_one_device() -> None:
    """Mean of batches weighted by size, as in Lightning."""
    loader: Any = DataLoader(list(range(17)), batch_size=4)  # type: ignore[arg-type]  # has both
    rank_items, notes = distributed(loader, 2, RunningStage.VALIDATING)
    assert [[len(batch) for batch in rank_batches] for rank_batches in rank_items] == [
        [4, 4, 1],
        [4, 3, 1],
    ]
    batch_means = [
        (sum(batch) / len(batch), len(batch))
        for rank_batches in rank_items
        for batch in rank_batches
    ]
    assert sum(mean * size for mean, size in batch_means) / 17 == pytest.approx(8)
    assert notes == []


def test_sized_stream_notes_repeated_samples() -> None:
    stub_trainer = trainer()
    notes = shard_dataloaders(stub_trainer, 0, 4, split_iterable=True)
    for stream in (SizedNumberStream(13), SizedNumberStream(12), NumberStream(13)):
        stub_trainer._data_connector._prepare_dataloader(
            DataLoader(stream, batch_size=2), False, RunningStage.VALIDATING
        )
    assert len(notes) == 1
    assert "13 samples padded to 16 (3 repeated, 18.8%), counted twice" in notes[0]


def prepared(loader: Any, rank: int, ranks: int, *, streams: bool = True) -> Any:
    """Loader that the trainer of a rank prepares, called for each epoch."""
    stub_trainer, mode = trainer(), cast(Any, None)
    shard_dataloaders(stub_trainer, rank, ranks, split_iterable=streams)
    prepared_loader = stub_trainer._data_connector._prepare_dataloader(loader, False, mode)
    return stub_trainer._data_connector._prepare_dataloader(prepared_loader, False, mode)


@pytest.mark.parametrize("count", [0, 1, 3, 12, 13])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_ranks_take_every_nth_item(count: int, ranks: int) -> None:
    rank_items = [list(ShardedIterable(NumberStream(count), rank, ranks)) for rank in range(ranks)]
    assert len({len(rank_batches) for rank_batches in rank_items}) == 1
    order = [item for group in zip(*rank_items, strict=True) for item in group]
    assert order[:count] == list(range(count))
    assert order[count:] == [sample % count for sample in range(-count % ranks)]


def test_stream_length_is_divided_by_ranks() -> None:
    assert len(ShardedIterable(SizedNumberStream(13), 0, 4)) == 4
    assert ShardedIterable(SizedNumberStream(13), 0, 4).count == 13
    with pytest.raises(TypeError):
        len(ShardedIterable(NumberStream(13), 0, 4))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_ranks_together_read_what_one_reads(workers: int) -> None:
    """Lightning seeds the generators of workers by rank unless they are seeded already."""
    dataset = TensorDataset(torch.arange(24))

    def read_rank(rank: int, ranks: int) -> list[int]:
        seed_everything(1, workers=True, verbose=False)
        loader = DataLoader(StreamDataset(dataset, shuffle=True), batch_size=2, num_workers=workers)
        loader = prepared(loader, rank, ranks)
        _auto_add_worker_init_fn(loader, rank)
        return [int(sample) for (batch,) in loader for sample in batch]

    rank_items = [read_rank(rank, 2) for rank in range(2)]
    assert [len(rank_batches) for rank_batches in rank_items] == [12, 12]
    assert sorted(rank_items[0] + rank_items[1]) == sorted(read_rank(0, 1))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_workers_divide_every_item() -> None:
    dataset = TensorDataset(torch.arange(24))
    items = []
    for rank in range(2):
        loader = DataLoader(StreamDataset(dataset, shuffle=False), batch_size=2, num_workers=2)
        shared = prepared(loader, rank, 2)
        items += [int(sample) for (batch,) in shared for sample in batch]
    assert sorted(items) == list(range(24))


def test_batch_sampler_of_another_loader_is_divided() -> None:
    batches = [torch.tensor([sample]) for sample in range(4)]
    assert [list(prepared(iter(batches), rank, 2)) for rank in range(2)] == [
        batches[::2],
        batches[1::2],
    ]


def test_dataloader_is_divided_once() -> None:
    assert list(prepared(DataLoader(NumberStream(4), batch_size=None), 1, 2)) == [1, 3]


def test_dataset_that_splits_itself_is_unchanged() -> None:
    """Marked by ``datasets.distributed.split_dataset_by_node`` or by the user."""
    by_node = NumberStream(4)
    by_node._distributed = object()  # type: ignore[attr-defined]
    loader = DataLoader(by_node, batch_size=None)
    assert list(prepared(loader, 1, 2)) == [0, 1, 2, 3]
    loader = DataLoader(NumberStream(4), batch_size=None)
    assert list(prepared(loader, 1, 2, streams=False)) == [0, 1, 2, 3]
