"""What every optimizer answers: the state it holds for a weight, and how it treats each."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar

from scalewise.errors import ConfigIssue
from scalewise.models.base import Weight
from scalewise.precision import FloatFormat

if TYPE_CHECKING:
    from torch import Tensor, nn, optim

    from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class OptimizerConfig(ABC):
    """An optimizer as a spec."""

    lr: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices, multiplied by the learning rate at each step."""
    shard: bool = False
    """Whether data-parallel ranks partition the optimizer state (ZeRO-1); for parallelism=ddp."""
    in_backward: bool = False
    """Whether each parameter is updated during the backward pass and its gradient freed at once."""
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    """Factors of the learning rate by pattern (regex) of the parameter name."""
    no_decay: tuple[str, ...] = ()
    """Patterns (regex) of parameter names without weight decay; vectors, norms and biases never
    decay."""

    packages: ClassVar[tuple[str, ...]] = ()
    """What it needs beside torch."""
    elementwise = True
    """Whether it moves every number by itself, so that weights may come flattened and cut."""
    averages_weights = False
    """Whether it trains at one place and is judged at another, an average of its way."""
    uses_whole_weights = False
    """Whether it looks at matrices as such, so that a rank must have them whole."""
    gathers_shards = False
    """Whether it gathers those from their shards by itself."""
    offload = False
    """Whether its state lies in host memory, where it steps."""
    pages_state = False
    """Whether its state goes to host memory, piece by piece, where the device has no room."""

    @abstractmethod
    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Returns the bytes of state for what one of ``shards`` ranks has of a weight.

        ``element_bytes``: bytes of a number of the weight.
        """

    def gathers_update(self, weight: Weight) -> bool:
        """Returns whether it gathers a weight's update from the shards of it."""
        return False

    def average_weights(
        self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns the weights to judge, of those trained and the state, both by name."""
        return dict(weights)

    def scratch_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Returns the bytes that stepping a weight takes on the CPU for as long as it lasts.

        0 stands for less than the gradients take that backward has just made.
        """
        return 0

    @abstractmethod
    def build_from_groups(self, groups: Iterable[dict[str, Any]]) -> optim.Optimizer:
        """Returns the torch optimizer over parameter groups."""

    def build(self, named_weights: Iterable[tuple[Weight, nn.Parameter]]) -> optim.Optimizer:
        """Returns the torch optimizer over the parameters that require a gradient."""
        return self.build_from_groups(self.build_parameter_groups(named_weights))

    def build_parameter_groups(
        self, named_weights: Iterable[tuple[Weight, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        """Returns parameter groups, one for all weights of the same settings.

        Stepped in backward, each weight is one of its own.
        """
        alike: dict[tuple[object, ...], list[nn.Parameter]] = {}
        settings: dict[tuple[object, ...], dict[str, object]] = {}
        for weight, parameter in named_weights:
            if parameter.requires_grad:
                found = self.group_settings(weight)
                key = (*found.items(), weight.name * self.in_backward)
                alike.setdefault(key, []).append(parameter)
                settings[key] = found
        return [{"params": alike[key], **settings[key]} for key in alike]

    def group_settings(self, weight: Weight) -> dict[str, object]:
        """Returns what a weight's group says: its rate and its decay."""
        spared = any(re.search(pattern, weight.name) for pattern in self.no_decay)
        decays = len(weight.shape) >= 2 and weight.role != "scale" and not spared
        factor = 1.0
        for pattern, by in self.lr_factors.items():
            if re.search(pattern, weight.name):
                factor *= by
        return {"lr": self.lr * factor, "weight_decay": self.weight_decay if decays else 0.0}

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields rates that cannot train and patterns that cannot be read."""
        if not (isfinite(self.lr) and self.lr > 0):
            yield ConfigIssue("optimizer.lr", self.lr, "must be a positive number")
        if not (isfinite(self.weight_decay) and self.weight_decay >= 0):
            yield ConfigIssue("optimizer.weight_decay", self.weight_decay, "must be 0 or more")
        for key, patterns in (("lr_factors", self.lr_factors), ("no_decay", self.no_decay)):
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield ConfigIssue(f"optimizer.{key}", pattern, f"is no pattern: {error}")
        for pattern, factor in self.lr_factors.items():
            if not (isfinite(factor) and factor >= 0):
                key = f"optimizer.lr_factors.{pattern}"
                yield ConfigIssue(key, factor, "must be 0 or more", "leave the weights out of it")

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields patterns that no trained weight bears, and what a step in backward comes before.

        A layout says for itself whether a gradient is whole by then.
        """
        if self.in_backward:
            yield from self._validate_in_backward(run)
        names = [weight.name for weight in run.weight_census() if weight.trainable]
        for key, patterns in (("lr_factors", self.lr_factors), ("no_decay", self.no_decay)):
            for pattern in patterns:
                if not any(re.search(pattern, name) for name in names):
                    reason = "is found in no name of a trained weight"
                    fix = f"the first are {', '.join(names[:3])}" if names else ""
                    yield ConfigIssue(f"optimizer.{key}", pattern, reason, fix)

    def _validate_in_backward(self, run: RunConfig) -> Iterator[ConfigIssue]:
        key = "optimizer.in_backward"
        if run.accumulation > 1:
            reason = f"steps before the gradients of {run.accumulation} micro batches are summed up"
            fix = f"set trainer.global_batch={run.samples_per_forward}"
            yield ConfigIssue(key, True, reason, fix)
        if run.trainer.clip_norm is not None:
            reason = "steps before the norm of the whole gradient is known"
            yield ConfigIssue(key, True, reason, "set trainer.clip_norm=null")
        if run.precision.compute is FloatFormat.fp16:
            reason = "steps before a scaled gradient is known to be finite"
            yield ConfigIssue(key, True, reason, "set precision=bf16_mixed")
        if self.averages_weights:
            reason = "would count the steps of weights that have none"
            yield ConfigIssue(key, True, reason, "set optimizer=adamw")

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yields packages that are not installed."""
        for package in self.packages:
            if find_spec(package) is None:
                reason = f"needs {package}, which is not installed"
                fix = "pip install 'scalewise[optimizers]'"
                yield ConfigIssue("optimizer", type(self).__name__, reason, fix)


@dataclass(frozen=True)
class FixedStateOptimizerConfig(OptimizerConfig):
    """An optimizer that holds whole numbers of state for each number of a weight."""

    @property
    @abstractmethod
    def state_slots(self) -> int:
        """Returns how many numbers of state are held for each parameter."""

    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Returns the bytes of ``state_slots`` numbers in the format of the weight."""
        return self.state_slots * weight.shard_numel(shards) * element_bytes


def betas_issues(optimizer: OptimizerConfig, *keys: str) -> Iterator[ConfigIssue]:
    """Yields decays of moments that are not in [0, 1)."""
    for key in keys:
        value = getattr(optimizer, key)
        if not 0 <= value < 1:
            yield ConfigIssue(f"optimizer.{key}", value, "must be in [0, 1)")
