"""Base class of optimizer configs: optimizer state, parameter groups and validation."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import isfinite
from typing import ClassVar

from scalewise.errors import ConfigIssue
from scalewise.models.base import Weight
from scalewise.optimizers.lr_transfer import LRTransfer, UpdateScale, mup_lr_factor

ROUNDED_ELEMENTS = 1 << 24
"""Largest number of elements that stochastic rounding updates at once: 64 MiB in fp32."""
FP32_BYTES = 4
ROUNDING_BYTES = 9
"""Temporary bytes per rounded element: its value, random bits, and whether it is NaN."""
ROUNDING_TRAFFIC = 68
"""Bytes per element that an fp32 update with stochastic rounding reads and writes without state."""
STATE_TRAFFIC = 20
"""Bytes per state element: two casts, and the update in fp32."""


@dataclass(frozen=True)
class OptimizerConfig(ABC):
    """Config of an optimizer."""

    lr: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices, multiplied by the learning rate at each step."""
    shard: bool = False
    """Whether data-parallel ranks partition the optimizer state (ZeRO-1); for parallelism=ddp."""
    in_backward: bool = False
    """Whether each parameter is updated during the backward pass and its gradient freed at once."""
    lr_factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Factors of the learning rate by pattern (regex) of the parameter name."""
    no_decay: tuple[str, ...] = ()
    """Patterns (regex) of parameter names without weight decay; vectors, norms and biases never
    decay."""
    lr_transfer: LRTransfer = LRTransfer.none
    """How the learning rate of each parameter follows from that of a model of width
    ``model.base_width``."""

    implementation: ClassVar[str] = ""
    """Module that registers the functions of ``optimizers.build`` for the config."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that the optimizer requires besides torch."""
    elementwise = True
    """Whether each element is updated by itself, so that parameters may be flattened and
    partitioned."""
    averages_weights = False
    """Whether validation uses an average of the trained weights."""
    uses_whole_weights = False
    """Whether updates depend on whole matrices, so that a rank needs them unsharded."""
    gathers_shards = False
    """Whether the optimizer gathers sharded matrices itself."""
    offload = False
    """Whether state is stored, and parameters updated, in host memory."""
    pages_state = False
    """Whether state is paged to host memory when the device is full."""
    update_scale: ClassVar[UpdateScale | None] = None
    """Dependence of updates on the scale of gradients; None: ``lr_transfer`` has no rule."""

    @property
    def supports_stochastic_rounding(self) -> bool:
        """Whether ``precision.stochastic_rounding`` can compute the update in fp32."""
        return False

    @abstractmethod
    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of optimizer state for the shard of a parameter on one of ``shards`` ranks.

        ``element_bytes``: bytes per element of the parameter.
        """

    def distributes_update(self, weight: Weight) -> bool:
        """Whether data-parallel ranks divide the updates of such matrices among them."""
        return False

    def scratch_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of temporary tensors on the CPU during the update of a parameter.

        0: less than the gradients that the backward pass has just freed.
        """
        return 0

    def rounding_scratch_bytes(self, weight: Weight, shards: int) -> int:
        """Bytes of temporary tensors of an fp32 update with ``precision.stochastic_rounding``."""
        return 0

    def rounding_traffic_bytes(self, elements: int) -> int:
        """Bytes that the updates of ``elements`` with stochastic rounding read and write."""
        return ROUNDING_TRAFFIC * elements

    def group_settings(self, weight: Weight) -> dict[str, object]:
        """Settings of the group of a parameter: learning rate and weight decay.

        ``lr_transfer`` changes both, so that their product is that of the base model.
        """
        is_excluded = any(re.search(pattern, weight.name) for pattern in self.no_decay)
        decays = len(weight.shape) >= 2 and weight.role != "scale" and not is_excluded
        factor = 1.0
        for pattern, pattern_factor in self.lr_factors.items():
            if re.search(pattern, weight.name):
                factor *= pattern_factor
        transfer = 1.0
        if self.lr_transfer is LRTransfer.mup and self.update_scale is not None:
            transfer = mup_lr_factor(weight, self.update_scale)
        return {
            "lr": self.lr * factor * transfer,
            "weight_decay": self.weight_decay / transfer if decays else 0.0,
        }

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each value out of range and each invalid pattern."""
        if not (isfinite(self.lr) and self.lr > 0):
            yield ConfigIssue("optimizer.lr", self.lr, "must be a positive number")
        if not (isfinite(self.weight_decay) and self.weight_decay >= 0):
            yield ConfigIssue("optimizer.weight_decay", self.weight_decay, "must be 0 or more")
        for key, patterns in (("lr_factors", self.lr_factors), ("no_decay", self.no_decay)):
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield ConfigIssue(
                        f"optimizer.{key}", pattern, f"is not a valid regular expression: {error}"
                    )
        for pattern, factor in self.lr_factors.items():
            if not (isfinite(factor) and factor >= 0):
                key = f"optimizer.lr_factors.{pattern}"
                yield ConfigIssue(
                    key, factor, "must be 0 or more", "set it to 0 or more, or remove the pattern"
                )

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each missing package."""
        for package in self.packages:
            if find_spec(package) is None:
                reason = f"requires {package}, which is not installed"
                fix = "pip install 'scalewise[optimizers]'"
                yield ConfigIssue("optimizer", type(self).__name__, reason, fix)


@dataclass(frozen=True)
class FixedStateOptimizerConfig(OptimizerConfig):
    """Config of an optimizer with a fixed number of state elements per parameter element."""

    @property
    @abstractmethod
    def state_slots(self) -> int:
        """State elements per parameter element."""

    @property
    def supports_stochastic_rounding(self) -> bool:
        """Whether each element is updated by itself, on the device."""
        return self.elementwise and not self.offload

    @property
    def update_tensors(self) -> int:
        """Temporary tensors of an update, in tensors of the size of the parameter."""
        return 0

    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of the state, in the data type of the parameter."""
        return self.state_slots * weight.shard_numel(shards) * element_bytes

    def rounding_scratch_bytes(self, weight: Weight, shards: int) -> int:
        """Bytes of parameter, gradient, state and temporary tensors in fp32."""
        num_tensors = 2 + self.state_slots + self.update_tensors
        elements = min(weight.shard_numel(shards), ROUNDED_ELEMENTS)
        return elements * max(num_tensors * FP32_BYTES, ROUNDING_BYTES)

    def rounding_traffic_bytes(self, elements: int) -> int:
        """Bytes that the updates of ``elements`` with stochastic rounding read and write."""
        return (ROUNDING_TRAFFIC + STATE_TRAFFIC * self.state_slots) * elements


def betas_issues(optimizer: OptimizerConfig, *keys: str) -> Iterator[ConfigIssue]:
    """Yield an issue for each decay rate that is not in [0, 1)."""
    for key in keys:
        value = getattr(optimizer, key)
        if not 0 <= value < 1:
            yield ConfigIssue(f"optimizer.{key}", value, "must be in [0, 1)")
