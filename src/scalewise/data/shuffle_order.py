"""Shuffle order of samples: a pure function of seed and step, so that resuming needs no state."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def epoch_permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of ``num_samples`` samples in an epoch.

    This is the sorting order of the raw output of Philox, which is stable over all NumPy versions,
    unlike ``Generator.permutation``. Peak memory is 16 bytes per sample, then 8.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")


class ShuffleOrder:
    """Sample indices of every step: the permutations of all epochs, one after the other.

    Sample j of the global batch of step s is at position ``s * global_batch + j`` of that sequence.
    No sample is dropped, and the samples of a step do not depend on the number of ranks. ``seed``
    None is the stored order.
    """

    def __init__(self, num_samples: int, seed: int | None, global_batch: int) -> None:
        if num_samples < 1 or global_batch < 1:
            raise ValueError(f"{num_samples} samples cannot fill a global batch of {global_batch}")
        self._num_samples, self._seed, self._global_batch = num_samples, seed, global_batch
        # Two: a batch across the end of an epoch alternates between both.
        self._permutation = lru_cache(maxsize=2)(epoch_permutation)

    def indices(self, step: int, first: int, count: int) -> NDArray[np.int64]:
        """Return ``index_B``, the samples at ``count`` positions of a step's global batch."""
        first += step * self._global_batch
        epoch, position = divmod(first, self._num_samples)
        if position + count <= self._num_samples:
            return self._epoch_indices(epoch, np.arange(position, position + count))
        epoch_B, position_B = np.divmod(np.arange(first, first + count), self._num_samples)
        parts = [self._epoch_indices(int(e), position_B[epoch_B == e]) for e in np.unique(epoch_B)]
        return np.concatenate(parts)

    def _epoch_indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._seed is None:
            return positions
        return self._permutation(self._num_samples, self._seed, epoch)[positions]
