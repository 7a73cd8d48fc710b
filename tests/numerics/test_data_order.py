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


def numbered(rows):
    """Row i holds the tokens i * SEQUENCE and on, so that a batch tells its indices."""
    return PackedDataset([np.arange(rows * SEQUENCE + 1, dtype=np.uint32)], SEQUENCE)


def indices(batch):
    """The rows of a batch, without those that only fill it up."""
    real = (batch["labels"] != IGNORED).any(1)
    return (batch["inputs"][real, 0] // SEQUENCE).tolist()


def shares(global_batch, micro_batch, ranks):
    return [BatchShare(global_batch, micro_batch, rank, ranks) for rank in range(ranks)]


cuts = st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
"""A global batch, the micro batch and the ranks that share it, evenly or not."""


@settings(deadline=None, max_examples=60)
@given(cuts, st.integers(1, 200), st.integers(0, 2**32))
def test_ranks_and_micro_steps_form_the_global_batch(cut, rows, seed):
    held, order = numbered(rows), ShuffleOrder(rows, seed, cut[0])
    for step in (0, 1, 7):
        read = []
        for micro_step in range(step * (n := shares(*cut)[0].accumulation), (step + 1) * n):
            for share in shares(*cut):
                tokens_BS = share.read_micro_batch(held.gather, order, micro_step)
                assert tokens_BS.shape == (cut[1], SEQUENCE + 1), share
                filled_B = (tokens_BS < 0).any(1)
                np.testing.assert_array_equal(filled_B, (tokens_BS < 0).all(1))
                read += (tokens_BS[~filled_B, 0] // SEQUENCE).tolist()
        np.testing.assert_array_equal(read, order.indices(step, 0, cut[0]))


@settings(deadline=None, max_examples=60)
@given(cuts)
def test_batch_share_has_the_fewest_micro_steps(cut):
    global_batch, micro_batch, ranks = cut
    needed = BatchShare(*cut[:2], 0, ranks).accumulation
    assert (needed - 1) * micro_batch * ranks < global_batch <= needed * micro_batch * ranks
    even = global_batch % (micro_batch * ranks) == 0
    assert BatchShare(*cut[:2], 0, ranks).has_masked_labels(numbered(3)) == (not even)
    assert BatchShare(*cut[:2], 0, ranks).has_masked_labels(
        RandomDataset(0, 9, 0, 9, SEQUENCE, 0.1)
    )


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 60), seed=st.integers(0, 2**63), global_batch=st.integers(1, 80))
def test_shuffle_order_has_every_index_once_per_epoch(rows, seed, global_batch):
    order, epochs = ShuffleOrder(rows, seed, global_batch), 3
    steps = -(-rows * epochs // global_batch)
    read = np.concatenate([order.indices(s, 0, global_batch) for s in range(steps)])
    for epoch in range(epochs):
        one = read[epoch * rows : (epoch + 1) * rows]
        assert sorted(one) == list(range(rows)), epoch
        np.testing.assert_array_equal(one, epoch_permutation(rows, seed, epoch))


def test_shuffle_order_differs_by_epoch_and_seed():
    orders = {tuple(epoch_permutation(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_shuffle_order_is_stable_across_versions():
    assert epoch_permutation(8, 1234, 0).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]


def test_stored_shuffle_order_wraps_around():
    assert ShuffleOrder(3, None, 4).indices(0, 0, 4).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(("rows", "global_batch"), [(0, 4), (4, 0)])
def test_shuffle_order_of_no_samples_is_rejected(rows, global_batch):
    with pytest.raises(ValueError, match="cannot fill a global batch"):
        ShuffleOrder(rows, 0, global_batch)


@pytest.mark.parametrize(
    ("ranks", "micro_batch"),
    [(1, 8), (2, 4), (1, 2), (4, 1), (2, 1), (1, 3), (3, 1), (3, 2), (2, 16), (5, 3)],
)
def test_samples_of_a_step_do_not_depend_on_the_strategy(ranks, micro_batch):
    rows = numbered(21)
    whole = [indices(batch) for batch in TrainLoader(rows, BatchShare(8, 8), seed=3, steps=6)]
    loaders = [
        iter(TrainLoader(rows, BatchShare(8, micro_batch, rank, ranks), seed=3, steps=6))
        for rank in range(ranks)
    ]
    for expected in whole:
        accumulation = -(-8 // (ranks * micro_batch))
        read = [indices(next(loader)) for _ in range(accumulation) for loader in loaders]
        assert [index for part in read for index in part] == expected
    assert all(next(loader, None) is None for loader in loaders)


@pytest.mark.parametrize("stop", [0, 1, 5, 11])
def test_resumed_loader_yields_the_remaining_batches(stop):
    def loader(**more):
        return TrainLoader(numbered(13), BatchShare(4, 2), seed=0, steps=6, **more)

    whole = list(loader())
    assert len(whole) == len(loader()) == 12
    first = loader()
    running = iter(first)
    for _ in range(stop):
        next(running)
    assert first.state_dict() == {"micro_steps": stop}
    resumed, started, sought = loader(), loader(start=stop), loader()
    resumed.load_state_dict(first.state_dict())
    sought.seek(stop)
    for other in (resumed, started, sought):
        rest = list(other)
        assert len(rest) == 12 - stop, other
        for batch, expected in zip(rest, whole[stop:], strict=True):
            assert torch.equal(batch["inputs"], expected["inputs"]), other
            assert torch.equal(batch["labels"], expected["labels"]), other


def test_validation_reads_the_same_samples_under_each_strategy():
    rows = numbered(19)
    alone = ValidationLoader(rows, BatchShare(16, 8))
    assert [indices(batch) for batch in alone] == [list(range(8)), list(range(8, 16))]
    assert len(list(alone)) == len(alone) == 2
    ranks = [ValidationLoader(rows, share) for share in shares(16, 2, 2)]
    assert [len(loader) for loader in ranks] == [4, 4]
    read = [index for loader in ranks for batch in loader for index in indices(batch)]
    assert sorted(read) == list(range(16))


@pytest.mark.parametrize("rows", [1, 3, 8, 19])
@pytest.mark.parametrize("global_batch", [1, 4, 7, 8, 16, 64])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (1, 8), (2, 2), (3, 1), (4, 3), (7, 2)])
def test_validation_reads_each_sample_once(rows, global_batch, ranks, micro_batch):
    loaders = [
        ValidationLoader(numbered(rows), share)
        for share in shares(global_batch, micro_batch, ranks)
    ]
    batches = [list(loader) for loader in loaders]
    assert {len(each) for each in batches} == {len(loaders[0])}  # no rank waits for another
    assert {tuple(b["inputs"].shape) for each in batches for b in each} == {(micro_batch, SEQUENCE)}
    in_turn = [index for each in zip(*batches, strict=True) for b in each for index in indices(b)]
    assert in_turn == list(range(min(rows, global_batch)))


def test_padding_samples_have_tokens_but_no_labels():
    first, second = TrainLoader(numbered(9), BatchShare(3, 2), seed=0, steps=1)
    assert (first["labels"] != IGNORED).all()
    assert (second["labels"][1] == IGNORED).all()
    for batch in (first, second):
        assert batch["inputs"].shape == batch["labels"].shape == (2, SEQUENCE)
        assert (batch["inputs"] >= 0).all()


MASKED = RandomDataset(3, 50, 0, 23, 16, masked_fraction=0.4)


@settings(deadline=None, max_examples=60)
@given(cuts)
def test_first_micro_batch_has_the_label_count_of_the_step(cut):
    steps = 4
    alone = list(TrainLoader(MASKED, BatchShare(cut[0], cut[0]), seed=1, steps=steps))
    loaders = [TrainLoader(MASKED, share, seed=1, steps=steps) for share in shares(*cut)]
    every = shares(*cut)[0].accumulation
    totals, counted = np.zeros(steps, int), np.zeros(steps, int)
    for loader in loaders:
        for place, batch in enumerate(loader):
            assert ("labels_of_step" in batch) == (place % every == 0), place
            counted[place // every] += int(batch.get("labels_of_step", 0))
            totals[place // every] += int((batch["labels"] != IGNORED).sum())
    assert totals.tolist() == counted.tolist()
    assert counted.tolist() == [int(batch["labels_of_step"]) for batch in alone]


@pytest.mark.parametrize(
    "share", [BatchShare(8, 8), BatchShare(8, 4), BatchShare(8, 3), BatchShare(8, 3, 2, 3)]
)
def test_unmasked_batches_have_no_label_count(share):
    assert all(
        "labels_of_step" not in batch for batch in TrainLoader(numbered(9), share, seed=0, steps=2)
    )


def test_masked_tokens_are_inputs_but_not_labels():
    plain = RandomDataset(3, 50, 0, 23, 16)
    masked, whole = (
        next(iter(TrainLoader(rows, BatchShare(8, 8), seed=1, steps=1))) for rows in (MASKED, plain)
    )
    assert torch.equal(masked["inputs"], whole["inputs"])
    kept = masked["labels"] != IGNORED
    assert torch.equal(masked["labels"][kept], whole["labels"][kept])
    assert 0.4 < kept.float().mean() < 0.8


@pytest.mark.parametrize("share", [BatchShare(5, 2), BatchShare(5, 2, 1, 2), BatchShare(4, 2)])
@pytest.mark.parametrize("rows", [numbered(13), MASKED], ids=["plain", "masked"])
def test_resumed_uneven_loader_yields_the_remaining_batches(rows, share):
    whole = list(TrainLoader(rows, share, seed=0, steps=5))
    stop = 2 * share.accumulation
    rest = list(TrainLoader(rows, share, seed=0, steps=5, start=stop))
    assert len(rest) == 3 * share.accumulation
    for batch, expected in zip(rest, whole[stop:], strict=True):
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[key], expected[key]) for key in batch)


def test_labels_are_shifted_inputs_in_shared_memory():
    batch = next(iter(TrainLoader(numbered(5), BatchShare(2, 2), seed=0, steps=1)))
    assert batch["inputs"].dtype == batch["labels"].dtype == torch.int64
    assert batch["inputs"].shape == batch["labels"].shape == (2, SEQUENCE)
    assert torch.equal(batch["inputs"] + 1, batch["labels"])
    assert batch["labels"].data_ptr() == batch["inputs"].data_ptr() + 8
