"""Order of a mixture: a function of seed and step, in the proportions of the weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.datasets import PackedDataset, ShuffleOrder
from scalewise.data.mixture import MixtureData, MixtureSource, MixtureStage
from scalewise.data.mixture_dataset import MixtureDataset
from scalewise.data.mixture_order import MixtureOrder, WeightedInterleaving
from scalewise.data.synthetic import RandomTokens
from scalewise.errors import DataError
from scalewise.step_counts import StepCounts

SEQUENCE = 4
SIZES = {"a": 30, "b": 7, "c": 100}
WEIGHTS = {"a": 0.6, "b": 0.1, "c": 0.3}


def build_order(stages, limits=(), sizes=None, seed=3, global_batch=8, steps=50):
    limits = dict(limits)
    counts = StepCounts(global_batch)
    return MixtureOrder(
        sizes or SIZES, stages, limits, seed=seed, samples_per_step=counts, steps=steps
    )


def all_indices(order, global_batch=8, steps=50):
    return np.concatenate([order.indices(step, 0, global_batch) for step in range(steps)])


def sources_of(index_N, sizes=SIZES):
    return np.searchsorted(np.cumsum([*sizes.values()]), index_N, side="right")


def mixture_loader(ranks=1, rank=0, micro_batch=8, start=0, **config):
    """Loader of a mixture in which token 0 of a sample identifies its source and index."""
    datasets = {
        name: PackedDataset([np.arange(size * SEQUENCE + 1) + 1000 * number], SEQUENCE)
        for number, (name, size) in enumerate(SIZES.items())
    }
    data = RandomTokens(sequence=SEQUENCE)
    sources = {name: MixtureSource(data, WEIGHTS[name]) for name in SIZES}
    mixture = MixtureData(sequence=SEQUENCE, sources=sources, **config)
    share = BatchShare(8, micro_batch, rank, ranks)
    dataset = MixtureDataset(datasets, mixture)
    return TrainLoader(dataset, share, seed=3, steps=20, start=start)


weight_lists = st.lists(st.floats(0.001, 1), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(weight_lists, st.integers(0, 5000), st.integers(1, 50), st.integers(0, 2**32))
def test_interleaving_is_the_same_from_any_position(weights, first, count, seed):
    interleaving = WeightedInterleaving(seed, tuple(w / sum(weights) for w in weights))
    source_B, number_B = interleaving.window(first, count)
    assert len(source_B) == count
    shifted = max(0, first - 13)
    other_source_B, other_number_B = interleaving.window(shifted, count + 26)
    offset = first - shifted
    np.testing.assert_array_equal(source_B, other_source_B[offset : offset + count])
    np.testing.assert_array_equal(number_B, other_number_B[offset : offset + count])
    counts = np.array(interleaving.counts_at(first))
    assert counts.sum() == first
    expected = first * np.array(interleaving.weights)
    assert (abs(counts - expected) <= len(weights) + 1).all()
    assert interleaving.position_of(int(source_B[0]), int(number_B[0])) == first


def test_interleaving_counts_equal_those_of_all_items_before():
    interleaving = WeightedInterleaving(5, (0.5, 0.25, 0.25))
    source_N, number_N = interleaving.window(0, 400)
    for position in (0, 1, 7, 100, 399):
        counts = np.bincount(source_N[:position], minlength=3)
        assert interleaving.counts_at(position) == counts.tolist(), position
    for source in range(3):
        numbers = number_N[source_N == source]
        np.testing.assert_array_equal(numbers, np.arange(len(numbers)), str(source))


def test_interleaving_is_stable_across_versions():
    source_B, _ = WeightedInterleaving(1, (0.5, 0.5)).window(0, 12)
    assert source_B.tolist() == [1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1]


def test_mixture_of_one_source_has_its_order():
    order = build_order([(0.0, {"a": 2.0})], sizes={"a": 30})
    single = ShuffleOrder(30, 3, 8)
    for step in (0, 3, 4, 49):
        np.testing.assert_array_equal(order.indices(step, 0, 8), single.indices(step, 0, 8))


def test_each_source_has_its_own_epochs():
    index_N = all_indices(build_order([(0.0, WEIGHTS)]))
    source_N = sources_of(index_N)
    np.testing.assert_allclose(np.bincount(source_N) / 400, [0.6, 0.1, 0.3], atol=0.01)
    for source, size in enumerate(SIZES.values()):
        samples = index_N[source_N == source]
        for epoch in range(len(samples) // size):
            part = samples[epoch * size : (epoch + 1) * size]
            assert len(np.unique(part)) == size, (source, epoch)


def test_stage_changes_the_weights_at_its_step():
    stages = [(0.0, WEIGHTS), (0.8, {"a": 0.0, "b": 0.5, "c": 0.5})]
    source_N = sources_of(all_indices(build_order(stages)))
    before = np.bincount(source_N[: 40 * 8], minlength=3) / 320
    np.testing.assert_allclose(before, [0.6, 0.1, 0.3], atol=0.01)
    after = np.bincount(source_N[40 * 8 :], minlength=3) / 80
    np.testing.assert_allclose(after, [0.0, 0.5, 0.5], atol=0.03)


def test_repetition_limit_replaces_a_source_by_the_others():
    index_N = all_indices(build_order([(0.0, WEIGHTS)], {"b": 2.0}))
    source_N = sources_of(index_N)
    assert (source_N == 1).sum() == 2 * SIZES["b"]
    last = np.flatnonzero(source_N == 1)[-1]
    after = np.bincount(source_N[last + 1 :], minlength=3) / (len(source_N) - last - 1)
    np.testing.assert_allclose(after, [2 / 3, 0, 1 / 3], atol=0.02)


def test_repetition_limit_counts_samples_of_earlier_stages():
    stages = [(0.0, WEIGHTS), (0.5, {"a": 0.1, "b": 0.8, "c": 0.1})]
    source_N = sources_of(all_indices(build_order(stages, {"b": 5.0})))
    assert (source_N == 1).sum() == 5 * SIZES["b"]


def test_used_up_mixture_is_rejected():
    with pytest.raises(
        DataError, match=r"max_repetitions=1.0: is reached by all .* after 17 of 50"
    ):
        build_order([(0.0, WEIGHTS)], dict.fromkeys(SIZES, 1.0))
    stages = [(0.0, WEIGHTS), (0.9, {"a": 0.0, "b": 1.0, "c": 0.0})]
    with pytest.raises(DataError, match=r"sources.b.max_repetitions=1.0.*or trainer.max_steps=45"):
        build_order(stages, {"b": 1.0})


def test_order_differs_by_seed():
    orders = [all_indices(build_order([(0.0, WEIGHTS)], seed=seed)).tolist() for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert sources_of(orders[0]).tolist() != sources_of(orders[1]).tolist()


def test_order_does_not_depend_on_the_global_batch():
    stages = [(0.0, WEIGHTS)]
    small = all_indices(build_order(stages, global_batch=8, steps=50))
    large = all_indices(build_order(stages, global_batch=20, steps=20), 20, 20)
    np.testing.assert_array_equal(small, large)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 2), (2, 4), (2, 1), (3, 2), (4, 1), (5, 3)])
def test_samples_of_a_step_do_not_depend_on_the_strategy(ranks, micro_batch):
    stages = {"late": MixtureStage(0.5, {"b": 3.0})}
    loaders = [
        iter(mixture_loader(ranks, rank, micro_batch, stages=stages)) for rank in range(ranks)
    ]
    for number, expected in enumerate(mixture_loader(stages=stages)):
        tokens = [
            batch["inputs"][(batch["labels"] >= 0).all(1)]
            for _ in range(-(-8 // (ranks * micro_batch)))
            for batch in map(next, loaders)
        ]
        assert torch.equal(torch.cat(tokens), expected["inputs"]), number
    assert all(next(loader, None) is None for loader in loaders)


@pytest.mark.parametrize("num_batches", [1, 10, 19])
def test_resumed_mixture_reads_the_remaining_samples(num_batches):
    batches = [*mixture_loader()]
    loader = mixture_loader()
    for _ in zip(range(num_batches), loader, strict=False):
        pass
    resumed = mixture_loader()
    resumed.load_state_dict(loader.state_dict() | {"micro_steps": num_batches})
    for name, other in (("started", mixture_loader(start=num_batches)), ("loaded", resumed)):
        remaining = [*other]
        assert len(remaining) == 20 - num_batches, name
        for batch, expected in zip(remaining, batches[num_batches:], strict=True):
            assert torch.equal(batch["inputs"], expected["inputs"]), name


def test_temperature_flattens_the_weights():
    source = RandomTokens(sequence=SEQUENCE)
    mixture = MixtureData(
        sources={name: MixtureSource(source) for name in SIZES},
        stages={"late": MixtureStage(0.5, {"a": 9.0, "b": 4.0, "c": 1.0})},
        temperature=2.0,
    )
    (_, first), (start, late) = mixture.stage_weights(SIZES)
    np.testing.assert_allclose([*first.values()], np.sqrt([30, 7, 100]))
    assert (start, late) == (0.5, {"a": 3.0, "b": 2.0, "c": 1.0})
