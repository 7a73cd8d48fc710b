"""Encodings of text files: detection, and commands that convert them to UTF-8."""

import codecs
import os
import re
import unicodedata
from collections import Counter
from pathlib import Path

from scalewise.data.compressed_files import compression_name, open_content
from scalewise.errors import DataError
from scalewise.typed_override import shell_word

ISO_2022 = re.compile(r"\x1b\$(?:(\)C)|(\)[AG])|[@AB(])")
"""Escape sequence that begins two-byte characters in ISO-2022 encodings, which are ASCII bytes:
those of Korean, of Chinese, and else of Japanese."""

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


def bom_encoding(path: Path) -> tuple[str, int]:
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


def iso_2022_error(path: Path, line: int, escape: re.Match[str]) -> DataError:
    """Return the error of a line with an escape sequence that ``ISO_2022`` matches."""
    name, language = "ISO-2022-JP-2", "Japanese"
    if escape[1] or escape[2]:
        name, language = ("ISO-2022-KR", "Korean") if escape[1] else ("ISO-2022-CN", "Chinese")
    fix = f"convert the file: iconv -f {name} -t UTF-8 {_redirection(path)}"
    if compression_name(path) is not None:
        fix = DECOMPRESS
    reason = f"line {line} is ISO-2022 (an encoding of {language}), not UTF-8"
    return DataError.for_key("data.paths", path, reason, fix)


def decode_error(path: Path, line: int, position: int, error: UnicodeDecodeError) -> DataError:
    """Return the error of a line that cannot be decoded, at byte ``position`` of the file."""
    if error.reason in ("unexpected end of data", "truncated data"):
        fix = "copy the file again: its end is missing"
    elif error.encoding.startswith("utf-8"):
        fix = conversion_fix(path, position)
    else:
        fix = "repair the file, or remove its byte order mark if it is in another encoding"
    return DataError.for_key("data.paths", path, f"line {line} is not {encoding_name(error)}", fix)


def encoding_name(error: UnicodeDecodeError) -> str:
    """Return the name of the encoding that a file does not have, and the invalid byte."""
    encoding = error.encoding.upper().removesuffix("-LE").removesuffix("-BE")
    return f"{encoding} (byte 0x{error.object[error.start]:02x})"


def check_unmarked(path: Path) -> None:
    """Raise ``DataError`` for JSON lines in UTF-16 or UTF-32 without a byte order mark."""
    with open_content(path) as file:
        sample = file.read(SAMPLE_BYTES)
    if b"\0" in sample[:4] and (name := UNICODE_ENCODINGS.get(_unicode_encoding(sample) or "")):
        reason = f"is {name} without a byte order mark, not UTF-8"
        raise DataError.for_key("data.paths", path, reason, conversion_fix(path))


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


def conversion_fix(path: Path, position: int | None = None) -> str:
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
