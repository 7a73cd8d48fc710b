"""No parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import option
from scalewise.hardware import DeviceKind
from scalewise.parallelism.base import Parallelism

if TYPE_CHECKING:
    from scalewise.layouts.base import Layout
    from scalewise.parallelism.holds import Holds
    from scalewise.run import Run


@option("parallelism", "single")
@dataclass(frozen=True)
class Single(Parallelism):
    """One device, no communication."""

    offloads_optimizer = True

    @property
    def world_size(self) -> int:
        """Returns 1."""
        return 1

    @property
    def sums_late(self) -> bool:
        """Returns False."""
        return False

    def holds(self, run: Run, rank: int = 0) -> Holds:
        """Returns everything."""
        from scalewise.parallelism.holds import of_replicas

        return of_replicas(run)

    def strategy(self, device: DeviceKind) -> Layout:
        """Returns Lightning's single-device strategy."""
        from scalewise.layouts.single import SingleLayout

        return SingleLayout(device)
