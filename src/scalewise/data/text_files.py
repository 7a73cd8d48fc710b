"""Text files: strict decoding, and commands that convert other encodings to UTF-8."""

import codecs
import io
import json
import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scalewise.data.compressed_files import compression_name, iter_byte_lines, open_content
from scalewise.errors import DataError
from scalewise.typed_override import shell_word

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
ISO_2022 = re.compile(r"\x1b\$[@AB(]")
"""Escape sequence that begins two-byte characters in ISO-2022 encodings, which are ASCII bytes."""

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose mark is a prefix of it
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
"""Encodings by byte order mark; a file without a mark is UTF-8."""

DECOMPRESS = "decompress the file, and convert the result to UTF-8"
SAMPLE_BYTES = 1 << 16
"""Number of bytes for the detection of an encoding."""
CONTROL_CHARACTERS = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f]")
"""Control characters that text does not contain; white space and terminal escapes are allowed."""
UNICODE_ENCODINGS = {
    "utf-32-le": "UTF-32LE",
    "utf-32-be": "UTF-32BE",
    "utf-16-le": "UTF-16LE",
    "utf-16-be": "UTF-16BE",
}
"""Encodings that often have a byte order mark, and their names in iconv."""
OTHER_ENCODINGS = {
    "cp932": "Shift-JIS",
    "gb18030": "GB18030",
    "euc_jp": "EUC-JP",
    "big5": "Big5",
    "cp949": "EUC-KR",
    "cp1251": "Windows-1251",
    "koi8_r": "KOI8-R",
}
"""Encodings that cannot be distinguished reliably, and their names in iconv."""
MIN_TOP_BLOCKS_FRACTION = 0.8
"""Minimum fraction of UTF-16 characters in the two most frequent blocks of 256: an alphabet, and
spaces."""
MIN_CHARACTERS = 16
"""Minimum number of characters without a space to apply ``MIN_TOP_BLOCKS_FRACTION``."""
MAX_NON_ASCII_FRACTION = 1 / 3
"""Fraction of non-ASCII letters above which a text is not in a Latin alphabet."""


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
    encoding, mark_bytes = _bom_encoding(path)
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
                raise _decode_error(path, line, position, error) from error
            if match := CONTROL_CHARACTERS.search(text):
                line += text.count("\n", 0, match.start())
                name = "NUL" if match[0] == "\0" else f"control (0x{ord(match[0]):02x})"
                reason = f"line {line} has a {name} character, which is not text"
                raise DataError.for_key("data.paths", path, reason, _conversion_fix(path))
            if match := ISO_2022.search(text):
                line += text.count("\n", 0, match.start())
                fix = f"convert the file: iconv -f ISO-2022-JP-2 -t UTF-8 {_redirection(path)}"
                if compression_name(path) is not None:
                    fix = DECOMPRESS
                reason = f"line {line} is ISO-2022 (an encoding of Japanese), not UTF-8"
                raise DataError.for_key("data.paths", path, reason, fix)
            line += text.count("\n")
            decoded += len(data)
            damaged.count(text)
            if text:
                yield text
    if notes:
        damaged.note()


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


def _bom_encoding(path: Path) -> tuple[str, int]:
    """Return the encoding by the byte order mark of a file, and the size of the mark in bytes.

    Raises ``DataError`` for a mark that contradicts the text.
    """
    with open_content(path) as file:
        head = file.read(SAMPLE_BYTES)
    mark, encoding = next(
        (item for item in BYTE_ORDER_MARKS.items() if head.startswith(item[0])), (b"", "utf-8")
    )
    names = UNICODE_ENCODINGS
    actual = _unicode_encoding(head[len(mark) :], encoding)
    if encoding in names and actual not in (None, encoding):
        reason = f"has the byte order mark of {names[encoding]}, but text in {names[actual]}"
        new = shell_word(str(_converted_path(path)))
        skipped = f"tail -c +{len(mark) + 1} {shell_word(str(path))}"
        fix = f"convert the file: {skipped} | iconv -f {names[actual]} -t UTF-8 > {new}"
        raise DataError.for_key("data.paths", path, reason, fix)
    return encoding, len(mark)


def _decode_error(path: Path, line: int, position: int, error: UnicodeDecodeError) -> DataError:
    if error.reason in ("unexpected end of data", "truncated data"):
        fix = "copy the file again: its end is missing"
    elif error.encoding.startswith("utf-8"):
        fix = _conversion_fix(path, position)
    else:
        fix = "repair the file, or remove its byte order mark if it is in another encoding"
    return DataError.for_key("data.paths", path, f"line {line} is not {_encoding_name(error)}", fix)


