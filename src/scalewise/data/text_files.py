"""Text files: strict decoding, and the documents in them."""

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

PROSE_SUFFIXES = frozenset({".txt", ".md", ".rst", ".tex", ".html", ".xml"})
CODE_SUFFIXES = frozenset(
    {".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh"}
)
PLAIN_SUFFIXES = PROSE_SUFFIXES | CODE_SUFFIXES
"""Suffixes of plain text files; each file is one document."""

RECORD_SUFFIXES = frozenset({".jsonl", ".parquet"})
"""Suffixes of files with records; one field of each record is a document."""

CHUNK_BYTES = 1 << 20
"""Number of bytes of a plain text file that are decoded at once."""

REPLACEMENT = "\ufffd"
MIN_CHARACTERS_PER_REPLACEMENT = 1000
"""Characters per replacement character below which a note is printed."""

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose mark is a prefix of it
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
"""Encodings by byte order mark; a file without a mark is UTF-8."""


@dataclass(frozen=True)
class Document:
    """Text of a file, in chunks that can be read once."""

    chunks: Iterable[str]
    """Consecutive parts of the text."""
    source: str
    """File, and the line or row in it, for error messages."""


def text_chunks(path: Path) -> Iterator[str]:
    """Yield the decoded text of a file in chunks, with ``\\n`` line ends.

    The encoding is UTF-8, or UTF-16 and UTF-32 with a byte order mark, which is removed. Raises
    ``DataError`` with the line of invalid bytes or of a control character. Prints a note for many
    replacement characters, which an earlier conversion has left.
    """
    with regular_files.open_binary(path) as file:
        encoding = _bom_encoding(path, file)
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), True)
        line, is_final, characters, replaced = 1, False, 0, 0
        while not is_final:
            data = file.read(CHUNK_BYTES)
            is_final = len(data) < CHUNK_BYTES
            try:
                text = decoder.decode(data, final=is_final)
            except UnicodeDecodeError as error:
                line += len(re.findall(r"\r\n?|\n", error.object[: error.start].decode(encoding)))
                position = file.tell() - len(error.object) + error.start
                raise _decode_error(path, line, position, error) from error
            if match := text_encodings.CONTROL_CHARACTERS.search(text):
                line += text.count("\n", 0, match.start())
                name = "NUL" if match[0] == "\0" else f"control (0x{ord(match[0]):02x})"
                reason = f"line {line} has a {name} character, which is not text"
                raise DataError.for_key(
                    "data.paths", path, reason, text_encodings.conversion_fix(path)
                )
            line += text.count("\n")
            characters, replaced = characters + len(text), replaced + text.count(REPLACEMENT)
            if text:
                yield text
    note_replaced(str(path), replaced, characters)


def note_replaced(name: str, replaced: int, characters: int) -> None:
    """Print a note if an earlier conversion of a file has lost many characters."""
    if replaced * MIN_CHARACTERS_PER_REPLACEMENT > characters:
        print_note_once(
            f"{name} has {replaced:,} replacement characters (U+FFFD) among {characters:,}: "
            "it was converted from another encoding than its own"
        )


def read_text(path: Path) -> str:
    """Return the text of a file, decoded as in ``text_chunks``."""
    return "".join(text_chunks(path))


def _bom_encoding(path: Path, file: io.BufferedReader) -> str:
    """Return the encoding by the byte order mark of a file, and skip the mark.

    Raises ``DataError`` for a mark that contradicts the text, and for a compressed file.
    """
    head = file.read(text_encodings.SAMPLE_BYTES)
    if compression := text_encodings.compression(head):
        unpacked = path.with_name(f"{path.stem}-unpacked{path.suffix}")
        command = f"{compression[1]} < {shell_word(str(path))} > {shell_word(str(unpacked))}"
        command = command.replace("-p <", "-p")  # unzip does not read from a pipe
        raise DataError.for_key(
            "data.paths", path, f"is {compression[0]} data", f"unpack it: {command}"
        )
    mark, encoding = next(
        (item for item in BYTE_ORDER_MARKS.items() if head.startswith(item[0])), (b"", "utf-8")
    )
    file.seek(len(mark))
    names = text_encodings.UNICODE_ENCODINGS
    actual = text_encodings.unicode_encoding(head[len(mark) :], encoding)
    if encoding in names and actual not in (None, encoding):
        reason = f"has the byte order mark of {names[encoding]}, but text in {names[actual]}"
        new = shell_word(str(text_encodings.converted_path(path)))
        skipped = f"tail -c +{len(mark) + 1} {shell_word(str(path))}"
        fix = f"convert the file: {skipped} | iconv -f {names[actual]} -t UTF-8 > {new}"
        raise DataError.for_key("data.paths", path, reason, fix)
    return encoding


