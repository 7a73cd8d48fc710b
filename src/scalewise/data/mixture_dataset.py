"""Datasets of several sources: concatenated, and mixed by weights."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from scalewise.data.mixture import MixtureData
from scalewise.data.mixture_order import MixtureOrder
from scalewise.data.prepare import TokenDataset
from scalewise.step_counts import StepCounts


class ConcatenatedDataset:
    """Samples of several datasets, one after the other."""

    streamed = False
    target_length = 0

    def __init__(self, sources: Mapping[str, TokenDataset]) -> None:
        self.sources = sources
        self.sizes = {name: len(source) for name, source in sources.items()}
        self.masked = any(source.masked for source in sources.values())
        self.packing = any(source.packing for source in sources.values())
        self._datasets = [*sources.values()]
        self._ends = np.cumsum([*self.sizes.values()], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``, the samples at ``indices``."""
        index_B = np.asarray(indices, dtype=np.int64)
        source_B = np.searchsorted(self._ends, index_B, side="right")
        parts = {
            source: self._datasets[source].gather(
                index_B[source_B == source] - self._ends[source] + len(self._datasets[source])
            )
            for source in np.unique(source_B)
        }
        tokens_BS = np.empty((len(index_B), next(iter(parts.values())).shape[1]), dtype=np.int64)
        for source, part in parts.items():
            tokens_BS[source_B == source] = part
        return tokens_BS


class MixtureDataset(ConcatenatedDataset):
    """Training samples of a mixture.

    Args:
        sources: Training samples of each source.
        config: Weights, stages and limits.
    """

    def __init__(self, sources: Mapping[str, TokenDataset], config: MixtureData) -> None:
        super().__init__(sources)
        self._stages = config.stage_weights(self.sizes)
        self._max_repetitions = {
            name: source.max_repetitions
            for name, source in config.sources.items()
            if source.max_repetitions is not None
        }

    @property
    def fill_ratio(self) -> float:
        """Fraction of positions that are not padding, by the weights of the first stage."""
        weights = self._stages[0][1]
        filled = sum(
            weights[name] * getattr(source, "fill_ratio", 1.0)
            for name, source in self.sources.items()
        )
        return filled / sum(weights.values())

    def build_order(self, seed: int, samples_per_step: StepCounts, steps: int) -> MixtureOrder:
        """Order of the samples in a training of ``steps`` optimizer steps."""
        return MixtureOrder(
            self.sizes,
            self._stages,
            self._max_repetitions,
            seed=seed,
            samples_per_step=samples_per_step,
            steps=steps,
        )
