"""Overrides as they are typed: quoted for Hydra's grammar, then for a POSIX shell."""

from __future__ import annotations

import re
import shlex

_PLAIN = re.compile(r"[A-Za-z_/][\w/.*?@%+-]*")
_SPECIAL_IN_DOUBLE_QUOTES = re.compile(r'["$`\\!]')
_WORDS = {"null", "true", "false", "nan", "inf"}


def typed(key: str, value: object) -> str:
    """Returns ``key=value`` as one word of a shell that Hydra reads back as ``value``."""
    word = f"{key}={_for_hydra(value)}"
    if "'" in word and not _SPECIAL_IN_DOUBLE_QUOTES.search(word):
        return f'"{word}"'
    return shlex.quote(word)


def _for_hydra(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_for_hydra, value))}]"
    if not isinstance(value, str) or (_PLAIN.fullmatch(value) and value.lower() not in _WORDS):
        return str(value)
    # Hydra reads a backslash as itself, but before a quote.
    return "'" + re.sub(r"(\\*)('|$)", _escaped, value) + "'"


def _escaped(found: re.Match[str]) -> str:
    return found[1] * 2 + ("\\'" if found[2] else "")
