"""Every layout of a number of devices, as a user would type it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

from scalewise.errors import Complaint
from scalewise.parallelism.base import Parallelism
from scalewise.parallelism.ddp import DDP
from scalewise.parallelism.mesh import AXES, Mesh
from scalewise.parallelism.single import Single
from scalewise.plan.spec import Search

if TYPE_CHECKING:
    from scalewise.run import Run

ALONE = {"shards": "fsdp", "tensor": "tensor", "context": "context", "pipeline": "pipeline"}
"""The option that is a mesh of one axis."""


def devices(run: Run) -> int:
    """Returns how many devices a search may use: the profile's, or those that the run uses."""
    return run.hardware.devices or run.world_size


def every(run: Run, typed: frozenset[str]) -> Iterator[tuple[tuple[str, ...], Parallelism]]:
    """Yields each layout with what is typed for it, on all devices, on half of them, and so on.

    Where the devices are no power of two, powers of two below their number are tried as well.

    Sizes that were ``typed`` are held; the mesh's other fields are as in ``run``.
    """
    base, held = _held(run, typed)
    for count in _counts(devices(run)):
        for factors in _products(count, len(AXES)):
            named = dict(zip(AXES, factors, strict=True))
            if all(named[axis] == size for axis, size in held.items()):
                layout = _of_sizes(base, named)
                yield told(layout), layout


def complaints(run: Run, typed: frozenset[str]) -> Iterator[Complaint]:
    """Yields sizes that were ``typed`` and that take more devices than there are."""
    _, held = _held(run, typed)
    if run.plan.search is not Search.memory and prod(held.values()) > devices(run):
        reason = f"a search keeps to what is typed, and there are {devices(run)} devices"
        for axis, size in held.items():
            yield Complaint(f"parallelism.{axis}", size, reason, "leave it to the search")


def _held(run: Run, typed: frozenset[str]) -> tuple[Mesh, dict[str, int]]:
    """Returns the mesh that layouts are made of, and its sizes that stay."""
    base = run.parallelism if isinstance(run.parallelism, Mesh) else Mesh()
    return base, {axis: base.sizes[axis] for axis in AXES if f"parallelism.{axis}" in typed}


def told(layout: Parallelism) -> tuple[str, ...]:
    """Returns the overrides that say ``layout``."""
    if isinstance(layout, DDP):
        return ("parallelism=ddp", f"parallelism.replicas={layout.replicas}")
    if not isinstance(layout, Mesh):
        return ("parallelism=single",)
    used = {axis: size for axis, size in layout.sizes.items() if size > 1}
    name = ALONE.get(next(iter(used)), "mesh") if len(used) == 1 else "mesh"
    flags = [
        f"parallelism.{entry.name}={_text(getattr(layout, entry.name))}"
        for entry in fields(Mesh)
        if entry.name not in AXES and getattr(layout, entry.name) != entry.default
    ]
    return (f"parallelism={name}", *(f"parallelism.{a}={s}" for a, s in used.items()), *flags)


def described(layout: Parallelism) -> str:
    """Returns a layout in words: ``shards 4 x tensor 8``."""
    if isinstance(layout, Mesh):
        used = [f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1]
        return " x ".join(used) or "single"
    name = type(layout).__name__.lower()
    return name if layout.world_size == 1 else f"{name} {layout.world_size}"


def sizes(layout: Parallelism) -> tuple[int, ...]:
    """Returns the size of each axis, outermost first; those of other strategies are replicas."""
    if isinstance(layout, Mesh):
        return tuple(layout.sizes[axis] for axis in AXES)
    return tuple(layout.world_size if axis == "replicate" else 1 for axis in AXES)


def rows_at_once(run: Run) -> int:
    """Returns the rows that a rank passes through the model together."""
    pieces = run.parallelism.pieces if is_pipeline(run.parallelism) else 1
    return run.micro_batch // pieces


def is_pipeline(layout: Parallelism) -> TypeGuard[Mesh]:
    """Returns whether a layout has stages."""
    return isinstance(layout, Mesh) and layout.sizes["pipeline"] > 1


def _of_sizes(base: Mesh, sizes: dict[str, Any]) -> Parallelism:
    used = [axis for axis, size in sizes.items() if size > 1]
    if not used:
        return Single()
    if used == ["replicate"]:
        return DDP(replicas=sizes["replicate"])
    return replace(base, **sizes)


def _counts(most: int) -> list[int]:
    counts = {1 << power for power in range(most.bit_length())} | {most}
    while not most % 2:
        most //= 2
        counts.add(most)
    return sorted(counts, reverse=True)


def _products(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yields each way to write ``count`` as a product of so many factors, in order."""
    if parts == 1:
        yield (count,)
        return
    for first in range(1, count + 1):
        if count % first == 0:
            yield from ((first, *rest) for rest in _products(count // first, parts - 1))


def _text(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    return "null" if value is None else str(value).lower()
