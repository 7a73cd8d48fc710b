"""The engines of a sweep by name, as ``hydra/launcher=NAME`` asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scalewise.launch.engine import Engine, InTurn


def _in_turn() -> Engine:
    return InTurn()


def _packed(slots: int | None = None) -> Engine:
    from scalewise.launch.packed import Packed

    return Packed(slots)


ENGINES: Mapping[str, Callable[..., Engine]] = {"in_turn": _in_turn, "packed": _packed}
"""What makes each engine from its options; it imports what that engine needs."""


def named(options: Mapping[str, Any]) -> Engine:
    """Returns the engine that the options of ``hydra/launcher`` name."""
    given = dict(options)
    return ENGINES[str(given.pop("engine"))](**given)
