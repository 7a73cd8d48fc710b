"""Overrides, quoted for Hydra's grammar and for a POSIX shell, and edits of a list of them.

Messages show fixes as shell words. A word with ``=`` is an override, quoted by
:func:`format_override` or :func:`shell_word`; numbers and option names need no quotes. Adjacent
words are typed together. A comma or ``or`` separates alternatives, also further values of the same
key: ``set parallelism=fsdp, ddp or tensor``. A value in capitals is a placeholder:
``model.path=FOLDER``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import PurePath

from scalewise.console import printable

_PLAIN = re.compile(r"[A-Za-z_/][\w/.*?@%+-]*", re.ASCII)
_SPECIAL_IN_DOUBLE_QUOTES = re.compile(r'["$`\\!]')
_SPECIAL_IN_KEYS = re.compile(r"([\\()\[\]{}:=, \t])")
_WORDS = {"null", "true", "false", "nan", "inf"}


def format_override(key: str, value: object) -> str:
    """Format ``key=value`` as one shell word."""
    return shell_word(override(key, value))


def override(key: str, value: object) -> str:
    """Format ``key=value`` so that Hydra parses it as ``value``; not quoted for a shell."""
    return f"{key}={_quote_for_hydra(value)}"


def shell_word(text: object) -> str:
    """Quote a text as one word of a POSIX shell, in printable characters."""
    word = str(text)
    if printable(word, spaces=False) != word:
        return f"\"$(printf '{''.join(map(_for_printf, word))}')\""
    if "'" in word and not _SPECIAL_IN_DOUBLE_QUOTES.search(word):
        return f'"{word}"'
    return shlex.quote(word)


def command_line(subcommand: str, arguments: Sequence[object]) -> str:
    """Format a ``scalewise`` command for a POSIX shell."""
    return " ".join(["scalewise", subcommand, *map(shell_word, arguments)])


def override_keys(overrides: Iterable[str]) -> frozenset[str]:
    """Config keys of ``overrides``."""
    return frozenset(_override_key(override) for override in overrides)


def replace_overrides(overrides: Iterable[str], replacements: Iterable[str]) -> list[str]:
    """Copy of ``overrides`` with ``replacements`` in place of the overrides of the same keys.

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


def _for_printf(character: str) -> str:
    if character in "%\\":
        return character * 2
    if character != "'" and printable(character, spaces=False) == character:
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogatepass"))


def _quote_for_hydra(value: object) -> str:
    if isinstance(value, Enum):
        return _quote_for_hydra(value.name)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_quote_for_hydra, value))}]"
    if isinstance(value, Mapping):
        keys = {_SPECIAL_IN_KEYS.sub(r"\\\1", str(key)): entry for key, entry in value.items()}
        return f"{{{','.join(f'{key}:{_quote_for_hydra(entry)}' for key, entry in keys.items())}}}"
    if not isinstance(value, str | PurePath):
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # escapes interpolations of OmegaConf
    # In Hydra, a backslash is special only before a quote.
    return "'" + re.sub(r"(\\*)('|\Z)", _escape, text) + "'"


def _escape(match: re.Match[str]) -> str:
    return match[1] * 2 + ("\\'" if match[2] else "")
