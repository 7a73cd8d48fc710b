"""Optimizers that hold one number for each parameter, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.optimizers.base import Slotted, betas_complaints

if TYPE_CHECKING:
    from torch import optim


@option("optimizer", "sgd")
@dataclass(frozen=True)
class SGD(Slotted):
    """Stochastic gradient descent with momentum: the honest judge of gradient scale."""

    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Decay of the velocity; 0 holds no state."""
    nesterov: bool = False
    """Whether the gradient is taken at the place momentum leads to."""
    weight_decay: float = 0.0
    """L2 term added to the gradient of matrices."""

    @property
    def slots(self) -> int:
        """Returns 1 with momentum, else 0."""
        return 1 if self.momentum else 0

    def complaints(self) -> Iterator[Complaint]:
        """Yields rates out of range and Nesterov without momentum."""
        yield from super().complaints()
        yield from betas_complaints(self, "momentum")
        if self.nesterov and not self.momentum:
            yield Complaint(
                "optimizer.nesterov", True, "needs momentum", "set optimizer.momentum=0.9"
            )

    def over(self, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
        """Returns torch's SGD."""
        from torch import optim

        return optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


@option("optimizer", "lion")
@dataclass(frozen=True)
class Lion(Slotted):
    """The sign of an interpolated momentum (Chen et al., 2023): a third of AdamW's rate or less."""

    lr: float = 1e-4
    """Peak learning rate: what every number moves by in a step."""
    beta1: float = 0.9
    """Share of the momentum in the update."""
    beta2: float = 0.99
    """Decay of the momentum."""

    @property
    def slots(self) -> int:
        """Returns 1: the momentum."""
        return 1

    def complaints(self) -> Iterator[Complaint]:
        """Yields rates and decays out of range."""
        yield from super().complaints()
        yield from betas_complaints(self, "beta1", "beta2")

    def over(self, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
        """Returns a Lion."""
        from scalewise.optimizers import stepping

        return stepping.Lion(groups, lr=self.lr, betas=(self.beta1, self.beta2))
