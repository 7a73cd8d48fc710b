"""Rolling statistics of optimizer steps: skipped loss spikes, and clipping at a percentile."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import fsum, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from scalewise.errors import ScalewiseError

MAX_NORM = torch.finfo(torch.float32).max
"""Value of a gradient norm that is not finite, in a window."""


class TrainingDiverged(ScalewiseError):  # noqa: N818 (names the event, as torch's errors do)
    """The loss is NaN or infinite, or stays far above its recent values."""


class SpikeDetector:
    """Decides which optimizer steps are skipped, from the losses and gradient norms of all ranks.

    A step is a spike if its loss or its gradient norm is not finite, or above the mean of the last
    steps by more than ``sigma`` standard deviations, as in OLMo-core's ``SkipStepOptimizer``. Steps
    are compared once half of the window is filled. Skipped steps are not part of the window.

    Args:
        sigma: Number of standard deviations.
        window: Largest number of steps that are compared with.
        max_skipped: Number of consecutive skipped steps that stops the run.
        skips_infinite: Whether a gradient norm that is not finite is a spike; the gradient scaler
            of fp16 skips these steps by itself.
    """

    def __init__(
        self, sigma: float, window: int, max_skipped: int, *, skips_infinite: bool = True
    ) -> None:
        self._sigma, self._max_skipped, self._skips_infinite = sigma, max_skipped, skips_infinite
        self._min_steps = max(2, window // 2)
        self._values: deque[tuple[float, float]] = deque(maxlen=window)
        self._num_consecutive = 0
        self.num_skipped = 0
        """Number of steps skipped so far."""

    def is_spike(self, step: int, loss: float, norm: float) -> bool:
        """Whether a step is skipped; adds it to the window otherwise.

        Raises:
            TrainingDiverged: Too many consecutive steps were skipped.
        """
        if not isfinite(norm) and not self._skips_infinite:
            return False
        losses, norms = zip(*self._values, strict=True) if self._values else ((), ())
        limits = self._upper_limit(losses), self._upper_limit(norms)
        if isfinite(loss + norm) and loss <= limits[0] and norm <= limits[1]:
            self._values.append((loss, norm))
            self._num_consecutive = 0
            return False
        self.num_skipped += 1
        self._num_consecutive += 1
        if self._num_consecutive >= self._max_skipped:
            raise TrainingDiverged(
                f"step {step} is consecutive skipped step number {self._num_consecutive}: its loss "
                f"is {loss:.4g} (limit {limits[0]:.4g}) and its gradient norm {norm:.4g} (limit "
                f"{limits[1]:.4g}); lower optimizer.lr, or raise trainer.skip_sigma or "
                "trainer.max_skipped_steps"
            )
        return True

    def _upper_limit(self, values: Sequence[float]) -> float:
        """Mean plus ``sigma`` standard deviations; infinite while there are too few values."""
        if len(values) < self._min_steps:
            return float("inf")
        mean = fsum(values) / len(values)
        variance = fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return mean + self._sigma * sqrt(variance)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "values": list(self._values),
            "num_consecutive": self._num_consecutive,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; a smaller window keeps its last steps."""
        self._values.extend((loss, norm) for loss, norm in state["values"])
        self._num_consecutive, self.num_skipped = state["num_consecutive"], state["num_skipped"]


class PercentileClipping:
    """Largest gradient norm as a percentile of the last norms (Seetharaman et al., 2020, AutoClip).

    The norms stay on the device.

    Args:
        percentile: Percentile, in (0, 100].
        window: Number of norms.
        max_norm: Largest norm until the window is full; None: no clipping.
    """

    def __init__(self, percentile: float, window: int, max_norm: float | None) -> None:
        self._fraction, self._size, self._max_norm = percentile / 100, window, max_norm
        self._norms = torch.zeros(window, device="cpu")
        self._count = 0

    def limit(self) -> Tensor | float | None:
        """Largest norm of the next step."""
        if self._count < self._size:
            return self._max_norm
        return torch.quantile(self._norms, self._fraction)

    def add(self, norm: Tensor) -> None:
        """Add the norm of a step before clipping, in place of the oldest one."""
        if self._norms.device != norm.device:
            self._norms = self._norms.to(norm.device)
        self._norms[self._count % self._size] = norm.float().nan_to_num(nan=MAX_NORM)
        self._count += 1

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the norms, oldest first."""
        norms = self._norms.tolist()
        start = self._count % self._size
        ordered = norms[start:] + norms[:start] if self._count > self._size else norms
        return {"norms": ordered[: self._count]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; a smaller window keeps its last norms."""
        norms = state["norms"][-self._size :]
        self._norms[: len(norms)] = torch.tensor(norms)
        self._count = len(norms)
