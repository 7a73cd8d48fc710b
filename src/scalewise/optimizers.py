"""How weights move: the slots an optimizer holds per parameter, and the optimizer itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from scalewise.config.registry import option
from scalewise.errors import Complaint

if TYPE_CHECKING:
    from torch import nn, optim


class Optimizer(ABC):
    """An optimizer as a spec."""

    lr: float
    weight_decay: float
    shard: bool

    @property
    @abstractmethod
    def slots(self) -> int:
        """Returns how many numbers of state are held for each parameter."""

    def build(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        """Returns the torch optimizer over the parameters that require a gradient."""
        return self.over(self.groups(parameters))

    @abstractmethod
    def over(self, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
        """Returns the torch optimizer over parameter groups."""

    def complaints(self) -> Iterator[Complaint]:
        """Yields rates that cannot train."""
        if not (isfinite(self.lr) and self.lr > 0):
            yield Complaint("optimizer.lr", self.lr, "must be a positive number")
        if not (isfinite(self.weight_decay) and self.weight_decay >= 0):
            yield Complaint("optimizer.weight_decay", self.weight_decay, "must be 0 or more")

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Returns parameter groups: matrices decay, vectors (norms, biases) do not."""
        trainable = [p for p in parameters if p.requires_grad]
        # ZeRO-3 leaves an empty vector in the place of each parameter, and its shape beside it.
        matrices = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) >= 2]
        vectors = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) < 2]
        groups = [(matrices, self.weight_decay), (vectors, 0.0)]
        return [{"params": held, "weight_decay": decay} for held, decay in groups if held]


@option("optimizer", "adamw")
@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    lr: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices, per step, times the learning rate."""
    fused: bool = True
    """One kernel for all parameters; torch's own default loops over them."""
    shard: bool = False
    """Whether ranks that hold the same weights share the state out (ZeRO-1); ``ddp`` alone."""

    @property
    def slots(self) -> int:
        """Returns 2: both moments."""
        return 2

    def complaints(self) -> Iterator[Complaint]:
        """Yields rates and decays out of range."""
        yield from super().complaints()
        for key in ("beta1", "beta2"):
            value = getattr(self, key)
            if not 0 <= value < 1:
                yield Complaint(f"optimizer.{key}", value, "must be in [0, 1)")
        if not self.epsilon > 0:
            yield Complaint("optimizer.epsilon", self.epsilon, "must be positive")

    def over(self, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
        """Returns torch's AdamW."""
        from torch import optim

        return optim.AdamW(
            groups,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            fused=self.fused,
        )


@option("optimizer", "sgd")
@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum: the honest judge of gradient scale."""

    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Decay of the velocity; 0 holds no state."""
    nesterov: bool = False
    """Whether the gradient is taken at the place momentum leads to."""
    weight_decay: float = 0.0
    """L2 term added to the gradient of matrices."""
    shard: bool = False
    """Whether ranks that hold the same weights share the state out (ZeRO-1); ``ddp`` alone."""

    @property
    def slots(self) -> int:
        """Returns 1 with momentum, else 0."""
        return 1 if self.momentum else 0

    def complaints(self) -> Iterator[Complaint]:
        """Yields rates out of range and Nesterov without momentum."""
        yield from super().complaints()
        if not 0 <= self.momentum < 1:
            yield Complaint("optimizer.momentum", self.momentum, "must be in [0, 1)")
        if self.nesterov and not self.momentum:
            yield Complaint(
                "optimizer.nesterov", True, "needs momentum", "set optimizer.momentum=0.9"
            )

    def over(self, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
        """Returns torch's SGD."""
        from torch import optim

        return optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)
