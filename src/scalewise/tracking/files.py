"""The files of a run's folder: JSON written whole or not at all, metrics row by row."""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from scalewise import atomic
from scalewise.redaction import redacted
from scalewise.tracking.names import METRICS

FACTS = "wandb/facts.json"
"""What rank 0 tells about its W&B run while it trains, relative to the run's folder."""


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes ``content`` so that a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` so that a reader sees the old file or the new one, never a part.

    Secrets of the environment are replaced by ``[hidden]``.
    """
    atomic.write(path, redacted(text).encode("utf-8", errors="backslashreplace"))


def copy_file(source: Path, path: Path) -> None:
    """Copies a file so that a reader sees the old file or the new one, never a part."""
    atomic.copy(source, path)


def read_json(path: Path) -> dict[str, object]:
    """Returns a JSON object, or an empty one where the file is absent or torn."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns a YAML mapping, or an empty one where the file is absent or torn."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class MetricsFile:
    """``metrics.csv``: one row per optimizer step, one column per metric, flushed per batch."""

    def __init__(self, path: Path, *, after_step: int = 0, earlier: Path | None = None) -> None:
        """Opens the file to append to; rows above ``after_step`` are dropped.

        ``earlier`` is the file of the run that this one resumes: its rows come first.
        """
        source = path if path.is_file() else earlier
        kept = [row for row in _rows(source) if int(row["step"]) <= after_step]
        self._path = path
        self.earlier = _parsed(kept)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(METRICS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        write_text(path, text.getvalue())

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Appends rows; a metric that a row lacks is left empty."""
        with open(self._path, "a", encoding="utf-8", newline="", opener=_no_link) as file:
            csv.DictWriter(file, list(METRICS), lineterminator="\n").writerows(rows)


def _no_link(path: str, flags: int) -> int:
    """Opens a file, but not through a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def read_metrics(path: Path) -> list[dict[str, float | int | None]]:
    """Returns the rows of a ``metrics.csv``, a step each; none where it is absent or torn."""
    return _parsed(_rows(path))


def _parsed(rows: Iterable[Mapping[str, str]]) -> list[dict[str, float | int | None]]:
    return [{key: _number(text) for key, text in row.items()} for row in rows]


def _number(text: str) -> float | int | None:
    if text.isdigit():
        return int(text)
    return float(text) if text else None


def _rows(path: Path | None) -> list[dict[str, str]]:
    if path is None or not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.DictReader(file))
    whole = [row for row in rows if None not in row.values() and (row.get("step") or "").isdigit()]
    return [{key: row[key] for key in METRICS if key in row} for row in whole]
