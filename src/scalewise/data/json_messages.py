"""Messages that a record has as JSON text, such as from a column of a CSV file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from scalewise.data.chat_messages import CONTENT_KEYS, ROLE_KEYS, ROLES, RecordKeys
from scalewise.data.text_files import parse_json

OBJECT_START = re.compile(r"""(?:array\()?\[?\s*\{\s*['"]""")
"""Start of an object or of a list of objects, in JSON or as Python and NumPy print it."""
MESSAGE_START = re.compile(
    rf"""{OBJECT_START.pattern}({"|".join((*ROLE_KEYS, *CONTENT_KEYS))})['"]\s*:"""
)
CALL_KEYS = frozenset({"tool_calls", "function_call"})


def decode_messages(
    record: Mapping[str, Any], names: Iterable[str], keys: RecordKeys
) -> dict[str, Any]:
    """Return a record whose JSON texts of messages under ``names`` are messages, with a note.

    Other texts stay as they are. Raises ``ValueError`` for a text of messages that is not JSON,
    such as the ``str`` of a Python list.
    """
    decoded = dict(record)
    for name in names:
        if isinstance(text := record.get(name), str):
            decoded[name] = _decode(text.strip(), name, keys) or text
    return decoded


def _decode(text: str, name: str, keys: RecordKeys) -> Any:
    """Return the messages of a JSON text; None for another text."""
    if not OBJECT_START.match(text):
        return None
    try:
        value = parse_json(text)
    except ValueError as error:
        if MESSAGE_START.match(text) and text.endswith(("]", "}", ")")):
            raise ValueError(
                f"has messages as a text in {name}, which {error}: write it with json.dumps"
            ) from error
        return None
    if not _is_messages(value):
        return None
    keys.count_decoded(name)
    return value


def _is_messages(value: object) -> bool:
    """Whether a JSON value is a turn or a list of turns: objects with a role and a content."""
    turns: list[Any] = value if isinstance(value, list) else [value]
    return all(
        isinstance(turn, dict)
        and not turn.keys().isdisjoint(ROLE_KEYS)
        and not turn.keys().isdisjoint({*CONTENT_KEYS, *CALL_KEYS})
        for turn in turns
    ) and any(str(turn.get(key)) in ROLES for turn in turns for key in ROLE_KEYS)
