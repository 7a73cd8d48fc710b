"""Config of schedule-free AdamW."""

from __future__ import annotations

from dataclasses import dataclass

from scalewise.optimizers.adam import AdamBase
from scalewise.optimizers.base import FixedStateOptimizerConfig
from scalewise.registry import register_option


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

    implementation = "scalewise.optimizers.implementations"
    packages = ("schedulefree",)
    elementwise = False
    averages_weights = True

    @property
    def state_slots(self) -> int:
        """2: the iterate z, and the second moment."""
        return 2
