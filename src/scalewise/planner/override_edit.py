"""What a user typed, and the same line with something else in its place."""

from __future__ import annotations

from collections.abc import Iterable


def override_keys(overrides: Iterable[str]) -> frozenset[str]:
    """Returns the keys of overrides."""
    return frozenset(_override_key(line) for line in overrides)


def replace_overrides(overrides: Iterable[str], replacements: Iterable[str]) -> list[str]:
    """Returns the line that trains as ``overrides``, but for what is ``replacements``.

    An option that is told takes the fields of the one before it along. What was asked of the
    planner is left out.
    """
    replacements = list(replacements)
    keys = override_keys(replacements)
    groups = ("plan.", *(f"{key}." for key in keys if "." not in key))
    kept = [
        line
        for line in overrides
        if _override_key(line) not in keys and not _override_key(line).startswith(groups)
    ]
    return [*kept, *replacements]


def _override_key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]
