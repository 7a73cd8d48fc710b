"""Reading and writing of run files: atomic JSON and YAML, and ``metrics.csv``."""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, Self

import yaml

from scalewise import atomic, bounded_yaml, regular_files
from scalewise.errors import ConfigError
from scalewise.metric_names import METRICS, SOURCE_LOSS, is_metric
from scalewise.record_types import RECORDS, type_mismatches
from scalewise.redaction import redact

WANDB_FACTS = "wandb/facts.json"
"""Facts of the W&B run, which rank 0 writes during training; relative to the run folder."""


class RecordError(ConfigError):
    """A damaged file in a run folder."""

    @classmethod
    def for_file(cls, path: Path, reason: str, fix: str = "restore it from a copy") -> Self:
        """Error of the file at ``path``."""
        return cls.for_key("", "", f"{path} {reason}", fix)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write ``content`` as JSON atomically."""
    write_text(path, json_text(content, indent=2) + "\n")


def json_text(content: object, *, indent: int | None = None, ascii_only: bool = True) -> str:
    """Serialize as JSON; NaN and infinities become null."""
    plain = _nan_to_none(content)
    return json.dumps(plain, indent=indent, default=str, ensure_ascii=ascii_only, allow_nan=False)


def _nan_to_none(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _nan_to_none(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_nan_to_none(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically, with secrets of the environment replaced by ``[hidden]``."""
    atomic.write_atomic(path, redact(text).encode("utf-8", errors="backslashreplace"))


def append_text(path: Path, text: str) -> None:
    """Append ``text`` to a file, and flush it."""
    with (
        atomic.name_file_in_errors(path),
        open(path, "a", encoding="utf-8", newline="", opener=_open_without_links) as file,
    ):
        file.write(text)


def copy_file(source: Path, path: Path) -> None:
    """Copy a file atomically."""
    atomic.copy_atomic(source, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing or damaged."""
    try:
        return load_json(path)
    except RecordError:
        return {}


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing.

    Raises ``RecordError`` if the file is damaged: it cannot be parsed, or a value does not have the
    type that ``RECORDS`` declares for this file name.
    """
    return _load(path, json.loads)


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping, as ``load_json`` reads a JSON object."""
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
        reason = " ".join(str(error).split())[:120]
        raise RecordError.for_file(path, f"is damaged: {reason}") from None
    if not isinstance(content, dict):
        raise RecordError.for_file(
            path, f"is damaged: it contains a {type(content).__name__}, not a mapping"
        )
    for mismatch in type_mismatches(content, RECORDS.get(path.name, object)):
        raise RecordError.for_file(path, f"is damaged: {mismatch}")
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; empty if the file is missing or damaged."""
    try:
        return load_yaml(path)
    except RecordError:
        return {}


MAX_STEP_DIGITS = 18
"""Maximum number of digits of a step, which fits into 64 bits."""


class MetricsFile:
    """``metrics.csv``: one row per optimizer step, one column per metric.

    Args:
        path: The file, which is opened for appending.
        after_step: Last step to keep; later rows are dropped.
        earlier: File of the run that this run resumes; its rows come first.
        sources: Names of the sources of a mixture, each with a column for its validation loss.
    """

    def __init__(
        self,
        path: Path,
        *,
        after_step: int = 0,
        earlier: Path | None = None,
        sources: Iterable[str] = (),
    ) -> None:
        source = path if path.exists() else earlier
        rows = [row for row in _iter_rows(source) if int(row["step"]) <= after_step]
        self._path, self._columns = path, [*METRICS, *(SOURCE_LOSS + name for name in sources)]
        self.earlier_rows = _parse_rows(rows)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(path, text.getvalue())

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append rows and flush; missing metrics are left empty, others are an error."""
        with (
            atomic.name_file_in_errors(self._path),
            open(self._path, "a", encoding="utf-8", newline="", opener=_open_without_links) as file,
        ):
            writer = csv.writer(file, lineterminator="\n")
            for row in rows:
                if unknown := row.keys() - {*self._columns}:
                    raise ValueError(f"no columns for {sorted(unknown)}")
                writer.writerow([*map(row.get, self._columns)])


def _open_without_links(path: str, flags: int) -> int:
    """Open a file without following symbolic links."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def read_metrics(path: Path) -> list[dict[str, float | int | None]]:
    """Rows of a ``metrics.csv``, one per step; empty if the file is missing.

    Raises ``RecordError`` for a cell that is not a number.
    """
    rows = _iter_rows(path)
    parsed = _parse_rows(rows)
    for row, numbers in zip(rows, parsed, strict=True):
        if damaged := [key for key, text in row.items() if text and numbers[key] is None]:
            reason = f"is damaged: {damaged[0]} of step {row['step']} is not a number"
            raise RecordError.for_file(path, reason, "restore it from a copy, or remove that line")
    return parsed


def _parse_rows(rows: Iterable[Mapping[str, str]]) -> list[dict[str, float | int | None]]:
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
    complete = [row for row in read_csv_rows(lines) if parse_step(row.get("step", "")) is not None]
    return [{key: row[key] for key in row if is_metric(key)} for row in complete]


def read_csv_rows(lines: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV file below its header, without incomplete or damaged ones.

    Each line is parsed by itself, so that an open quote affects its own row only.
    """
    header, *body = [_parse_cells(line) for line in lines] or [[]]
    return [dict(zip(header, cells, strict=True)) for cells in body if len(cells) == len(header)]


def _parse_cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.replace("\0", "")]), [])
    except csv.Error:
        return []


def parse_step(text: str) -> int | None:
    """Parse a step of at most ``MAX_STEP_DIGITS`` digits; ``None`` for other text."""
    return int(text) if text.isdecimal() and len(text) <= MAX_STEP_DIGITS else None


def parse_number(text: str) -> float | None:
    """Parse the number in a cell; ``None`` for other text."""
    try:
        return float(text)
    except ValueError:
        return None


def parse_time(text: object) -> datetime | None:
    """Parse a recorded time to UTC; ``None`` for other text."""
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
