"""The ring model, and the link that is fitted to measured times."""

import random

import pytest

from scalewise.bench.link_fit import CollectiveSample, fit_link, link_error
from scalewise.parallelism.collective import (
    CollectiveKind,
    RingLink,
    bytes_per_link_fraction,
    num_hops,
)

KINDS = (
    CollectiveKind.all_reduce,
    CollectiveKind.all_gather,
    CollectiveKind.reduce_scatter,
    CollectiveKind.all_to_all,
    CollectiveKind.send,
)
SIZES = tuple(1024 * 4**power for power in range(9))
LINK = RingLink(latency_s=20e-6, bytes_per_s=3e9)


def samples(
    link: RingLink, ranks: int, noise: float = 0.0, seed: int = 1
) -> list[CollectiveSample]:
    rng = random.Random(seed)
    return [
        CollectiveSample(
            kind, ranks, size, link.seconds(kind, ranks, size) * rng.lognormvariate(0, noise)
        )
        for kind in KINDS
        for size in SIZES
    ]


def fit_samples(measurements: list[CollectiveSample]) -> RingLink:
    link = fit_link(measurements)
    assert link is not None
    return link


@pytest.mark.parametrize(
    ("kind", "messages", "fraction"),
    [
        (CollectiveKind.all_reduce, 6, 1.5),
        (CollectiveKind.all_gather, 3, 0.75),
        (CollectiveKind.reduce_scatter, 3, 0.75),
        (CollectiveKind.all_to_all, 3, 0.75),
        (CollectiveKind.send, 1, 1.0),
        (CollectiveKind.broadcast, 3, 1.0),
    ],
)
def test_ring_model_of_four_ranks(kind: CollectiveKind, messages: int, fraction: float) -> None:
    assert (num_hops(kind, 4), bytes_per_link_fraction(kind, 4)) == (messages, fraction)


def test_ring_model_of_all_reduce() -> None:
    assert LINK.seconds(CollectiveKind.all_reduce, 2, 3_000_000) == pytest.approx(2 * 20e-6 + 1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_link_fit_recovers_exact_times(ranks: int) -> None:
    link = fit_samples(samples(LINK, ranks))
    assert link.latency_s == pytest.approx(LINK.latency_s, rel=1e-6)
    assert link.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-6)
    assert link_error(link, samples(LINK, ranks)) < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_link_fit_is_robust_to_noise(seed: int) -> None:
    noisy_samples = samples(LINK, 4, noise=0.1, seed=seed)
    # Three of ten measurements are outliers.
    noisy_samples = [
        CollectiveSample(s.kind, s.ranks, s.bytes, s.seconds * (4 if index % 10 < 3 else 1))
        for index, s in enumerate(noisy_samples)
    ]
    link = fit_samples(noisy_samples)
    assert link.latency_s == pytest.approx(LINK.latency_s, rel=0.15)
    assert link.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=0.15)


def test_link_fit_of_large_messages_has_no_latency() -> None:
    large_samples = [
        CollectiveSample(CollectiveKind.send, 2, size, size / 1e9 * 0.999)
        for size in (2**24, 2**26)
    ]
    link = fit_samples(
        [*large_samples, CollectiveSample(CollectiveKind.send, 2, 2**25, 2**25 / 1.1e9)]
    )
    assert link.latency_s >= 0
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_link_fit_rejects_constant_times() -> None:
    assert (
        fit_link([CollectiveSample(CollectiveKind.send, 2, size, 1e-3) for size in SIZES]) is None
    )
