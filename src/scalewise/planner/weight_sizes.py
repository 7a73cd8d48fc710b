"""Elements and bytes of groups of weights, sharded over ranks.

Cached: the peak points of all runs of a search read the same few sums.
"""

from __future__ import annotations

from functools import lru_cache

from scalewise.models.base import Weight
from scalewise.optimizers import OptimizerConfig


@lru_cache(maxsize=4096)
def multiples(step: int, count: int) -> tuple[int, ...]:
    """Return 0, 1, ... ``count`` times ``step``."""
    return tuple(index * step for index in range(count + 1))


@lru_cache(maxsize=4096)
def shard_elements(weights: tuple[Weight, ...], ranks: int = 1, *, trained: bool = False) -> int:
    """Return the elements of one of ``ranks`` shards, sharded along the first dimension."""
    return sum(weight.shard_numel(ranks) for weight in weights if weight.trainable or not trained)


@lru_cache(maxsize=4096)
def shard_bytes(weights: tuple[Weight, ...], element_bytes: int, ranks: int = 1) -> int:
    """Return the size of one of ``ranks`` shards, in bytes."""
    return sum(weight.shard_bytes(element_bytes, ranks) for weight in weights)


@lru_cache(maxsize=4096)
def gathered_bytes(weights: tuple[Weight, ...], element_bytes: int, ranks: int) -> int:
    """Return the size of weights that ``ranks`` ranks gather from equal shards, in bytes."""
    return sum(w.shard_bytes(element_bytes, ranks) * w.num_shards(ranks) for w in weights)


@lru_cache(maxsize=4096)
def all_gather_bytes(weights: tuple[Weight, ...], element_bytes: int, ranks: int) -> int:
    """Return the size of those weights that are gathered from more than one shard, in bytes."""
    return sum(
        w.shard_bytes(element_bytes, ranks) * shards
        for w in weights
        if (shards := w.num_shards(ranks)) > 1
    )


@lru_cache(maxsize=4096)
def padded_elements(weights: tuple[Weight, ...], ranks: int) -> int:
    """Return the elements of trained weights, padded to equal shards of ``ranks`` ranks."""
    return sum(w.shard_numel(ranks) * w.num_shards(ranks) for w in weights if w.trainable)


@lru_cache(maxsize=4096)
def state_bytes(
    optimizer: OptimizerConfig, weights: tuple[Weight, ...], shards: int, element_bytes: int
) -> int:
    """Return the size of the optimizer state of one of ``shards`` shards, in bytes."""
    trained = (weight for weight in weights if weight.trainable)
    return sum(optimizer.state_bytes(weight, shards, element_bytes) for weight in trained)
