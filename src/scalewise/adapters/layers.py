"""Names: of the linear layers that an adapter is put on, and of what is added to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from scalewise.config.near import meant
from scalewise.errors import Complaint
from scalewise.models.base import Model, Split, Weight

AUTO = "auto"
KEY = "adapter.targets"
ADDED = (".lora_", ".ia3_l.")
"""What PEFT's names of added weights have in them."""


def linear(model: Model) -> tuple[str, ...]:
    """Returns the linear layers of a block, by name within it."""
    return tuple(
        name.removeprefix("blocks.*.")
        for name, how in model.tensor_split().items()
        if name.startswith("blocks.*.") and how in (Split.column, Split.row)
    )


@lru_cache(maxsize=64)
def described(
    targets: tuple[str, ...], model: Model, usual: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Returns the linear layers that targets describe, ``usual`` ones by ``auto``.

    A search asks a thousand times.
    """
    named = set(usual) if AUTO in targets else set()
    patterns = [re.compile(target) for target in targets if target != AUTO]
    return tuple(
        name
        for name in linear(model)
        if name in named or any(pattern.fullmatch(name) for pattern in patterns)
    )


def name_of(weight: Weight) -> str:
    """Returns the name, within its block, of the layer that a matrix is of."""
    return weight.name.removeprefix(f"blocks.{weight.layer}.").removesuffix(".weight")


def is_added(name: str) -> bool:
    """Returns whether a weight is an adapter's, and not the model's own."""
    return any(mark in name for mark in ADDED)


def complaints(targets: tuple[str, ...]) -> Iterator[Complaint]:
    """Yields targets that are no patterns, and that there are none."""
    if not targets:
        yield Complaint(KEY, [], "names no layer", f"set {KEY}=[auto]")
    for target in targets:
        try:
            re.compile(target)
        except re.error as error:
            yield Complaint(KEY, target, f"is no pattern: {error}")


def complaints_with(targets: tuple[str, ...], model: Model) -> Iterator[Complaint]:
    """Yields targets that describe no linear layer of the model's blocks."""
    for target in targets:
        if target != AUTO and not described((target,), model):
            reason = "is no linear layer of the model's blocks"
            yield Complaint(KEY, target, reason, meant(target, linear(model)))
