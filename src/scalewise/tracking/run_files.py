"""The files of a run's folder: JSON written whole or not at all, metrics row by row."""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Self

import yaml

from scalewise import atomic, bounded_yaml, regular_files
from scalewise.errors import ConfigError
from scalewise.redaction import redact
from scalewise.tracking.metric_names import METRICS
from scalewise.tracking.record_types import RECORDS, type_mismatches

FACTS = "wandb/facts.json"
"""What rank 0 tells about its W&B run while it trains, relative to the run's folder."""


class RecordError(ConfigError):
    """A file of a run folder that is damaged."""

    @classmethod
    def for_file(cls, path: Path, reason: str, fix: str = "put a copy of it back") -> Self:
        """Returns the error of one file."""
        return cls.for_key("", "", f"{path} {reason}", fix)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes ``content`` so that a reader sees the old file or the new one, never a part."""
    write_text(path, json_text(content, indent=2) + "\n")


def json_text(content: object, *, indent: int | None = None, ascii_only: bool = True) -> str:
    """Returns content as JSON; NaN and infinities, for which JSON has no number, become null."""
    plain = _nan_to_none(content)
    return json.dumps(plain, indent=indent, default=str, ensure_ascii=ascii_only, allow_nan=False)


def _nan_to_none(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _nan_to_none(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_nan_to_none(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` so that a reader sees the old file or the new one, never a part.

    Secrets of the environment are replaced by ``[hidden]``.
    """
    atomic.write_atomic(path, redact(text).encode("utf-8", errors="backslashreplace"))


def copy_file(source: Path, path: Path) -> None:
    """Copies a file so that a reader sees the old file or the new one, never a part."""
    atomic.copy_atomic(source, path)


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object, or an empty one where the file is absent or damaged."""
    try:
        return load_json(path)
    except RecordError:
        return {}


def load_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object, or an empty one where the file is absent.

    Raises ``RecordError`` where the file is damaged: it cannot be parsed, or a value is not of the
    type that ``RECORDS`` declares for a file of this name.
    """
    return _load(path, json.loads)


def load_yaml(path: Path) -> dict[str, Any]:
    """Returns a YAML mapping as ``load_json`` does a JSON object."""
    return _load(path, bounded_yaml.load_yaml)


def _load(path: Path, parse: Callable[[str], object]) -> dict[str, Any]:
    try:
        content = parse(regular_files.read_text(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RecordError.for_file(path, f"cannot be read: {error.strerror}") from None
    except RecursionError:
        raise RecordError.for_file(path, "is damaged: it is nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())[:120]
        raise RecordError.for_file(path, f"is damaged: {why}") from None
    if not isinstance(content, dict):
        raise RecordError.for_file(
            path, f"is damaged: it holds no mapping but a {type(content).__name__}"
        )
    for mismatch in type_mismatches(content, RECORDS.get(path.name, object)):
        raise RecordError.for_file(path, f"is damaged: {mismatch}")
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns a YAML mapping, or an empty one where the file is absent or damaged."""
    try:
        return load_yaml(path)
    except RecordError:
        return {}


DIGITS = 18
"""Digits of the largest step: it is an integer of 64 bits."""


class MetricsFile:
    """``metrics.csv``: one row per optimizer step, one column per metric, flushed per batch."""

    def __init__(self, path: Path, *, after_step: int = 0, earlier: Path | None = None) -> None:
        """Opens the file to append to; rows above ``after_step`` are dropped.

        ``earlier`` is the file of the run that this one resumes: its rows come first.
        """
        source = path if path.exists() else earlier
        kept = [row for row in _iter_rows(source) if int(row["step"]) <= after_step]
        self._path = path
        self.earlier_rows = _parse_json(kept)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(METRICS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        write_text(path, text.getvalue())

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Appends rows; a metric that a row lacks is left empty."""
        with (
            atomic.name_file_in_errors(self._path),
            open(self._path, "a", encoding="utf-8", newline="", opener=_open_without_links) as file,
        ):
            csv.DictWriter(file, list(METRICS), lineterminator="\n").writerows(rows)


def _open_without_links(path: str, flags: int) -> int:
    """Opens a file, but not through a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def read_metrics(path: Path) -> list[dict[str, float | int | None]]:
    """Returns the rows of a ``metrics.csv``, a step each; none where it is absent or torn.

    Raises ``RecordError`` for a cell that holds no number.
    """
    rows = _iter_rows(path)
    parsed = _parse_json(rows)
    for row, numbers in zip(rows, parsed, strict=True):
        if damaged := [key for key, text in row.items() if text and numbers[key] is None]:
            reason = f"is damaged: {damaged[0]} of step {row['step']} is no number"
            raise RecordError.for_file(path, reason, "put a copy of it back, or remove that line")
    return parsed


def _parse_json(rows: Iterable[Mapping[str, str]]) -> list[dict[str, float | int | None]]:
    return [{key: _parse_number(text) for key, text in row.items()} for row in rows]


def _parse_number(text: str) -> float | int | None:
    step = parse_step(text)
    return parse_number(text) if step is None else step


def _iter_rows(path: Path | None) -> list[dict[str, str]]:
    if path is None:
        return []
    try:
        lines = regular_files.read_text(path, errors="replace").splitlines()
    except OSError:
        return []
    whole = [row for row in read_csv_rows(lines) if parse_step(row.get("step", "")) is not None]
    return [{key: row[key] for key in METRICS if key in row} for row in whole]


def read_csv_rows(lines: Sequence[str]) -> list[dict[str, str]]:
    """Returns the rows of a CSV file below its header; rows that are torn or damaged are left out.

    Each line is parsed by itself, so that an open quote costs its own row only.
    """
    header, *body = [_parse_cells(line) for line in lines] or [[]]
    return [dict(zip(header, cells, strict=True)) for cells in body if len(cells) == len(header)]


def _parse_cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.replace("\0", "")]), [])
    except csv.Error:
        return []


def parse_step(text: str) -> int | None:
    """Returns the number of a step, which has at most ``DIGITS`` digits; None for other text."""
    return int(text) if text.isdecimal() and len(text) <= DIGITS else None


def parse_number(text: str) -> float | None:
    """Returns the number that a cell holds; None for other text."""
    try:
        return float(text)
    except ValueError:
        return None
