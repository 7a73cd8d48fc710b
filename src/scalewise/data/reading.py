"""The user's text files: which ones a glob names, and the documents inside them."""

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from scalewise.errors import Complaint, DataError

PROSE = frozenset({".txt", ".md", ".rst", ".tex", ".html", ".xml"})
CODE = frozenset(
    {".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh"}
)
PLAIN = PROSE | CODE
"""Suffixes that are read as plain text: one file is one document."""

RECORDS = frozenset({".jsonl", ".parquet"})
"""Suffixes whose records are documents, found in one field."""


def matching(patterns: Sequence[str]) -> list[Path]:
    """Returns the files that the globs name, each once, sorted by path."""
    found = {
        name for p in patterns for name in glob.glob(str(Path(p).expanduser()), recursive=True)
    }
    return [path for path in map(Path, sorted(found)) if path.is_file()]


def path_complaints(
    key: str, patterns: Sequence[str], suffixes: frozenset[str], example: str
) -> Iterator[Complaint]:
    """Yields a complaint for each glob without a file and each file of an unknown suffix."""
    for pattern in patterns:
        files = matching([pattern])
        if not files:
            folder = Path(pattern).expanduser().is_dir()
            reason = "is a folder" if folder else "no such file"
            given = f"{pattern.rstrip('/')}/{Path(example).name}" if folder else example
            yield Complaint(key, pattern, reason, f"give {key}=['{given}']")
        for suffix in sorted({file.suffix for file in files} - suffixes):
            known = " ".join(sorted(suffixes))
            yield Complaint(key, pattern, f"unknown suffix {suffix!r}", f"use one of {known}")


def documents(path: Path, field: str | None) -> Iterator[str]:
    """Yields the documents of a file: itself, or ``field`` of each record of .jsonl and .parquet.

    Bytes that are not UTF-8 become U+FFFD. Raises ``DataError`` for a file that cannot be read,
    a line that is not JSON and a record without the field.
    """
    try:
        if path.suffix == ".jsonl":
            yield from _jsonl(path, str(field))
        elif path.suffix == ".parquet":
            yield from _parquet(path, str(field))
        else:
            yield path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError.one(
            "data.paths", path, f"cannot be read: {error.strerror or error}", "mend or omit it"
        ) from error


def _jsonl(path: Path, field: str) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                reason = f"line {number} is not JSON ({error.msg})"
                raise DataError.one("data.paths", path, reason, "mend the line") from error
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                names = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                reason = f"line {number} of {path} has no text there; it has: {names}"
                raise DataError.one("data.field", field, reason, "name another data.field")
            yield record[field]


def _parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        cure = "pip install 'scalewise[hf]'"
        raise DataError.one("data.paths", path, "reading .parquet needs pyarrow", cure) from error
    try:
        with parquet.ParquetFile(path) as file:
            texts = [c.name for c in file.schema_arrow if str(c.type) in ("string", "large_string")]
            if field not in texts:
                reason = f"{path} has no text there; its columns of text: {', '.join(texts)}"
                raise DataError.one("data.field", field, reason, "name another data.field")
            for batch in file.iter_batches(columns=[field]):
                yield from filter(None, batch.column(0).to_pylist())
    except pyarrow.ArrowInvalid as error:
        reason = f"is not whole parquet ({error})"
        raise DataError.one("data.paths", path, reason, "copy the file again") from error