def _encoding_name(error: UnicodeDecodeError) -> str:
    encoding = error.encoding.upper().removesuffix("-LE").removesuffix("-BE")
    return f"{encoding} (byte 0x{error.object[error.start]:02x})"


def iter_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the line number and the value of each non-blank line of JSON.

    An invalid line yields a ``ValueError`` with the reason. Encodings are those of ``text_chunks``.
    """
    encoding, mark_bytes = _bom_encoding(path)
    if encoding == "utf-8":
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
            yield number, ValueError(f"is not {_encoding_name(error)}")
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


def _unicode_encoding(sample: bytes, bom_encoding: str | None = None) -> str | None:
    """Return UTF-16 or UTF-32 with its byte order if the first bytes of a file suggest it.

    ``bom_encoding``: encoding of the byte order mark, preferred unless another is more likely.
    """
    scores: dict[str, float] = {}
    for name in UNICODE_ENCODINGS:
        text = _decode_sample(sample, name)
        fraction = 1.0 if "\n" in text or " " in text else _top_blocks_fraction(text)
        if fraction >= MIN_TOP_BLOCKS_FRACTION:
            scores[name] = fraction + (name == bom_encoding)
    return max(scores, key=lambda name: scores[name], default=None)


def _conversion_fix(path: Path, position: int | None = None) -> str:
    """Return a fix for a file that is not UTF-8 at byte ``position``, or has a control character.

    Windows-1252 decodes nearly all bytes, so it is suggested only if the result looks like text.
    """
    if compression_name(path) is not None:
        return DECOMPRESS
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
        file.seek(max(0, (position or 0) - SAMPLE_BYTES // 16))
        context = file.read(SAMPLE_BYTES)
    if encoding := _unicode_encoding(head):
        name = UNICODE_ENCODINGS[encoding]
        command = f"convert the file, from {name} without a byte order mark, with: "
        is_truncated = os.path.getsize(path) % (4 if "32" in encoding else 2)
        return (
            "copy the file again, since its end is missing; then " * bool(is_truncated)
            + command
            + (f"iconv -f {name} -t UTF-8 {_redirection(path)}")
        )
    if position is None:
        delete_command = r"tr -d '\000-\010\016-\032\034-\037'"
        return f"remove all control characters: {delete_command} < {_redirection(path)}"
    context = context[context.find(b"\n") + 1 if position > SAMPLE_BYTES // 16 else 0 :]
    if (text := _decode_sample(context, "cp1252")) and _is_latin(text):
        return (
            "convert the file, from Windows-1252 with: "
            f"iconv -f CP1252 -t UTF-8 {_redirection(path)}"
        )
    names = [
        name for encoding, name in OTHER_ENCODINGS.items() if _decode_sample(context, encoding)
    ]
    if not names:
        return "convert the file to UTF-8"
    return (
        f"find its encoding, which may be {' or '.join(names)}, and convert the file with: "
        f"iconv -f ENCODING -t UTF-8 {_redirection(path)}"
    )


def _redirection(path: Path) -> str:
    """Return a file and its converted copy, as typed in a shell."""
    return f"{shell_word(str(path))} > {shell_word(str(_converted_path(path)))}"


def _converted_path(path: Path) -> Path:
    """Return the path of a file's copy in UTF-8."""
    return path.with_name(f"{path.stem}-utf8{path.suffix}")


def _decode_sample(sample: bytes, encoding: str) -> str:
    """Return the text of a sample, which may be truncated; empty if it is not text."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return ""
    has_unassigned = any(unicodedata.category(it) in ("Cn", "Co", "Cs") for it in {*text})
    return "" if has_unassigned or CONTROL_CHARACTERS.search(text) else text


def _top_blocks_fraction(text: str) -> float:
    """Return the fraction of characters in the two most frequent blocks of 256."""
    if len(text) < MIN_CHARACTERS:
        return 0.0
    blocks = Counter(ord(it) >> 8 for it in text)
    return sum(count for _, count in blocks.most_common(2)) / len(text)


def _is_latin(text: str) -> bool:
    """Whether non-ASCII letters are few, and never four different ones in a row."""
    letters = [it for it in text if it.isalpha()]
    non_ascii = sum(not it.isascii() for it in letters)
    runs = re.findall("[^\0-\x7f]{4,}", text)
    return non_ascii <= MAX_NON_ASCII_FRACTION * len(letters) and not any(
        len({*run}) > 1 for run in runs
    )
