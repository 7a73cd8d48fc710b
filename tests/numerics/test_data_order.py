"""Data order: each sample once per epoch, equal under every strategy and after a resume."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalewise.data.dataloader import BatchShare, TrainLoader, ValidationLoader
from scalewise.data.datasets import PackedDataset, ShuffleOrder, epoch_permutation
from scalewise.data.synthetic_datasets import RandomDataset
from scalewise.objectives import IGNORED

SEQUENCE = 4


def numbered(num_samples):
    """Dataset in which sample i has the tokens from i * SEQUENCE on."""
    return PackedDataset([np.arange(num_samples * SEQUENCE + 1, dtype=np.uint32)], SEQUENCE)


def indices(batch):
    """Sample indices of a batch without padding samples."""
    real = (batch["labels"] != IGNORED).any(1)
    return (batch["inputs"][real, 0] // SEQUENCE).tolist()


def batch_shares(global_batch, micro_batch, ranks):
    return [BatchShare(global_batch, micro_batch, rank, ranks) for rank in range(ranks)]


batch_splits = st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
"""Global batch, micro-batch and number of ranks, whether divisible or not."""


@settings(deadline=None, max_examples=60)
@given(batch_splits, st.integers(1, 200), st.integers(0, 2**32))
def test_ranks_and_micro_steps_form_the_global_batch(batch_split, num_samples, seed):
    dataset, order = numbered(num_samples), ShuffleOrder(num_samples, seed, batch_split[0])
    for step in (0, 1, 7):
        read_indices = []
        for micro_step in range(
            step * (n := batch_shares(*batch_split)[0].accumulation), (step + 1) * n
        ):
            for batch_share in batch_shares(*batch_split):
                tokens_BS = batch_share.read_micro_batch(dataset.gather, order, micro_step)
                assert tokens_BS.shape == (batch_split[1], SEQUENCE + 1), batch_share
                is_padding_B = (tokens_BS < 0).any(1)
                np.testing.assert_array_equal(is_padding_B, (tokens_BS < 0).all(1))
                read_indices += (tokens_BS[~is_padding_B, 0] // SEQUENCE).tolist()
        np.testing.assert_array_equal(read_indices, order.indices(step, 0, batch_split[0]))


@settings(deadline=None, max_examples=60)
@given(batch_splits)
def test_batch_share_has_the_fewest_micro_steps(batch_split):
    global_batch, micro_batch, ranks = batch_split
    accumulation = BatchShare(*batch_split[:2], 0, ranks).accumulation
    assert (
        (accumulation - 1) * micro_batch * ranks
        < global_batch
        <= accumulation * micro_batch * ranks
    )
    divides_evenly = global_batch % (micro_batch * ranks) == 0
    assert BatchShare(*batch_split[:2], 0, ranks).has_masked_labels(numbered(3)) == (
        not divides_evenly
    )
    assert BatchShare(*batch_split[:2], 0, ranks).has_masked_labels(
        RandomDataset(0, 9, 0, 9, SEQUENCE, 0.1)
    )


@settings(deadline=None, max_examples=60)
@given(num_samples=st.integers(1, 60), seed=st.integers(0, 2**63), global_batch=st.integers(1, 80))
def test_shuffle_order_has_every_index_once_per_epoch(num_samples, seed, global_batch):
    order, epochs = ShuffleOrder(num_samples, seed, global_batch), 3
    steps = -(-num_samples * epochs // global_batch)
    read_indices = np.concatenate([order.indices(s, 0, global_batch) for s in range(steps)])
    for epoch in range(epochs):
        epoch_indices = read_indices[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(epoch_indices) == list(range(num_samples)), epoch
        np.testing.assert_array_equal(epoch_indices, epoch_permutation(num_samples, seed, epoch))


def test_shuffle_order_differs_by_epoch_and_seed():
    permutations = {
        tuple(epoch_permutation(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(permutations) == 4


def test_shuffle_order_is_stable_across_versions():
    assert epoch_permutation(8, 1234, 0).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]


def test_stored_shuffle_order_wraps_around():
    assert ShuffleOrder(3, None, 4).indices(0, 0, 4).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(("num_samples", "global_batch"), [(0, 4), (4, 0)])
def test_shuffle_order_of_no_samples_is_rejected(num_samples, global_batch):
    with pytest.raises(ValueError, match="cannot fill a global batch"):
        ShuffleOrder(num_samples, 0, global_batch)


@pytest.mark.parametrize(
    ("ranks", "micro_batch"),
    [(1, 8), (2, 4), (1, 2), (4, 1), (2, 1), (1, 3), (3, 1), (3, 2), (2, 16), (5, 3)],
)
def test_samples_of_a_step_do_not_depend_on_the_strategy(ranks, micro_batch):
    dataset = numbered(21)
    single_rank_indices = [
        indices(batch) for batch in TrainLoader(dataset, BatchShare(8, 8), seed=3, steps=6)
    ]
    loaders = [
        iter(TrainLoader(dataset, BatchShare(8, micro_batch, rank, ranks), seed=3, steps=6))
        for rank in range(ranks)
    ]
    for expected in single_rank_indices:
        accumulation = -(-8 // (ranks * micro_batch))
        read_indices = [indices(next(loader)) for _ in range(accumulation) for loader in loaders]
        assert [index for indices_part in read_indices for index in indices_part] == expected
    assert all(next(loader, None) is None for loader in loaders)


@pytest.mark.parametrize("num_batches", [0, 1, 5, 11])
def test_resumed_loader_yields_the_remaining_batches(num_batches):
    def loader(**more):
        return TrainLoader(numbered(13), BatchShare(4, 2), seed=0, steps=6, **more)

    full_batches = list(loader())
    assert len(full_batches) == len(loader()) == 12
    first = loader()
    iterator = iter(first)
    for _ in range(num_batches):
        next(iterator)
    assert first.state_dict() == {"micro_steps": num_batches}
    state_loader, started_loader, sought_loader = loader(), loader(start=num_batches), loader()
    state_loader.load_state_dict(first.state_dict())
    sought_loader.seek(num_batches)
    for resumed_loader in (state_loader, started_loader, sought_loader):
        remaining_batches = list(resumed_loader)
        assert len(remaining_batches) == 12 - num_batches, resumed_loader
        for batch, expected in zip(remaining_batches, full_batches[num_batches:], strict=True):
            assert torch.equal(batch["inputs"], expected["inputs"]), resumed_loader
            assert torch.equal(batch["labels"], expected["labels"]), resumed_loader


def test_validation_reads_the_same_samples_under_each_strategy():
    dataset = numbered(19)
    single_rank_loader = ValidationLoader(dataset, BatchShare(16, 8))
    assert [indices(batch) for batch in single_rank_loader] == [list(range(8)), list(range(8, 16))]
    assert len(list(single_rank_loader)) == len(single_rank_loader) == 2
    ranks = [ValidationLoader(dataset, batch_share) for batch_share in batch_shares(16, 2, 2)]
    assert [len(loader) for loader in ranks] == [4, 4]
    read_indices = [index for loader in ranks for batch in loader for index in indices(batch)]
    assert sorted(read_indices) == list(range(16))


@pytest.mark.parametrize("num_samples", [1, 3, 8, 19])
@pytest.mark.parametrize("global_batch", [1, 4, 7, 8, 16, 64])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (1, 8), (2, 2), (3, 1), (4, 3), (7, 2)])
def test_validation_reads_each_sample_once(num_samples, global_batch, ranks, micro_batch):
    loaders = [
        ValidationLoader(numbered(num_samples), batch_share)
        for batch_share in batch_shares(global_batch, micro_batch, ranks)
    ]
    batches = [list(loader) for loader in loaders]
    assert {len(batches_of_ranks) for batches_of_ranks in batches} == {
        len(loaders[0])
    }  # no rank waits for another
    assert {tuple(b["inputs"].shape) for batches_of_ranks in batches for b in batches_of_ranks} == {
        (micro_batch, SEQUENCE)
    }
    in_turn = [
        index
        for batches_of_ranks in zip(*batches, strict=True)
        for b in batches_of_ranks
        for index in indices(b)
    ]
    assert in_turn == list(range(min(num_samples, global_batch)))


def test_padding_samples_have_tokens_but_no_labels():
    first, last_batch = TrainLoader(numbered(9), BatchShare(3, 2), seed=0, steps=1)
    assert (first["labels"] != IGNORED).all()
    assert (last_batch["labels"][1] == IGNORED).all()
    for batch in (first, last_batch):
        assert batch["inputs"].shape == batch["labels"].shape == (2, SEQUENCE)
        assert (batch["inputs"] >= 0).all()


MASKED = RandomDataset(3, 50, 0, 23, 16, masked_fraction=0.4)


@settings(deadline=None, max_examples=60)
@given(batch_splits)
def test_first_micro_batch_has_the_label_count_of_the_step(batch_split):
    steps = 4
    single_rank_batches = list(
        TrainLoader(MASKED, BatchShare(batch_split[0], batch_split[0]), seed=1, steps=steps)
    )
    loaders = [
        TrainLoader(MASKED, batch_share, seed=1, steps=steps)
        for batch_share in batch_shares(*batch_split)
    ]
    accumulation = batch_shares(*batch_split)[0].accumulation
    label_totals, label_counts = np.zeros(steps, int), np.zeros(steps, int)
    for loader in loaders:
        for index, batch in enumerate(loader):
            assert ("labels_of_step" in batch) == (index % accumulation == 0), index
            label_counts[index // accumulation] += int(batch.get("labels_of_step", 0))
            label_totals[index // accumulation] += int((batch["labels"] != IGNORED).sum())
    assert label_totals.tolist() == label_counts.tolist()
    assert label_counts.tolist() == [int(batch["labels_of_step"]) for batch in single_rank_batches]


@pytest.mark.parametrize(
    "batch_share", [BatchShare(8, 8), BatchShare(8, 4), BatchShare(8, 3), BatchShare(8, 3, 2, 3)]
)
def test_unmasked_batches_have_no_label_count(batch_share):
    assert all(
        "labels_of_step" not in batch
        for batch in TrainLoader(numbered(9), batch_share, seed=0, steps=2)
    )


def test_masked_tokens_are_inputs_but_not_labels():
    unmasked_dataset = RandomDataset(3, 50, 0, 23, 16)
    masked, unmasked_batch = (
        next(iter(TrainLoader(masked_dataset, BatchShare(8, 8), seed=1, steps=1)))
        for masked_dataset in (MASKED, unmasked_dataset)
    )
    assert torch.equal(masked["inputs"], unmasked_batch["inputs"])
    is_label_BT = masked["labels"] != IGNORED
    assert torch.equal(masked["labels"][is_label_BT], unmasked_batch["labels"][is_label_BT])
    assert 0.4 < is_label_BT.float().mean() < 0.8


@pytest.mark.parametrize(
    "batch_share", [BatchShare(5, 2), BatchShare(5, 2, 1, 2), BatchShare(4, 2)]
)
@pytest.mark.parametrize("num_samples", [numbered(13), MASKED], ids=["plain", "masked"])
def test_resumed_uneven_loader_yields_the_remaining_batches(num_samples, batch_share):
    full_batches = list(TrainLoader(num_samples, batch_share, seed=0, steps=5))
    num_batches = 2 * batch_share.accumulation
    remaining_batches = list(
        TrainLoader(num_samples, batch_share, seed=0, steps=5, start=num_batches)
    )
    assert len(remaining_batches) == 3 * batch_share.accumulation
    for batch, expected in zip(remaining_batches, full_batches[num_batches:], strict=True):
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[key], expected[key]) for key in batch)


def test_labels_are_shifted_inputs_in_shared_memory():
    batch = next(iter(TrainLoader(numbered(5), BatchShare(2, 2), seed=0, steps=1)))
    assert batch["inputs"].dtype == batch["labels"].dtype == torch.int64
    assert batch["inputs"].shape == batch["labels"].shape == (2, SEQUENCE)
    assert torch.equal(batch["inputs"] + 1, batch["labels"])
    assert batch["labels"].data_ptr() == batch["inputs"].data_ptr() + 8
