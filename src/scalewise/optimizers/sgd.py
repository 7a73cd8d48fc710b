"""Configs of optimizers with at most one state element per parameter element: SGD and Lion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.errors import ConfigIssue
from scalewise.optimizers.base import FixedStateOptimizerConfig, betas_issues
from scalewise.registry import register_option


@register_option("optimizer", "sgd")
@dataclass(frozen=True)
class SGDConfig(FixedStateOptimizerConfig):
    """Stochastic gradient descent with momentum."""

    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Decay rate of the momentum; 0: no momentum and no state."""
    nesterov: bool = False
    """Whether Nesterov momentum is used."""
    weight_decay: float = 0.0
    """L2 penalty that is added to the gradient of matrices."""

    implementation = "scalewise.optimizers.implementations"

    @property
    def state_slots(self) -> int:
        """1 with momentum, else 0."""
        return 1 if self.momentum else 0

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues with values out of range, and with Nesterov without momentum."""
        yield from super().validate()
        yield from betas_issues(self, "momentum")
        if self.nesterov and not self.momentum:
            yield ConfigIssue(
                "optimizer.nesterov", True, "requires momentum", "set optimizer.momentum=0.9"
            )


@register_option("optimizer", "lion")
@dataclass(frozen=True)
class LionConfig(FixedStateOptimizerConfig):
    """Lion: the sign of an interpolated momentum (Chen et al., 2023).

    Use a third of AdamW's learning rate or less.
    """

    lr: float = 1e-4
    """Peak learning rate: the change of each parameter per step."""
    beta1: float = 0.9
    """Weight of the momentum in the update."""
    beta2: float = 0.99
    """Decay rate of the momentum."""

    implementation = "scalewise.optimizers.implementations"

    @property
    def state_slots(self) -> int:
        """1: the momentum."""
        return 1

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each hyperparameter out of range."""
        yield from super().validate()
        yield from betas_issues(self, "beta1", "beta2")
