"""Optimizer state as named tensors, such as ``exp_avg/blocks.0.weight``.

Names are the same for every parallelism strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

COUNTER_KEYS = ("k", "weight_sum", "lr_max", "train_mode", "rounding_step")
"""Counters in parameter groups: of schedule-free AdamW, and of stochastic rounding."""

SCALAR_SLOTS = ("step", "mu_product", "eta", "mu")
"""Slots of torch's optimizers that are scalars for parameters of any shape."""

Names = Mapping[nn.Parameter, str]


def state_tensors(optimizers: Sequence[Optimizer], names: Names) -> dict[str, Tensor]:
    """State tensors of this rank by name; scalars have one element."""
    for optimizer in optimizers:
        if hasattr(optimizer, "wait_for_state"):
            optimizer.wait_for_state()
    return {
        f"{slot}/{names[parameter]}": _unsharded_state(value)
        for optimizer, _, parameter in _optimized_parameters(optimizers)
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def allocate_state(
    optimizers: Iterable[Optimizer], names: Names, shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Tensors of zeros for the state of this rank's parameters, by name.

    Devices and data types are those that the optimizer's first step gives to its state.

    ``shapes``: shapes of the checkpoint's state tensors, by name.
    """
    slots: dict[str, list[str]] = {}
    for key in shapes:
        slot, _, name = key.partition("/")
        slots.setdefault(name, []).append(slot)
    states = {}
    for optimizer, group, parameter in _optimized_parameters(optimizers):
        name = names[parameter]
        device = getattr(optimizer, "state_device", parameter.device)
        dtype = getattr(optimizer, "state_dtype", parameter.dtype)
        for slot in slots.get(name, []):
            key = f"{slot}/{name}"
            if _is_scalar(slot, shapes[key], parameter):
                # Fused kernels read the step count on the device; other ones, on the host.
                on_device = group.get("fused") or group.get("capturable")
                scalar_device = parameter.device if on_device else torch.device("cpu")
                states[key] = torch.zeros(1, dtype=torch.float32, device=scalar_device)
            elif shapes[key] == parameter.shape:
                states[key] = torch.zeros_like(parameter, device=device, dtype=dtype)
            else:
                states[key] = torch.zeros(shapes[key], device=device, dtype=dtype)
    return states


def put_state(optimizers: Iterable[Optimizer], names: Names, states: Mapping[str, Tensor]) -> None:
    """Set the optimizer state to the tensors that ``allocate_state`` has allocated."""
    states_by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in states.items():
        slot, _, name = key.partition("/")
        states_by_name.setdefault(name, {})[slot] = value
    restored_names: set[str] = set()
    for optimizer, _, parameter in _optimized_parameters(optimizers):
        name = names[parameter]
        state = states_by_name.get(name, {})
        if name in restored_names:  # second copy of a tied weight in a V-shaped pipeline
            state = {slot: value.clone() for slot, value in state.items()}
        restored_names.add(name)
        if state:
            optimizer.state[parameter] = {
                slot: value.reshape(()) if _is_scalar(slot, value.shape, parameter) else value
                for slot, value in state.items()
            }
            if hasattr(optimizer, "encode"):
                optimizer.encode(parameter)


def step_counts(optimizer: Optimizer) -> dict[str, Any]:
    """Counters of an optimizer, as they are in a parameter group with its learning rate."""
    groups = optimizer.param_groups
    group = max(groups, key=lambda group: group["lr"], default=dict[str, Any]())
    counts = {key: group[key] for key in COUNTER_KEYS if key in group}
    return _scale_lr_sums(counts, 1 / (_lr_factor(optimizer, group) or 1.0), group)


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Settings of each parameter group."""
    groups = optimizer.param_groups
    return [{key: value for key, value in g.items() if key != "params"} for g in groups]


def set_counts_or_settings(optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Restore the result of ``step_counts`` or ``group_settings``."""
    for group, group_setting in zip(
        optimizer.param_groups, settings.get("groups", ()), strict=False
    ):
        group.update(group_setting)
    for group in optimizer.param_groups:
        counts = {key: value for key, value in settings.items() if key in group}
        group.update(_scale_lr_sums(counts, _lr_factor(optimizer, group), group))


def _lr_factor(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Learning rate of a group relative to that of the optimizer; 1 without one."""
    base_lr = optimizer.defaults.get("lr") if "lr_max" in group else None
    return float(group.get("initial_lr", group["lr"]) / base_lr) if base_lr else 1.0


def _scale_lr_sums(
    counts: dict[str, Any], factor: float, group: Mapping[str, Any]
) -> dict[str, Any]:
    """Counters of schedule-free AdamW in a group with ``factor`` times the learning rate."""
    if "lr_max" in counts and "weight_sum" in counts:
        counts["lr_max"] *= factor
        counts["weight_sum"] *= factor ** group["weight_lr_power"]
    return counts


def _unsharded_state(value: Tensor) -> Tensor:
    """State in the shape of its parameter, dequantized; a scalar has one element."""
    if value.ndim == 0:
        return value.detach().reshape(1)
    if isinstance(value, DTensor):
        local = value.to_local()
        unsharded = _unsharded_state(local)
        if unsharded is local:
            return value
        return DTensor.from_local(
            unsharded, value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
        )
    quantized: Any = value
    return quantized.dequantize(torch.float32) if hasattr(value, "codes") else value  # torchao


def _optimized_parameters(
    optimizers: Iterable[Optimizer],
) -> Iterator[tuple[Optimizer, dict[str, Any], nn.Parameter]]:
    """Parameters, each with its group and the optimizer that stores its state.

    ``ZeroRedundancyOptimizer`` wraps an optimizer over the parameters of this rank.
    """
    for optimizer in optimizers:
        inner = getattr(optimizer, "optim", optimizer)
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield inner, group, parameter


def _is_scalar(slot: str, shape: torch.Size, parameter: Tensor) -> bool:
    return slot in SCALAR_SLOTS or shape == (1,) != parameter.shape
