"""Text files and JSON lines, decoded strictly."""

import codecs
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scalewise.data.compressed_files import iter_byte_lines, open_content
from scalewise.data.text_encodings import (
    CONTROL_CHARACTERS,
    ISO_2022,
    bom_encoding,
    check_unmarked,
    conversion_fix,
    decode_error,
    encoding_name,
    iso_2022_error,
)
from scalewise.errors import DataError

logger = logging.getLogger(__name__)

PROSE_SUFFIXES = frozenset({".txt", ".md", ".rst", ".tex", ".html", ".xml"})
CODE_SUFFIXES = frozenset(
    {".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh"}
)
PLAIN_SUFFIXES = PROSE_SUFFIXES | CODE_SUFFIXES
"""Suffixes of plain text files; each file is one document."""

CHUNK_BYTES = 1 << 20
"""Number of bytes of a plain text file that are decoded at once."""

REPLACEMENT, MARK = "\ufffd", "\ufeff"
C1_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
"""Control characters that no text contains, except for U+0085, a line end."""
MIN_CHARACTERS_PER_DAMAGE = 1000
"""Characters per damaged character below which a note is printed."""


@dataclass(frozen=True)
class Document:
    """Text of a file, in chunks that can be read once."""

    chunks: Iterable[str]
    """Consecutive parts of the text."""
    source: str
    """File, and the line or row in it, for error messages."""


def text_chunks(path: Path, *, notes: bool = True) -> Iterator[str]:
    """Yield the decoded text of a file in chunks, with ``\\n`` line ends.

    The encoding is UTF-8, or UTF-16 and UTF-32 with a byte order mark, which is removed. Raises
    ``DataError`` with the line of invalid bytes or of a control character. Prints notes on damaged
    characters, unless the caller does so for its records.
    """
    encoding, mark_bytes = bom_encoding(path)
    with open_content(path) as file:
        file.read(mark_bytes)
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), True)
        line, is_final, decoded, damaged = 1, False, mark_bytes, DamagedText(str(path))
        while not is_final:
            data = file.read(CHUNK_BYTES)
            is_final = len(data) < CHUNK_BYTES
            try:
                text = decoder.decode(data, final=is_final)
            except UnicodeDecodeError as error:
                line += len(re.findall(r"\r\n?|\n", error.object[: error.start].decode(encoding)))
                position = decoded + len(data) - len(error.object) + error.start
                raise decode_error(path, line, position, error) from error
            if match := ISO_2022.search(text):
                line += text.count("\n", 0, match.start())
                raise iso_2022_error(path, line, match)
            if match := CONTROL_CHARACTERS.search(text):
                line += text.count("\n", 0, match.start())
                name = "NUL" if match[0] == "\0" else f"control (0x{ord(match[0]):02x})"
                reason = f"line {line} has a {name} character, which is not text"
                raise DataError.for_key("data.paths", path, reason, conversion_fix(path))
            line += text.count("\n")
            decoded += len(data)
            damaged.count(text)
            if text:
                yield text
    if notes:
        damaged.note()
        if damaged.is_empty:
            warn_once(f"{path} has no text")


class DamagedText:
    """Numbers of characters that an earlier conversion or joining of files has left in a text."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._characters = self._replaced = self._controls = self._marks = 0

    def count(self, text: str) -> None:
        """Add the characters of a text."""
        self._characters += len(text)
        if text.isascii():
            return
        self._replaced += text.count(REPLACEMENT)
        self._controls += len(C1_CONTROLS.findall(text))
        self._marks += text.count(MARK)

    @property
    def is_empty(self) -> bool:
        """Whether no character was counted."""
        return not self._characters

    def note(self) -> None:
        """Print a note for many such characters, and for any byte order mark."""
        many = self._characters / MIN_CHARACTERS_PER_DAMAGE
        if self._replaced > many:
            warn_once(
                f"{self._name} has {self._replaced:,} replacement characters (U+FFFD) among "
                f"{self._characters:,}: it was converted from another encoding than its own"
            )
        if self._controls > many:
            warn_once(
                f"{self._name} has {self._controls:,} control characters (U+0080 to U+009F) among "
                f"{self._characters:,}: Windows-1252 was converted as if it were ISO 8859-1"
            )
        if self._marks:
            warn_once(
                f"{self._name} has {self._marks:,} byte order marks (U+FEFF) within its text, "
                "which are tokenized: files with a mark were joined"
            )


def read_text(path: Path) -> str:
    """Return the text of a file of records, decoded as in ``text_chunks``."""
    return "".join(text_chunks(path, notes=False))


def iter_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the line number and the value of each non-blank line of JSON.

    An invalid line yields a ``ValueError`` with the reason. Encodings are those of ``text_chunks``.
    """
    encoding, mark_bytes = bom_encoding(path)
    if encoding == "utf-8":
        check_unmarked(path)
        byte_lines = iter_byte_lines(path, mark_bytes)
        lines: Iterable[bytes | str] = (part for raw in byte_lines for part in raw.splitlines())
    else:
        lines = _iter_lines(text_chunks(path, notes=False))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8") if isinstance(line, bytes) else line
            yield number, parse_json(text)
        except UnicodeDecodeError as error:
            yield number, ValueError(f"is not {encoding_name(error)}")
        except ValueError as error:
            yield number, error


def _iter_lines(chunks: Iterable[str]) -> Iterator[str]:
    partial_line = ""
    for chunk in chunks:
        *lines, partial_line = (partial_line + chunk).split("\n")
        yield from lines
    yield partial_line


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; raises ``ValueError`` with the reason.

    Stricter than ``json.loads``: NaN, Infinity and lone surrogates are rejected.
    """
    try:
        value = json.loads(text, parse_constant=no_constant, object_pairs_hook=unique_keys)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("has a lone surrogate (half a character)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("is JSON that is nested too deeply") from error
    except ValueError as error:  # an integer with more digits than Python converts
        raise ValueError(f"is not valid JSON ({error})") from error
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raises ``ValueError`` for a repeated key, of which Python omits one."""
    value = dict(pairs)
    if len(value) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise json.JSONDecodeError(f"the key {key!r} is repeated", key, 0)
    return value


def no_constant(name: str) -> Any:
    """Raise ``ValueError`` for NaN and Infinity, which Python accepts in JSON."""
    raise json.JSONDecodeError(f"{name} is not a JSON value", name, 0)


@cache
def warn_once(line: str) -> None:
    """Log a warning once per process, since files are read several times."""
    logger.warning(line)


def open_document(document: str | Document, number: int) -> tuple[Iterable[str], str]:
    """Return the chunks of a document, and its name in error messages."""
    if isinstance(document, Document):
        return document.chunks, document.source
    return (document,), f"text {number}"


def split_chunks(chunks: Iterable[str], size: int) -> Iterator[str]:
    """Split chunks into parts of at most ``size`` characters."""
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]
