"""Text files: strict decoding, and the documents inside the files."""

import codecs
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalewise import regular_files
from scalewise.console import print_lines
from scalewise.data import text_encodings
from scalewise.data.file_patterns import file_suffix
from scalewise.errors import DataError
from scalewise.typed_override import shell_word

if TYPE_CHECKING:
    import pyarrow

PROSE = frozenset({".txt", ".md", ".rst", ".tex", ".html", ".xml"})
CODE = frozenset(
    {".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh"}
)
PLAIN = PROSE | CODE
"""Suffixes that are read as plain text: one file is one document."""

RECORDS = frozenset({".jsonl", ".parquet"})
"""Suffixes whose records are documents, found in one field."""

CHUNK_BYTES = 1 << 20
"""Bytes of a plain text file that are decoded at once."""

REPLACEMENT = "\ufffd"
MOST_REPLACED = 1000
"""Characters for each replacement character, below which these are noted."""

BOMS = {
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
"""Encodings by byte order mark; a file without a mark is UTF-8."""


@dataclass(frozen=True)
class Document:
    """A text of a file, in chunks that can be read once.

    ``source``: the file, and the line or row in it, for error messages.
    """

    chunks: Iterable[str]
    source: str


def text_chunks(path: Path) -> Iterator[str]:
    """Yields a text file in chunks: strictly decoded, lines end in ``\\n``, no byte order mark.

    UTF-8, or UTF-16 and UTF-32 with a byte order mark. Raises ``DataError`` with the line of
    bytes that are no text in that encoding, and of a control character that text has not. Many
    replacement characters, of an earlier conversion, are noted.
    """
    with regular_files.open_binary(path) as file:
        encoding = _bom_encoding(path, file)
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), True)
        line, final, characters, replaced = 1, False, 0, 0
        while not final:
            data = file.read(CHUNK_BYTES)
            final = len(data) < CHUNK_BYTES
            try:
                text = decoder.decode(data, final=final)
            except UnicodeDecodeError as error:
                line += len(re.findall(r"\r\n?|\n", error.object[: error.start].decode(encoding)))
                position = file.tell() - len(error.object) + error.start
                raise _decode_error(path, line, position, error) from error
            if control := text_encodings.CONTROLS.search(text):
                line += text.count("\n", 0, control.start())
                name = "NUL" if control[0] == "\0" else f"control (0x{ord(control[0]):02x})"
                reason = f"line {line} has a {name} character, which text has not"
                raise DataError.for_key(
                    "data.paths", path, reason, text_encodings.conversion_fix(path)
                )
            line += text.count("\n")
            characters, replaced = characters + len(text), replaced + text.count(REPLACEMENT)
            if text:
                yield text
    note_replaced(str(path), replaced, characters)


def note_replaced(name: str, replaced: int, characters: int) -> None:
    """Notes how many characters of a file an earlier conversion has lost, if they are many."""
    if replaced * MOST_REPLACED > characters:
        print_note_once(
            f"{name} has {replaced:,} replacement characters (U+FFFD) among {characters:,}: "
            "it was converted from another encoding than its own"
        )


def read_text(path: Path) -> str:
    """Returns the text of a file, decoded as ``text_chunks`` does."""
    return "".join(text_chunks(path))


def _bom_encoding(path: Path, file: io.BufferedReader) -> str:
    """Returns the encoding by the byte order mark of a file, which is read past.

    Raises ``DataError`` for a mark that is not that of the text, and for a compressed file.
    """
    head = file.read(text_encodings.SAMPLE_BYTES)
    if packed := text_encodings.compression(head):
        unpacked = path.with_name(f"{path.stem}-unpacked{path.suffix}")
        command = f"{packed[1]} < {shell_word(str(path))} > {shell_word(str(unpacked))}"
        command = command.replace("-p <", "-p")  # unzip reads no pipe
        raise DataError.for_key("data.paths", path, f"is {packed[0]} data", f"unpack it: {command}")
    mark, encoding = next(
        (found for found in BOMS.items() if head.startswith(found[0])), (b"", "utf-8")
    )
    file.seek(len(mark))
    known = text_encodings.UNICODE
    actual = text_encodings.unicode_encoding(head[len(mark) :], encoding)
    if encoding in known and actual not in (None, encoding):
        reason = f"has the byte order mark of {known[encoding]}, but text in {known[actual]}"
        new = shell_word(str(text_encodings.converted_path(path)))
        skipped = f"tail -c +{len(mark) + 1} {shell_word(str(path))}"
        fix = f"convert the file: {skipped} | iconv -f {known[actual]} -t UTF-8 > {new}"
        raise DataError.for_key("data.paths", path, reason, fix)
    return encoding


def _decode_error(path: Path, line: int, position: int, error: UnicodeDecodeError) -> DataError:
    if error.reason in ("unexpected end of data", "truncated data"):
        fix = "copy the file again: its end is cut off"
    elif error.encoding.startswith("utf-8"):
        fix = text_encodings.conversion_fix(path, position)
    else:
        fix = "mend the file, or remove its byte order mark if it is in another encoding"
    return DataError.for_key("data.paths", path, f"line {line} is not {_encoding_name(error)}", fix)


def _encoding_name(error: UnicodeDecodeError) -> str:
    encoding = error.encoding.upper().removesuffix("-LE").removesuffix("-BE")
    return f"{encoding} (byte 0x{error.object[error.start]:02x})"


