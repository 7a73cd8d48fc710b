"""Records and documents of .jsonl, .json and .parquet files.

Reading is strict: an invalid record is an error, or is yielded with the reason.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scalewise.data.compressed_files import check_pointer
from scalewise.data.input_files import file_suffix, read_error
from scalewise.data.text_files import (
    DamagedText,
    Document,
    iter_json_lines,
    no_constant,
    read_text,
    text_chunks,
    unique_keys,
    warn_once,
)
from scalewise.errors import DataError

if TYPE_CHECKING:
    import pyarrow

RECORD_SUFFIXES = frozenset({".jsonl", ".parquet"})
"""Suffixes of files with records; one field of each record is a document."""
CHAT_SUFFIXES = RECORD_SUFFIXES | {".json"}
"""Suffixes of files with conversations; a .json file is a list of records."""


@dataclass(frozen=True)
class BadRecord:
    """Invalid record, with the reason."""

    path: Path
    """File of the record."""
    number: int
    """Line of a .jsonl file, or index from 1 of the record in another file."""
    reason: str
    """Reason, without a subject."""

    def __str__(self) -> str:
        return f"{self.path.name}:{self.number} {self.reason}"


class TemplateLimitError(DataError):
    """Chat template that exceeds the time or memory limit."""

    @classmethod
    def for_template(cls, template: Path, reason: str) -> "TemplateLimitError":
        """Return the error of a template file."""
        fix = "repair the template, or put another one next to data.tokenizer"
        return cls.for_key("data.tokenizer", template, f"the chat template {reason}", fix)

    def with_record(self, record: str) -> "TemplateLimitError":
        """Return the same error with the name of the record."""
        return TemplateLimitError(
            replace(issue, reason=f"{issue.reason} at {record}") for issue in self.issues
        )


ParsedRecord = TypeVar("ParsedRecord")


def iter_records(
    path: Path, parse_record: Callable[[dict[str, Any]], ParsedRecord]
) -> Iterator[ParsedRecord | BadRecord]:
    """Yield the result of ``parse_record`` for each record of a file, or a ``BadRecord``.

    ``parse_record`` raises ``ValueError`` for invalid records. Raises ``DataError`` for a file that
    cannot be read at all.
    """
    damaged = DamagedText(str(path))
    number = 0
    for number, record in _iter_file_records(path):
        try:
            if isinstance(record, ValueError):
                raise record
            if not isinstance(record, dict):
                raise ValueError("is not an object")
            if has_nul(record):
                raise ValueError("has a NUL character, which is not text")
            for text in _iter_texts(record):
                damaged.count(text)
            yield parse_record(record)
        except TemplateLimitError as error:
            raise error.with_record(f"{path.name}:{number}") from error
        except ValueError as error:
            yield BadRecord(path, number, str(error))
        except RecursionError:
            yield BadRecord(path, number, "is nested too deeply")
    damaged.note()
    if not number:
        warn_once(f"{path} has no records")


def _iter_file_records(path: Path) -> Iterator[tuple[int, object]]:
    """Yield each record with its number; a ValueError for one that cannot be read."""
    try:
        if file_suffix(path) == ".jsonl":
            yield from iter_json_lines(path)
        elif file_suffix(path) == ".json":
            yield from enumerate(_iter_json_list(path), 1)
        else:
            yield from enumerate(_iter_parquet_rows(path), 1)
    except OSError as error:
        raise read_error(path, error) from error


def _iter_json_list(path: Path) -> list[object]:
    try:
        # a lone surrogate is an error of its record, not of the file
        records = json.loads(
            read_text(path), parse_constant=no_constant, object_pairs_hook=unique_keys
        )
    except (ValueError, RecursionError) as error:
        reason = f"is not valid JSON ({error})"
        raise DataError.for_key("data.paths", path, reason, "repair the file") from error
    if not isinstance(records, list):
        raise DataError.for_key("data.paths", path, "is not a list of records", "use .jsonl")
    return records


def _iter_parquet_rows(path: Path) -> Iterator[object]:
    with _open_parquet(path) as file:
        _check_columns(path, file.schema_arrow.names)
        for batch in file.iter_batches():
            yield from map(_without_nulls, _iter_rows(batch))


def _iter_rows(batch: "pyarrow.RecordBatch") -> Iterator[Any]:
    """Yield the rows of a batch; a ``ValueError`` for one that has no value in Python."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError) as error:  # invalid UTF-8, or a date after the year 9999
        if batch.num_rows == 1:
            yield ValueError(f"cannot be read ({error})")
            return
        for index in range(batch.num_rows):
            yield from _iter_rows(batch.slice(index, 1))


