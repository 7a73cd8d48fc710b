"""The jobs of a sweep, one after the other, each in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalewise.errors import ConfigError, Interrupted
from scalewise.launch import signals
from scalewise.launch.job import Order, Result, execute
from scalewise.tracking.files import read_json, write_json

INTERRUPTED = range(129, 160)
"""Exit codes of jobs that a signal to the whole sweep has ended."""


def execute_all(
    orders: Sequence[tuple[int, Order, Path]],
    folder: Path,
    *,
    command: str,
    question: str,
    announce: Callable[[int, Order, int], None],
    report: Callable[[int, Result], None],
) -> list[Result]:
    """Runs jobs into their folders and returns how each ended; none stops the others.

    Keeps ``sweep.json`` in ``folder`` true at any moment. A signal ends the sweep: what had not
    begun is noted as ``interrupted``.
    """
    earlier = read_json(folder / "sweep.json")
    record: dict[str, Any] = earlier or {
        "name": folder.parent.name,
        "question": question,
        "command": command,
        "verb": "train",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "ended": None,
        "reference": None,
        "jobs": [],
    }
    planned = [_planned(number, order, own, folder) for number, order, own in orders]
    record["jobs"] += planned
    record["varying"] = _varying([job["varied"] for job in record["jobs"]])
    results: list[Result] = []
    stopped: Result | None = None
    for (number, order, own), job in zip(orders, planned, strict=True):
        if stopped is None:
            job["status"] = "running"
            write_json(folder / "sweep.json", record)
            result = _executed(number, order, own, lambda n, o: announce(n, o, len(orders)))
            report(number, result)
            job["folder"] = str(result.folder.relative_to(folder))
            if result.exit_code in INTERRUPTED:
                stopped = result
        else:
            result = Result("interrupted", stopped.reason, stopped.exit_code, own, {})
        job["status"] = result.status
        results.append(result)
    record["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / "sweep.json", record)
    return results


def _executed(
    number: int, order: Order, folder: Path, announce: Callable[[int, Order], None]
) -> Result:
    try:
        with signals.raised("before the job began"):
            announce(number, order)
            return execute(order, folder)
    except ConfigError as error:
        reason = "; ".join(str(complaint) for complaint in error.complaints)
        return Result("refused", reason, error.exit_code, folder, {})
    except Interrupted as error:
        return Result("interrupted", str(error), error.exit_code, folder, {})


def _planned(number: int, order: Order, own: Path, folder: Path) -> dict[str, Any]:
    return {
        "number": number,
        "folder": str(own.relative_to(folder)),
        "overrides": list(order.run.overrides),
        "varied": dict(order.varied),
        "status": "waiting",
    }


def _varying(varied: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for values in varied for key in values)
    return {
        key: list(dict.fromkeys(values[key] for values in varied if key in values)) for key in keys
    }
