"""Removal of home folders and secrets from texts of a report, which may be shared."""

import re
from pathlib import Path

from scalewise.redaction import HIDDEN, redact

_SECRET = "(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|passw(?:or)?d)"  # noqa: S105 (a pattern)
_TOKEN = r"(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!mask_)token"  # noqa: S105 (a pattern)
_SECRET_NAME = re.compile(rf"(?i)(?:{_SECRET}|{_TOKEN})$")
_SECRET_ASSIGNMENT = re.compile(
    rf"(?i)((?:{_SECRET}|{_TOKEN})[\"']?\s*[=:]\s*[\"']?)(?!{re.escape(HIDDEN)})[^\s\"',}}]+"
)
_AUTHORIZATION = re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}")
_HEX = re.compile(r"\b[0-9a-f]{40,}\b")
_HOME = re.compile(
    r"(?:/home/[^/\s\"':,;]+|/Users/[^/\s\"':,;]+|/root|[A-Z]:\\Users\\[^\\\s]+)(?=[/\\\s\"':,;)\]]|$)"
)

_ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_OUTPUT_KEYS = ("reason", "log_tail")
"""Keys of program output, from which ANSI escapes are removed."""


def redact_text(raw: str) -> str:
    """Replace home folders by ``~`` and values that look secret by ``[hidden]``.

    Control characters become escape sequences, and a lone surrogate becomes ``?``.
    """
    text = raw.encode("utf-8", "replace").decode("utf-8")
    text = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
    text = redact(text)
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = _HOME.sub("~", text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    text = _SECRET_ASSIGNMENT.sub(rf"\1{HIDDEN}", text)
    return _HEX.sub(HIDDEN, text)


def redact_values(value: object) -> object:
    """Apply :func:`redact_text` to every string of a JSON-like ``value``.

    The value of a secret setting (:func:`is_secret_setting`) is hidden completely, also in a
    ``{"key": ...}`` entry that names one.
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
            else redact_values(_strip_ansi(item) if key in _OUTPUT_KEYS else item)
            for key, item in value.items()
        }
    return value


def _strip_ansi(printed: object) -> object:
    if isinstance(printed, list):
        return [_strip_ansi(line) for line in printed]
    return _ANSI_ESCAPE.sub("", printed) if isinstance(printed, str) else printed


def is_secret_setting(name: str) -> bool:
    """Whether the name of a setting indicates a secret, such as ``hub_token``."""
    return _SECRET_NAME.search(name) is not None
