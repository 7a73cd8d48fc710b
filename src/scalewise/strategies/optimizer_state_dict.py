"""An optimizer's state as tensors by name, which no layout changes: ``exp_avg/blocks.0.weight``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

COUNTED = ("k", "weight_sum", "lr_max", "train_mode")
"""What schedule-free AdamW counts in its groups."""

Names = Mapping[nn.Parameter, str]


def state_tensors(optimizers: Iterable[Optimizer], names: Names) -> dict[str, Tensor]:
    """Returns every tensor of state that this rank holds; scalars as one element."""
    return {
        f"{slot}/{names[parameter]}": _unsharded_state(value)
        for optimizer, parameter in _parameters_and_optimizers(optimizers)
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def allocate_state(
    optimizers: Iterable[Optimizer], names: Names, shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Returns room for the state of this rank's parameters, of which ``shapes`` gives the
    shapes."""
    slots: dict[str, list[str]] = {}
    for key in shapes:
        slot, _, name = key.partition("/")
        slots.setdefault(name, []).append(slot)
    room = {}
    for optimizer, parameter in _parameters_and_optimizers(optimizers):
        name, place = names[parameter], getattr(optimizer, "state_place", None)
        kind = getattr(optimizer, "state_format", None)
        for slot in slots.get(name, []):
            key = f"{slot}/{name}"
            alike = shapes[key] == parameter.shape
            room[key] = (
                torch.zeros_like(parameter, device=place, dtype=kind)
                if alike
                else torch.zeros(shapes[key])
            )
    return room


def put_state(optimizers: Iterable[Optimizer], names: Names, states: Mapping[str, Tensor]) -> None:
    """Gives the optimizers the tensors that ``allocate`` made room for."""
    held: dict[str, dict[str, Tensor]] = {}
    for key, value in states.items():
        slot, _, name = key.partition("/")
        held.setdefault(name, {})[slot] = value
    given: set[str] = set()
    for optimizer, parameter in _parameters_and_optimizers(optimizers):
        name = names[parameter]
        state = held.get(name, {})
        if name in given:  # a folded pipeline has both ends of a tied weight, stepped apart
            state = {slot: value.clone() for slot, value in state.items()}
        given.add(name)
        if state:
            optimizer.state[parameter] = {
                slot: value.reshape(()) if _is_scalar(value, parameter) else value
                for slot, value in state.items()
            }
            if hasattr(optimizer, "encode"):
                optimizer.encode(parameter)


def step_counts(optimizer: Optimizer) -> dict[str, Any]:
    """Returns what an optimizer counts as it goes, alike for all of its groups."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    return {key: group[key] for key in COUNTED if key in group}


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns all that each group says beside its parameters."""
    groups = optimizer.param_groups
    return [{key: value for key, value in g.items() if key != "params"} for g in groups]


def set_counts_or_settings(optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Gives the groups what ``counts`` or ``settings`` returned."""
    for group, said in zip(optimizer.param_groups, settings.get("groups", ()), strict=False):
        group.update(said)
    for group in optimizer.param_groups:
        group.update({key: value for key, value in settings.items() if key in group})


def _unsharded_state(value: Tensor) -> Tensor:
    """Returns a state as numbers in the shape of its weight; a scalar as one element."""
    if value.ndim == 0:
        return value.detach().reshape(1)
    if isinstance(value, DTensor):
        local = value.to_local()
        plain = _unsharded_state(local)
        if plain is local:
            return value
        return DTensor.from_local(
            plain, value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
        )
    encoded: Any = value
    return encoded.dequantize(torch.float32) if hasattr(value, "codes") else value  # torchao's


def _parameters_and_optimizers(
    optimizers: Iterable[Optimizer],
) -> Iterator[tuple[Optimizer, nn.Parameter]]:
    """Yields each parameter with the optimizer that holds its state: ZeRO's holds a part."""
    for optimizer in optimizers:
        inner = getattr(optimizer, "optim", optimizer)
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield inner, parameter


def _is_scalar(value: Tensor, parameter: Tensor) -> bool:
    return value.shape == (1,) != parameter.shape
