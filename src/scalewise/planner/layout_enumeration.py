"""Enumeration of the parallelism layouts of a number of devices, with their overrides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from enum import Enum
from math import prod
from typing import Any, TypeGuard

from scalewise.errors import ConfigIssue
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.mesh import AXES, MeshConfig, ShardedState
from scalewise.parallelism.single import SingleConfig
from scalewise.plan_config import PlanSearch
from scalewise.registry import option_name
from scalewise.run_config import RunConfig

SINGLE_AXIS_OPTIONS = {
    "shards": "fsdp",
    "tensor": "tensor",
    "context": "context",
    "pipeline": "pipeline",
}
"""Option name of a mesh with one axis."""


Layout = tuple[tuple[str, ...], ParallelismConfig]
"""Overrides that select a strategy, and the strategy."""


def available_devices(run: RunConfig) -> int:
    """Return the number of devices of a search: those of the profile, or those of the run."""
    return run.hardware.total_devices or run.world_size


def enumerate_layouts(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[Layout]:
    """Yield each layout with its overrides, from all devices down to one.

    The device counts are powers of two, and the number of devices divided by powers of two; with
    ``plan.search=devices`` only all devices. Sizes in ``fixed_keys`` keep their value; other fields
    of the mesh are those of ``run``.
    """
    base, fixed_sizes = _base_mesh(run, fixed_keys)
    devices = available_devices(run)
    uses_all = run.plan.search is PlanSearch.devices
    for count in [devices] if uses_all else _device_counts(devices):
        for factors in _factorizations(count, len(AXES)):
            sizes = dict(zip(AXES, factors, strict=True))
            if all(sizes[axis] == fixed_size for axis, fixed_size in fixed_sizes.items()):
                layout = _layout_of_sizes(base, sizes)
                yield layout_overrides(layout), layout


def layout_issues(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[ConfigIssue]:
    """Yield a config issue for fixed sizes that need more devices than there are."""
    _, fixed_sizes = _base_mesh(run, fixed_keys)
    if run.plan.search is not PlanSearch.memory and prod(fixed_sizes.values()) > available_devices(
        run
    ):
        reason = f"the fixed sizes need more than the {available_devices(run)} devices"
        for axis, size in fixed_sizes.items():
            yield ConfigIssue(f"parallelism.{axis}", size, reason, "remove it from the command")


def _base_mesh(run: RunConfig, fixed_keys: frozenset[str]) -> tuple[MeshConfig, dict[str, int]]:
    """Return the mesh that layouts derive from, and its fixed sizes."""
    base = run.parallelism if isinstance(run.parallelism, MeshConfig) else MeshConfig()
    return base, {axis: base.sizes[axis] for axis in AXES if f"parallelism.{axis}" in fixed_keys}


def layout_overrides(layout: ParallelismConfig) -> tuple[str, ...]:
    """Return the overrides that select ``layout``."""
    if isinstance(layout, DDPConfig):
        return ("parallelism=ddp", f"parallelism.replicas={layout.replicas}")
    if not isinstance(layout, MeshConfig):
        return ("parallelism=single",)
    used = {axis: size for axis, size in layout.sizes.items() if size > 1}
    name = SINGLE_AXIS_OPTIONS.get(next(iter(used)), "mesh") if len(used) == 1 else "mesh"
    flags = [
        f"parallelism.{entry.name}={_axes_text(getattr(layout, entry.name))}"
        for entry in fields(MeshConfig)
        if entry.name not in AXES and getattr(layout, entry.name) != entry.default
    ]
    return (f"parallelism={name}", *(f"parallelism.{a}={s}" for a, s in used.items()), *flags)


def layout_text(layout: ParallelismConfig) -> str:
    """Return a short text of a layout, such as ``shards 4 x tensor 8``."""
    if isinstance(layout, MeshConfig):
        used = [f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1]
        return " x ".join(used) or "single"
    name = option_name(layout)
    return name if layout.world_size == 1 else f"{name} {layout.world_size}"


def axis_sizes(layout: ParallelismConfig) -> tuple[int, ...]:
    """Return the size of each mesh axis, outermost first; other strategies only replicate."""
    if isinstance(layout, MeshConfig):
        return tuple(layout.sizes[axis] for axis in AXES)
    return tuple(layout.world_size if axis == "replicate" else 1 for axis in AXES)


def sequences_per_forward(run: RunConfig) -> int:
    """Return the number of sequences in one forward pass of a rank."""
    num_micro_batches = (
        run.parallelism.num_pipeline_micro_batches if is_pipeline(run.parallelism) else 1
    )
    return run.micro_batch // num_micro_batches


def is_pipeline(layout: ParallelismConfig) -> TypeGuard[MeshConfig]:
    """Whether a layout has pipeline stages."""
    return isinstance(layout, MeshConfig) and layout.sizes["pipeline"] > 1


def _layout_of_sizes(base: MeshConfig, sizes: dict[str, Any]) -> ParallelismConfig:
    used = [axis for axis, size in sizes.items() if size > 1]
    if not used:
        return SingleConfig()
    if used == ["replicate"]:
        return DDPConfig(replicas=sizes["replicate"])
    if sizes["shards"] * sizes["context"] == 1:  # nothing to shard
        base = replace(base, shard=ShardedState.parameters)
    return replace(base, **sizes)


def _device_counts(max_devices: int) -> list[int]:
    counts = {1 << power for power in range(max_devices.bit_length())} | {max_devices}
    while not max_devices % 2:
        max_devices //= 2
        counts.add(max_devices)
    return sorted(counts, reverse=True)


def _factorizations(count: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Yield each factorization of ``count`` into ``num_factors`` ordered factors."""
    if num_factors == 1:
        yield (count,)
        return
    for first in range(1, count + 1):
        if count % first == 0:
            yield from ((first, *rest) for rest in _factorizations(count // first, num_factors - 1))


def _axes_text(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    return "null" if value is None else str(value).lower()
