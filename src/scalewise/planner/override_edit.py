"""Edits of a list of command-line overrides."""

from __future__ import annotations

from collections.abc import Iterable


def override_keys(overrides: Iterable[str]) -> frozenset[str]:
    """Return the config keys of ``overrides``."""
    return frozenset(_override_key(override) for override in overrides)


def replace_overrides(overrides: Iterable[str], replacements: Iterable[str]) -> list[str]:
    """Return ``overrides`` with ``replacements`` in place of the overrides of the same keys.

    A replaced option of a group removes the overrides of its fields. ``plan.*`` overrides are
    removed.
    """
    replacements = list(replacements)
    keys = override_keys(replacements)
    removed_prefixes = ("plan.", *(f"{key}." for key in keys if "." not in key))
    unchanged = [
        override
        for override in overrides
        if _override_key(override) not in keys
        and not _override_key(override).startswith(removed_prefixes)
    ]
    return [*unchanged, *replacements]


def _override_key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]
