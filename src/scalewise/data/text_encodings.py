"""Detection of text encodings other than UTF-8, and commands that convert such files."""

import codecs
import os
import re
import unicodedata
from collections import Counter
from pathlib import Path

from scalewise.typed_override import shell_word

SAMPLE_BYTES = 1 << 16
"""Number of bytes for the detection of an encoding."""
CONTROL_CHARACTERS = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f]")
"""Control characters that text does not contain; white space and terminal escapes are allowed."""
COMPRESSION_FORMATS = {
    b"\x1f\x8b": ("gzip", "gzip -dc"),
    b"PK\x03\x04": ("zip", "unzip -p"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
    b"\xfd7zXZ\0": ("xz", "xz -dc"),
    b"BZh91AY&SY": ("bzip2", "bzip2 -dc"),
}
"""Name and decompression command of compressed formats, by the first bytes of a file."""
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
"""Encodings that cannot be told apart reliably, and their names in iconv."""
MIN_TOP_BLOCKS_FRACTION = 0.8
"""Minimum fraction of UTF-16 characters in the two most frequent blocks of 256: an alphabet, and
spaces."""
MIN_CHARACTERS = 16
"""Minimum number of characters without a space to apply ``MIN_TOP_BLOCKS_FRACTION``."""
MAX_NON_ASCII_FRACTION = 1 / 3
"""Fraction of non-ASCII letters above which a text is not in a Latin alphabet."""


def compression(head: bytes) -> tuple[str, str] | None:
    """Return the format of a compressed file and the command that decompresses it."""
    return next(
        (
            format_command
            for magic, format_command in COMPRESSION_FORMATS.items()
            if head.startswith(magic)
        ),
        None,
    )


def unicode_encoding(sample: bytes, bom_encoding: str | None = None) -> str | None:
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
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
        file.seek(max(0, (position or 0) - SAMPLE_BYTES // 16))
        context = file.read(SAMPLE_BYTES)
    if encoding := unicode_encoding(head):
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
    return f"{shell_word(str(path))} > {shell_word(str(converted_path(path)))}"


def converted_path(path: Path) -> Path:
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
