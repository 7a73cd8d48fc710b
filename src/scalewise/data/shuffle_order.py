"""Which rows a rank reads at a step: a pure function, so that resuming is arithmetic."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def epoch_permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of ``num_samples`` rows in an epoch.

    The sorting order of Philox's raw numbers: NumPy promises that stream for all its versions,
    which it does not promise for ``Generator.permutation``. Costs 16 bytes per row, then 8.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")


class ShuffleOrder:
    """Row indices of every step: the permutations of the epochs, one after the other, endlessly.

    Place j of the global batch of step s is place ``s * global_batch + j`` of that sequence, so
    no row is ever dropped and the rows of a step do not depend on how ranks share them.
    ``seed`` None is the stored order.
    """

    def __init__(self, num_samples: int, seed: int | None, global_batch: int) -> None:
        if num_samples < 1 or global_batch < 1:
            raise ValueError(f"{num_samples} rows cannot fill a global batch of {global_batch}")
        self._num_samples, self._seed, self._global_batch = num_samples, seed, global_batch
        # Two: the batch that spans the end of an epoch asks for both by turns.
        self._permutation = lru_cache(maxsize=2)(epoch_permutation)

    def indices(self, step: int, first: int, count: int) -> NDArray[np.int64]:
        """Returns ``index_B``: the rows at ``count`` places of a step's global batch."""
        first += step * self._global_batch
        epoch, place = divmod(first, self._num_samples)
        if place + count <= self._num_samples:
            return self._epoch_indices(epoch, np.arange(place, place + count))
        epoch_B, place_B = np.divmod(np.arange(first, first + count), self._num_samples)
        parts = [self._epoch_indices(int(e), place_B[epoch_B == e]) for e in np.unique(epoch_B)]
        return np.concatenate(parts)

    def _epoch_indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._seed is None:
            return positions
        return self._permutation(self._num_samples, self._seed, epoch)[positions]
