"""Config of schedule-free AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from scalewise.errors import ConfigIssue
from scalewise.optimizers.adam import AdamBase
from scalewise.optimizers.base import FixedStateOptimizerConfig
from scalewise.registry import register_option

if TYPE_CHECKING:
    from torch import Tensor, optim

    from scalewise.run_config import RunConfig


@register_option("optimizer", "schedule_free")
@dataclass(frozen=True)
class ScheduleFreeConfig(AdamBase, FixedStateOptimizerConfig):
    """Schedule-free AdamW (Defazio et al., 2024), by the authors' package.

    Gradients are evaluated between the iterate and the average of all iterates; validation uses the
    average.
    """

    lr: float = 2.5e-3
    """Learning rate after the warm-up of ``schedule``."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices, multiplied by the learning rate at each step."""
    beta1: float = 0.9
    """Weight of the average at the point where gradients are evaluated."""
    beta2: float = 0.999
    """Decay rate of the second moment."""

    packages = ("schedulefree",)
    elementwise = False
    averages_weights = True

    @property
    def state_slots(self) -> int:
        """2: the iterate z, and the second moment."""
        return 2

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield issues with a decaying schedule and with sharded state."""
        yield from super().validate_with(run)
        if run.schedule.decays:
            option = run.choices.get("schedule", type(run.schedule).__name__.lower())
            reason = (
                "decays the learning rate, which optimizer=schedule_free requires to be constant"
            )
            yield ConfigIssue("schedule", option, reason, "set schedule=constant")
        if self.shard:
            reason = "is not supported with optimizers that average weights"
            yield ConfigIssue("optimizer.shard", True, reason, "set optimizer.shard=false")

    def average_weights(
        self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Average x, computed from the weights y = beta1 x + (1 - beta1) z and the state z."""
        import torch

        z_weight = 1 - 1 / self.beta1
        return {
            name: torch.lerp(y, state[f"z/{name}"].to(y.dtype), z_weight)
            if f"z/{name}" in state
            else y
            for name, y in weights.items()
        }

    def build_from_groups(self, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
        """Build the authors' AdamW, in training mode."""
        from schedulefree import AdamWScheduleFree

        optimizer: Any = AdamWScheduleFree(
            groups,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            foreach=False,  # foreach would take a copy of every parameter
        )
        optimizer.train()
        return cast("optim.Optimizer", optimizer)