def _without_nulls(value: Any) -> Any:
    """Return a row without null entries, which parquet adds for missing keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


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


def skip_nulls(
    texts: Iterable[tuple[str, str | None]], name: str, field: str
) -> Iterator[Document]:
    """Yield a document for each text with its source, and print a note on the number of nulls.

    Raises ``DataError`` for a text with a NUL character.
    """
    null_sources: list[str] = []
    damaged = DamagedText(name)
    source = ""
    for source, text in texts:
        if text is None:
            null_sources.append(source)
            continue
        if "\0" in text:
            reason = f"{source} has a NUL character in this field, which is not text"
            raise DataError.for_key("data.field", field, reason, "remove it")
        damaged.count(text)
        yield Document((text,), source)
    damaged.note()
    if not source:
        warn_once(f"{name} has no records")
    if null_sources:
        count = f"{len(null_sources)} record{'s' * (len(null_sources) > 1)}"
        warn_once(f"skipped {count} of {name} without {field} (null), first: {null_sources[0]}")


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
    with _open_parquet(path) as file:
        text_columns = [column.name for column in file.schema_arrow if _is_string_type(column.type)]
        if field not in text_columns:
            column_types = {column.name: column.type for column in file.schema_arrow}
            reason = f"{path} has no such column; its text columns: {', '.join(text_columns)}"
            if field in column_types:
                reason = f"is a column of type {column_types[field]} in {path}, not of text"
                reason += f"; its text columns: {', '.join(text_columns) or 'none'}"
            raise DataError.for_key("data.field", field, reason, "set another data.field")
        _check_columns(path, file.schema_arrow.names)
        row = 0
        for batch in file.iter_batches(columns=[field]):
            for record in _iter_rows(batch):
                row += 1
                if isinstance(record, ValueError):
                    reason = f"row {row} {record}"
                    raise DataError.for_key("data.paths", path, reason, "correct the row")
                yield f"{path.name} row {row}", record[field]


@contextmanager
def _open_parquet(path: Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Open a parquet file; raises ``DataError`` without pyarrow, and for an incomplete file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        fix = "pip install 'scalewise[hf]'"
        raise DataError.for_key(
            "data.paths", path, "reading .parquet requires pyarrow", fix
        ) from error
    check_pointer("data.paths", path)
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except pyarrow.ArrowInvalid as error:
        reason = f"is not a complete parquet file ({error})"
        raise DataError.for_key("data.paths", path, reason, "copy the file again") from error


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Raise ``DataError`` for two columns with the same name, since only one would be read."""
    if duplicates := sorted(name for name, count in Counter(names).items() if count > 1):
        reason = f"has more than one column {', '.join(duplicates)}"
        raise DataError.for_key("data.paths", path, reason, "rename all but one of them")


def _is_string_type(data_type: "pyarrow.DataType") -> bool:
    """Whether an Arrow type is a string type, or a dictionary of one."""
    from pyarrow import types

    if types.is_dictionary(data_type):
        return _is_string_type(data_type.value_type)
    return bool(
        types.is_string(data_type)
        or types.is_large_string(data_type)
        or types.is_string_view(data_type)
    )


def has_surrogate(value: object) -> bool:
    """Whether a JSON value contains a lone surrogate, which cannot be encoded."""
    return any(map(_contains_surrogate, _iter_texts(value)))


def has_nul(value: object) -> bool:
    """Whether a JSON value contains a NUL character."""
    return any("\0" in text for text in _iter_texts(value))


def _contains_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _iter_texts(value: object) -> Iterator[str]:
    """Yield the texts of a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _iter_texts(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_texts(item)
