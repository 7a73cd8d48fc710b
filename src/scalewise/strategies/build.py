"""Construction of the Lightning strategy of a parallelism config."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from scalewise.hardware import DeviceKind
from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.parallelism.base import ParallelismConfig

if TYPE_CHECKING:
    from scalewise.strategies.base import ParallelStrategy


@lazy_dispatch
def build_strategy(
    config: ParallelismConfig, device: DeviceKind, timeout: timedelta
) -> ParallelStrategy:
    """Build the Lightning strategy of ``config``, in the process of a rank.

    A strategy registers a function for its config in the module that ``config.implementation``
    names.

    Args:
        config: Config of the parallelism.
        device: Kind of the rank's device.
        timeout: Timeout of the collectives of the process group.
    """
    raise not_registered(build_strategy, config)