def _decode_error(path: Path, line: int, position: int, error: UnicodeDecodeError) -> DataError:
    if error.reason in ("unexpected end of data", "truncated data"):
        fix = "copy the file again: its end is missing"
    elif error.encoding.startswith("utf-8"):
        fix = text_encodings.conversion_fix(path, position)
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
        value = json.loads(text, parse_constant=no_constant)
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


def no_constant(name: str) -> Any:
    """Raise ``ValueError`` for NaN and Infinity, which Python accepts in JSON."""
    raise json.JSONDecodeError(f"{name} is not a JSON value", name, 0)


def iter_documents(path: Path, field: str | None) -> Iterator[Document]:
    """Yield the documents of a file: the file, or ``field`` of each record of .jsonl and .parquet.

    Records with a null field are skipped, with a note. Raises ``DataError`` for a file that cannot
    be read, invalid text, a line that is not JSON, and a record without the field.
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
    """Return the error of a file that the operating system cannot read."""
    reason = f"cannot be read: {error.strerror or error}"
    return DataError.for_key("data.paths", path, reason, "repair the file, or omit it")


def skip_nulls(
    texts: Iterable[tuple[str, str | None]], name: str, field: str
) -> Iterator[Document]:
    """Yield a document for each text with its source, and print a note on the number of nulls.

    Raises ``DataError`` for a text with a NUL character.
    """
    null_sources: list[str] = []
    characters = replaced = 0
    for source, text in texts:
        if text is None:
            null_sources.append(source)
            continue
        if "\0" in text:
            reason = f"{source} has a NUL character in this field, which is not text"
            raise DataError.for_key("data.field", field, reason, "remove it")
        characters, replaced = characters + len(text), replaced + text.count(REPLACEMENT)
        yield Document((text,), source)
    note_replaced(name, replaced, characters)
    if null_sources:
        count = f"{len(null_sources)} record{'s' * (len(null_sources) > 1)}"
        print_note_once(
            f"skipped {count} of {name} without {field} (null), first: {null_sources[0]}"
        )


@cache
def print_note_once(line: str) -> None:
    """Print a line on stderr, once per process, since files are read several times."""
    print_lines(line, stderr=True)


def _iter_jsonl(path: Path, field: str) -> Iterator[tuple[str, str | None]]:
    for number, record in iter_json_lines(path):
        if isinstance(record, ValueError):
            reason = f"line {number} {record}"
            raise DataError.for_key("data.paths", path, reason, "correct the line") from record
        if not isinstance(record, dict):
            reason = f"line {number} is not a JSON object but a {type(record).__name__}"
            raise DataError.for_key("data.paths", path, reason, "correct the line")
        if not isinstance(text := record.get(field, 0), str | None):
            names = ", ".join(record) or "nothing"
            reason = f"line {number} of {path} has no text in this field; its fields: {names}"
            raise DataError.for_key("data.field", field, reason, "set another data.field")
        yield f"{path.name} line {number}", text


def _iter_parquet(path: Path, field: str) -> Iterator[tuple[str, str | None]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        fix = "pip install 'scalewise[hf]'"
        raise DataError.for_key(
            "data.paths", path, "reading .parquet requires pyarrow", fix
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            text_columns = [
                column.name for column in file.schema_arrow if is_string_type(column.type)
            ]
            if field not in text_columns:
                column_types = {column.name: column.type for column in file.schema_arrow}
                reason = f"{path} has no such column; its text columns: {', '.join(text_columns)}"
                if field in column_types:
                    reason = f"is a column of type {column_types[field]} in {path}, not of text"
                    reason += f"; its text columns: {', '.join(text_columns) or 'none'}"
                raise DataError.for_key("data.field", field, reason, "set another data.field")
            check_columns(path, file.schema_arrow.names)
            row = 0
            for batch in file.iter_batches(columns=[field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield f"{path.name} row {row}", text
    except pyarrow.ArrowInvalid as error:
        reason = f"is not a complete parquet file ({error})"
        raise DataError.for_key("data.paths", path, reason, "copy the file again") from error


def check_columns(path: Path, names: Sequence[str]) -> None:
    """Raise ``DataError`` for two columns with the same name, since only one would be read."""
    if duplicates := sorted(name for name, count in Counter(names).items() if count > 1):
        reason = f"has more than one column {', '.join(duplicates)}"
        raise DataError.for_key("data.paths", path, reason, "rename all but one of them")


def is_string_type(data_type: "pyarrow.DataType") -> bool:
    """Whether an Arrow type is a string type, or a dictionary of one."""
    from pyarrow import types

    if types.is_dictionary(data_type):
        return is_string_type(data_type.value_type)
    return bool(
        types.is_string(data_type)
        or types.is_large_string(data_type)
        or types.is_string_view(data_type)
    )
