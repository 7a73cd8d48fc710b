"""Encodings of files that are not UTF-8: what they may be, and commands that convert them."""

import codecs
import os
import re
import unicodedata
from collections import Counter
from pathlib import Path

from scalewise.typed_override import shell_word

SAMPLE_BYTES = 1 << 16
"""Bytes of a file by which its encoding is guessed."""
CONTROLS = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f]")
"""Control characters that text has not; it has white space, and escapes of terminals."""
COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gzip -dc"),
    b"PK\x03\x04": ("zip", "unzip -p"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
    b"\xfd7zXZ\0": ("xz", "xz -dc"),
    b"BZh91AY&SY": ("bzip2", "bzip2 -dc"),
}
"""First bytes of compressed files, the name of the format, and what unpacks it."""
UNICODE = {
    "utf-32-le": "UTF-32LE",
    "utf-32-be": "UTF-32BE",
    "utf-16-le": "UTF-16LE",
    "utf-16-be": "UTF-16BE",
}
"""Encodings that often have a byte order mark, and what iconv calls them."""
OTHERS = {
    "cp932": "Shift-JIS",
    "gb18030": "GB18030",
    "euc_jp": "EUC-JP",
    "big5": "Big5",
    "cp949": "EUC-KR",
    "cp1251": "Windows-1251",
    "koi8_r": "KOI8-R",
}
"""Encodings that no rule tells apart for certain."""
FEW_ROWS = 0.8
"""Share of UTF-16 characters in the two most frequent rows of 256: an alphabet, and spaces."""
FEWEST_CHARACTERS = 16
"""Characters without a space from which ``FEW_ROWS`` is told."""
FOREIGN_LETTERS = 1 / 3
"""Share of letters beyond ASCII above which a text is not in a Latin alphabet."""


def compression(head: bytes) -> tuple[str, str] | None:
    """Returns the format of a compressed file and the command that unpacks it."""
    return next((found for magic, found in COMPRESSED.items() if head.startswith(magic)), None)


def unicode_encoding(sample: bytes, bom_encoding: str | None = None) -> str | None:
    """Returns UTF-16 or UTF-32 with its byte order, where the first bytes of a file say so.

    ``bom_encoding``: what a byte order mark says, which is believed unless another is likelier.
    """
    found: dict[str, float] = {}
    for name in UNICODE:
        text = _decode_sample(sample, name)
        share = 1.0 if "\n" in text or " " in text else _top_rows_share(text)
        if share >= FEW_ROWS:
            found[name] = share + (name == bom_encoding)
    return max(found, key=lambda name: found[name], default=None)


def conversion_fix(path: Path, position: int | None = None) -> str:
    """Returns how a file is made UTF-8 that is not, at byte ``position`` or at a control character.

    Windows-1252 decodes nearly any bytes, so that it is named only where text comes of it.
    """
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
        file.seek(max(0, (position or 0) - SAMPLE_BYTES // 16))
        near = file.read(SAMPLE_BYTES)
    if encoding := unicode_encoding(head):
        command = f"convert the file, from {UNICODE[encoding]} without a byte order mark, with: "
        odd = os.path.getsize(path) % (4 if "32" in encoding else 2)
        return (
            "copy the file again, whose end is cut off; then " * bool(odd)
            + command
            + (f"iconv -f {UNICODE[encoding]} -t UTF-8 {_files(path)}")
        )
    if position is None:
        deleted = r"tr -d '\000-\010\016-\032\034-\037'"
        return f"remove it, with all of its kind: {deleted} < {_files(path)}"
    near = near[near.find(b"\n") + 1 if position > SAMPLE_BYTES // 16 else 0 :]
    if (text := _decode_sample(near, "cp1252")) and _is_latin(text):
        return f"convert the file, from Windows-1252 with: iconv -f CP1252 -t UTF-8 {_files(path)}"
    names = [name for encoding, name in OTHERS.items() if _decode_sample(near, encoding)]
    if not names:
        return "give a text file in UTF-8"
    return (
        f"find its encoding, which may be {' or '.join(names)}, and convert the file with: "
        f"iconv -f ENCODING -t UTF-8 {_files(path)}"
    )


def _files(path: Path) -> str:
    """Returns a file and the one that it is converted to, as typed in a shell."""
    return f"{shell_word(str(path))} > {shell_word(str(converted_path(path)))}"


def converted_path(path: Path) -> Path:
    """Returns the path of a file's conversion to UTF-8."""
    return path.with_name(f"{path.stem}-utf8{path.suffix}")


def _decode_sample(sample: bytes, encoding: str) -> str:
    """Returns a sample as text, whose end may be cut; empty where it is none."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return ""
    unknown = any(unicodedata.category(it) in ("Cn", "Co", "Cs") for it in {*text})
    return "" if unknown or CONTROLS.search(text) else text


def _top_rows_share(text: str) -> float:
    """Returns the share of characters in the two most frequent rows of 256; 0 of a few."""
    if len(text) < FEWEST_CHARACTERS:
        return 0.0
    rows = Counter(ord(it) >> 8 for it in text)
    return sum(count for _, count in rows.most_common(2)) / len(text)


def _is_latin(text: str) -> bool:
    """Returns whether accented letters are few and never four different ones in a row."""
    letters = [it for it in text if it.isalpha()]
    foreign = sum(not it.isascii() for it in letters)
    runs = re.findall("[^\0-\x7f]{4,}", text)
    return foreign <= FOREIGN_LETTERS * len(letters) and not any(len({*run}) > 1 for run in runs)
