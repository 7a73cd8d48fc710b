"""Takes home folders and secrets out of text that goes into a page other people will read."""

import re
from pathlib import Path

from scalewise.redaction import HIDDEN, redact

_SECRET = "(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|passw(?:or)?d)"  # noqa: S105 (a pattern)
_HUB = r"(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!mask_)token"
_NAME = re.compile(rf"(?i)(?:{_SECRET}|{_HUB})$")
_ASSIGNED = re.compile(
    rf"(?i)((?:{_SECRET}|{_HUB})[\"']?\s*[=:]\s*[\"']?)(?!{re.escape(HIDDEN)})[^\s\"',}}]+"
)
_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}")
_HEX = re.compile(r"\b[0-9a-f]{40,}\b")
_HOME = re.compile(
    r"(?:/home/[^/\s\"':,;]+|/Users/[^/\s\"':,;]+|/root|[A-Z]:\\Users\\[^\\\s]+)(?=[/\\\s\"':,;)\]]|$)"
)

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_PRINTED = ("reason", "log_tail")
"""Keys of what programs printed, perhaps in colour; all else was set, and is told exactly."""


def redact_text(raw: str) -> str:
    """Returns ``raw`` with home folders as ``~`` and values that look secret as ``[hidden]``.

    Control characters are written as escapes; a lone surrogate becomes ``?``.
    """
    shown = raw.encode("utf-8", "replace").decode("utf-8")
    shown = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], shown)
    shown = redact(shown)
    home = str(Path.home())
    if len(home) > 1:
        shown = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", shown)
    shown = _HOME.sub("~", shown)
    shown = _BEARER.sub(rf"\1{HIDDEN}", shown)
    shown = _ASSIGNED.sub(rf"\1{HIDDEN}", shown)
    return _HEX.sub(HIDDEN, shown)


def redact_values(value: object) -> object:
    """Returns the JSON-like ``value`` with every string in it passed through :func:`text`.

    The value of a key whose name says secret (``hub_token``), and of a ``{"key": ...}`` entry
    that names one, is hidden whole. Terminal colours of what programs printed are left out.
    """
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, list):
        return [redact_values(item) for item in value]
    if isinstance(value, dict):
        named = value.get("key")
        secret = isinstance(named, str) and is_secret_setting(named)
        return {
            str(key): HIDDEN
            if item is not None and (is_secret_setting(str(key)) or (secret and key != "key"))
            else redact_values(_strip_colours(item) if key in _PRINTED else item)
            for key, item in value.items()
        }
    return value


def _strip_colours(printed: object) -> object:
    if isinstance(printed, list):
        return [_strip_colours(line) for line in printed]
    return _COLOUR.sub("", printed) if isinstance(printed, str) else printed


def is_secret_setting(name: str) -> bool:
    """Returns whether a setting called ``name`` holds something that must not be shown."""
    return _NAME.search(name) is not None