def iter_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yields the line number and the value of each line of JSON that is not blank.

    A ``ValueError`` stands for a line that cannot be read, with the reason. Encodings are those
    of ``text_chunks``.
    """
    with regular_files.open_binary(path) as file:
        encoding = _bom_encoding(path, file)
        if encoding == "utf-8":
            lines: Iterable[bytes | str] = (part for raw in file for part in raw.splitlines())
        else:
            lines = _iter_lines(text_chunks(path))
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
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        yield from whole
    yield rest


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text; raises ``ValueError`` with what is wrong.

    Stricter than ``json.loads``: no NaN or Infinity, no half of a surrogate pair.
    """
    try:
        value = json.loads(text, parse_constant=no_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("has half a character (a lone surrogate)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("is JSON that is nested too deeply") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise ValueError(f"is not JSON that can be read ({error})") from error
    return value


def no_constant(name: str) -> Any:
    """Raises ``ValueError`` for NaN and Infinity, which Python reads in JSON."""
    raise json.JSONDecodeError(f"{name} is no JSON value", name, 0)


def iter_documents(path: Path, field: str | None) -> Iterator[Document]:
    """Yields the documents of a file: itself, or ``field`` of each record of .jsonl and .parquet.

    Records whose field is null are left out, with a note. Raises ``DataError`` for a file that
    cannot be read, text that is not in its encoding, a line that is not JSON and a record without
    the field.
    """
    try:
        if file_suffix(path) == ".jsonl":
            yield from skip_nulls(_iter_jsonl(path, str(field)), str(path), str(field))
        elif file_suffix(path) == ".parquet":
            yield from skip_nulls(_iter_parquet(path, str(field)), str(path), str(field))
        else:
            chunks = text_chunks(path)
            first = next(chunks, "")  # opens the file
            yield Document(chain([first], chunks), path.name)
    except OSError as error:
        raise read_error(path, error) from error


def read_error(path: Path, error: OSError) -> DataError:
    """Returns the error of a file that the system does not read."""
    reason = f"cannot be read: {error.strerror or error}"
    return DataError.for_key("data.paths", path, reason, "mend or omit it")


def skip_nulls(
    texts: Iterable[tuple[str, str | None]], name: str, field: str
) -> Iterator[Document]:
    """Yields documents of texts with their sources, and notes how many are null.

    Raises ``DataError`` for a text with a NUL character.
    """
    nulls: list[str] = []
    characters = replaced = 0
    for source, text in texts:
        if text is None:
            nulls.append(source)
            continue
        if "\0" in text:
            reason = f"{source} has a NUL character there, which text has not"
            raise DataError.for_key("data.field", field, reason, "remove it")
        characters, replaced = characters + len(text), replaced + text.count(REPLACEMENT)
        yield Document((text,), source)
    note_replaced(name, replaced, characters)
    if nulls:
        count = f"{len(nulls)} record{'s' * (len(nulls) > 1)}"
        print_note_once(f"left out {count} of {name} without {field} (null), the first: {nulls[0]}")


@cache
def print_note_once(line: str) -> None:
    """Prints a line on stderr, once in a process: files are read several times."""
    print_lines(line, stderr=True)


def _iter_jsonl(path: Path, field: str) -> Iterator[tuple[str, str | None]]:
    for number, record in iter_json_lines(path):
        if isinstance(record, ValueError):
            reason = f"line {number} {record}"
            raise DataError.for_key("data.paths", path, reason, "mend the line") from record
        if not isinstance(record, dict):
            reason = f"line {number} is no JSON object but a {type(record).__name__}"
            raise DataError.for_key("data.paths", path, reason, "mend the line")
        if not isinstance(text := record.get(field, 0), str | None):
            names = ", ".join(record) or "nothing"
            reason = f"line {number} of {path} has no text there; it has: {names}"
            raise DataError.for_key("data.field", field, reason, "name another data.field")
        yield f"{path.name} line {number}", text


def _iter_parquet(path: Path, field: str) -> Iterator[tuple[str, str | None]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        fix = "pip install 'scalewise[hf]'"
        raise DataError.for_key(
            "data.paths", path, "reading .parquet needs pyarrow", fix
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            texts = [column.name for column in file.schema_arrow if is_string_type(column.type)]
            if field not in texts:
                names = {column.name: column.type for column in file.schema_arrow}
                reason = f"{path} has no text there; its columns of text: {', '.join(texts)}"
                if field in names:
                    reason = f"is a column of {names[field]} in {path}, not of text"
                    reason += f"; its columns of text: {', '.join(texts) or 'none'}"
                raise DataError.for_key("data.field", field, reason, "name another data.field")
            check_columns(path, file.schema_arrow.names)
            row = 0
            for batch in file.iter_batches(columns=[field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield f"{path.name} row {row}", text
    except pyarrow.ArrowInvalid as error:
        reason = f"is not whole parquet ({error})"
        raise DataError.for_key("data.paths", path, reason, "copy the file again") from error


def check_columns(path: Path, names: Sequence[str]) -> None:
    """Raises ``DataError`` for two columns of one name, of which only one would be read."""
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        reason = f"has more than one column {', '.join(twice)}"
        raise DataError.for_key("data.paths", path, reason, "rename all but one of them")


def is_string_type(kind: "pyarrow.DataType") -> bool:
    """Returns whether an Arrow type holds text: every string type, and dictionaries of them."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return is_string_type(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
