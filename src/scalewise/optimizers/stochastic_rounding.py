"""Stochastic rounding of bf16 parameters, whose updates are computed in fp32."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from scalewise.models.init import local_tensor
from scalewise.optimizers.base import ROUNDED_ELEMENTS
from scalewise.optimizers.implementations import evaluate_closure

COUNTER = "rounding_step"
"""Key of the number of steps in the parameter groups, which checkpoints store."""
NOISE_BITS = 16
"""Mantissa bits of fp32 that bf16 does not have."""


class StochasticRoundingOptimizer(Optimizer):
    """Optimizer that computes each update in fp32 and rounds the parameter stochastically.

    Parameter, gradient and state are cast to fp32, one parameter at a time, or ``ROUNDED_ELEMENTS``
    of them. State is stored in the data type of the parameter, rounded to nearest. The random
    numbers depend on the seed, the step, the name of the parameter and the index of its shard, so
    that replicas stay equal and a resumed run repeats them.

    Args:
        rule: Optimizer whose update is applied; it shares its parameter groups and has no state.
        names: Name of each parameter.
        seed: Seed of the run.
        elementwise: Whether ``rule`` updates each element by itself.
    """

    def __init__(
        self, rule: Optimizer, names: Mapping[nn.Parameter, str], seed: int, *, elementwise: bool
    ) -> None:
        super().__init__(rule.param_groups, {COUNTER: 0})
        self._rule, self._elementwise = rule, elementwise
        self._keys = {
            parameter: f"{seed}/{name}/{shard_index(parameter)}"
            for parameter, name in names.items()
        }
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, update all parameters, and return the closure's result."""
        loss = evaluate_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, parameter.grad, group)
            group[COUNTER] += 1
        return loss

    def _step_parameter(
        self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]
    ) -> None:
        target = parameter.detach()
        generator = self._seeded_generator(parameter, group[COUNTER])
        earlier_state = dict(self.state[parameter])
        chunks = zip(self._split(target), self._split(gradient), strict=True)
        for index, (weights, gradients) in enumerate(chunks):
            values = weights.float()
            values.grad = gradients.float()
            self._apply_rule(values, group, parameter, earlier_state, index)
            values.grad = None
            if weights.dtype is torch.bfloat16:
                round_to_bf16(values, generator)
            weights.copy_(values)

    def _apply_rule(
        self,
        values: Tensor,
        group: dict[str, Any],
        parameter: nn.Parameter,
        earlier_state: Mapping[str, Any],
        index: int,
    ) -> None:
        """Update a chunk of a parameter in fp32, and store its state.

        ``earlier_state``: state before the step, whose tensors are updated chunk by chunk.
        """
        state, rule = self.state[parameter], self._rule
        chunk_state = {
            slot: self._split(value)[index].float() if value.ndim else value.clone()
            for slot, value in earlier_state.items()
        }
        rule.param_groups = [group | {"params": [values]}]
        rule.state = defaultdict(dict, {values: chunk_state})
        rule.step()
        for slot, value in rule.state[values].items():
            if not value.ndim:
                state[slot] = value
                continue
            if slot not in state:
                like = parameter.detach() if self._elementwise else value
                state[slot] = torch.empty_like(like, dtype=parameter.dtype)
            self._split(state[slot])[index].copy_(value)
        rule.param_groups, rule.state = [], defaultdict(dict)

    def _split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Chunks of this rank's shard; the whole tensor if the rule is not elementwise."""
        local = local_tensor(tensor)
        return local.view(-1).split(ROUNDED_ELEMENTS) if self._elementwise else (local,)

    def _seeded_generator(self, parameter: nn.Parameter, step: int) -> torch.Generator:
        device = local_tensor(parameter).device
        if device not in self._generators:
            # A traced run has CUDA tensors that are fake, in a build without CUDA.
            has_device = device.type != "cuda" or torch.backends.cuda.is_built()
            self._generators[device] = torch.Generator(device if has_device else "cpu")
        text = f"{self._keys[parameter]}/{step}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return self._generators[device].manual_seed(int.from_bytes(digest, "big") >> 1)


def shard_index(parameter: Tensor) -> tuple[int, ...]:
    """Index of this rank's shard along each sharded mesh dimension; equal for replicas."""
    if not isinstance(parameter, DTensor):
        return ()
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    placements = zip(coordinate, parameter.placements, strict=True)
    return tuple(index for index, placement in placements if placement.is_shard())


def round_to_bf16(values: Tensor, generator: torch.Generator) -> None:
    """Round fp32 values to a neighboring bf16 value each, stochastically and in place.

    The expectation of the rounded value is the value: 16 random bits are added to the bit pattern,
    and the last 16 bits are cleared (Zamirai et al., 2020). Infinities and NaN stay.
    """
    noise = torch.empty_like(values, dtype=torch.int32)
    noise.random_(0, 1 << NOISE_BITS, generator=generator)
    noise.masked_fill_(values.isnan(), 0)  # it would overflow into the sign of CUDA's NaN
    bits = values.view(torch.int32)
    bits.add_(noise).bitwise_and_(-1 << NOISE_BITS)
