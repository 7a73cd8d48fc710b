"""Construction of the Lightning strategy of a parallelism config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalewise.hardware import DeviceKind
from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.parallelism.base import ParallelismConfig

if TYPE_CHECKING:
    from scalewise.strategies.base import ParallelStrategy


@lazy_dispatch
def build_strategy(config: ParallelismConfig, device: DeviceKind) -> ParallelStrategy:
    """Build the Lightning strategy of ``config``, in the process of a rank.

    ``device``: kind of the rank's device. A strategy registers a function for its config in the
    module that ``config.implementation`` names.
    """
    raise not_registered(build_strategy, config)
