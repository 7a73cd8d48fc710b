"""What a user typed, and the same line with something else in its place."""

from __future__ import annotations

from collections.abc import Iterable


def override_keys(overrides: Iterable[str]) -> frozenset[str]:
    """Returns the keys of overrides."""
    return frozenset(_override_key(line) for line in overrides)


def replace_overrides(given: Iterable[str], told: Iterable[str]) -> list[str]:
    """Returns the line that trains as ``given``, but for what is ``told``.

    An option that is told takes the fields of the one before it along. What was asked of the
    planner is left out.
    """
    told = list(told)
    keys = override_keys(told)
    groups = ("plan.", *(f"{key}." for key in keys if "." not in key))
    kept = [
        line
        for line in given
        if _override_key(line) not in keys and not _override_key(line).startswith(groups)
    ]
    return [*kept, *told]


def _override_key(line: str) -> str:
    return line.lstrip("+~").split("=")[0]
