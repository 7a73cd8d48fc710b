"""Key, text and values of an override that Hydra has parsed."""

from itertools import islice
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString

from scalewise.config import sweep_grid

MAX_SWEEP_LENGTH = 100
"""Number of values of a sweep that are checked here; later every job is validated."""


def override_key(override: Override) -> str:
    """Key or config group of an override, without a package."""
    return str(override.key_or_group)


def override_text(override: Override) -> str:
    """Override as it was typed."""
    return str(override.input_line)


def display_value(override: Override) -> object:
    """Value of an override in override syntax; None if it deletes the key."""
    if override.is_delete():
        return None
    try:
        return override.get_value_string()
    except Exception:  # Hydra cannot format some values
        return override_text(override).partition("=")[2]


def override_values(override: Override) -> list[Any]:
    """Value of an override, or the first values of a sweep."""
    if not override.is_sweep_override():
        return [_plain_value(override.value())]
    try:
        sweep_grid.bounded_count(override)  # a shuffled range is materialized
        return [
            _plain_value(value) for value in islice(override.sweep_iterator(), MAX_SWEEP_LENGTH)
        ]
    except Exception:  # a glob, an interval or an empty range: Hydra checks it
        return []


def _plain_value(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain_value(entry) for entry in value]
    if isinstance(value, dict):
        return {_plain_value(key): _plain_value(entry) for key, entry in value.items()}
    return value
