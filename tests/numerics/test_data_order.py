"""Which rows are read: every row once per epoch, the same rows in every layout, after a resume."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalewise.data.loader import Loader, Share, ValidationLoader
from scalewise.data.order import Order, permutation
from scalewise.data.rows import PackedRows

SEQUENCE = 4


def numbered(rows):
    """Row i holds the tokens i * SEQUENCE and on, so that a batch tells its indices."""
    return PackedRows([np.arange(rows * SEQUENCE + 1, dtype=np.uint32)], SEQUENCE)


def indices(batch):
    return (batch["inputs"][:, 0] // SEQUENCE).tolist()


layouts = st.tuples(
    st.integers(1, 200),
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
)


@settings(deadline=None, max_examples=60)
@given(layouts)
def test_ranks_and_micro_steps_make_up_the_global_batch(layout):
    rows, seed, ranks, accumulation, micro_batch = layout
    global_batch = ranks * accumulation * micro_batch
    shared, alone = Order(rows, seed, global_batch), Order(rows, seed, global_batch)
    for step in (0, 1, 7):
        parts = [
            shared.indices(step, micro, rank, ranks, micro_batch)
            for micro in range(accumulation)
            for rank in range(ranks)
        ]
        np.testing.assert_array_equal(
            np.concatenate(parts), alone.indices(step, 0, 0, 1, global_batch)
        )


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 60), seed=st.integers(0, 2**63), global_batch=st.integers(1, 80))
def test_every_row_comes_once_per_epoch(rows, seed, global_batch):
    order, epochs = Order(rows, seed, global_batch), 3
    steps = -(-rows * epochs // global_batch)
    read = np.concatenate([order.indices(s, 0, 0, 1, global_batch) for s in range(steps)])
    for epoch in range(epochs):
        one = read[epoch * rows : (epoch + 1) * rows]
        assert sorted(one) == list(range(rows))
        np.testing.assert_array_equal(one, permutation(rows, seed, epoch))


def test_epochs_and_seeds_differ():
    orders = {tuple(permutation(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_the_order_is_what_it_was():
    assert permutation(8, 1234, 0).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]


def test_a_stored_order_wraps():
    assert Order(3, None, 4).indices(0, 0, 0, 1, 4).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 8), (2, 4), (1, 2), (4, 1), (2, 1)])
def test_rows_of_a_step_do_not_depend_on_the_layout(ranks, micro_batch):
    rows = numbered(21)
    whole = [indices(batch) for batch in Loader(rows, Share(8, 8), seed=3, steps=6)]
    loaders = [
        iter(Loader(rows, Share(8, micro_batch, rank, ranks), seed=3, steps=6))
        for rank in range(ranks)
    ]
    for expected in whole:
        accumulation = 8 // (ranks * micro_batch)
        read = [indices(next(loader)) for _ in range(accumulation) for loader in loaders]
        assert [index for part in read for index in part] == expected
    assert all(next(loader, None) is None for loader in loaders)


@pytest.mark.parametrize("stop", [0, 1, 5, 11])
def test_a_resumed_loader_gives_the_batches_that_were_left(stop):
    def loader(**more):
        return Loader(numbered(13), Share(4, 2), seed=0, steps=6, **more)

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
        assert len(rest) == 12 - stop
        for batch, expected in zip(rest, whole[stop:], strict=True):
            assert torch.equal(batch["inputs"], expected["inputs"])
            assert torch.equal(batch["labels"], expected["labels"])


def test_validation_reads_the_same_rows_in_every_layout_and_again():
    rows = numbered(19)
    alone = ValidationLoader(rows, Share(8, 8))
    assert [indices(batch) for batch in alone] == [list(range(8)), list(range(8, 16))]
    assert len(list(alone)) == len(alone) == 2
    ranks = [ValidationLoader(rows, Share(8, 2, rank, 2)) for rank in range(2)]
    assert [len(loader) for loader in ranks] == [4, 4]
    read = [index for loader in ranks for batch in loader for index in indices(batch)]
    assert sorted(read) == list(range(16))


def test_validation_of_few_rows_repeats_them():
    assert [indices(b) for b in ValidationLoader(numbered(3), Share(4, 2))] == [[0, 1], [2, 0]]


def test_a_share_must_fill_the_global_batch():
    with pytest.raises(ValueError, match="global batch of 8 is not a multiple of 3 ranks x 1 rows"):
        Share(8, 1, 0, 3)


def test_labels_are_the_inputs_one_place_on_and_share_their_memory():
    batch = next(iter(Loader(numbered(5), Share(2, 2), seed=0, steps=1)))
    assert batch["inputs"].dtype == batch["labels"].dtype == torch.int64
    assert batch["inputs"].shape == batch["labels"].shape == (2, SEQUENCE)
    assert torch.equal(batch["inputs"] + 1, batch["labels"])
    assert batch["labels"].data_ptr() == batch["inputs"].data_ptr() + 8
