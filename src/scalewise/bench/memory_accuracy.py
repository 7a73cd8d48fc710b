"""Accuracy of the predicted peak memory, compared with small runs and with traces of large runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scalewise.bench import memory_accuracy_ranks as large_runs
from scalewise.bench import memory_accuracy_runs as small_runs
from scalewise.bench import options
from scalewise.bench.compare_published import error_summary
from scalewise.console import print_lines
from scalewise.errors import Interrupted, ScalewiseError
from scalewise.launch.job import JobSpec, execute
from scalewise.planner import worst_rank
from scalewise.run_config import RunConfig
from scalewise.tracing.step_trace import trace_run, with_cpu_operators
from scalewise.units import format_bytes


def _named_runs(
    name: str, base_overrides: small_runs.Overrides, variants: Iterable[small_runs.Overrides]
) -> dict[str, small_runs.Overrides]:
    return {" ".join((name, *overrides)): (*base_overrides, *overrides) for overrides in variants}


_TRAINED = _named_runs("small", small_runs.SMALL, (*small_runs.TRAINED, *small_runs.TRAINED_SELDOM))
_ZERO = _named_runs("small", small_runs.SMALL, small_runs.ZERO if find_spec("deepspeed") else ())
RUNS: Mapping[str, tuple[str, ...]] = _TRAINED | _ZERO
WORLDS: Mapping[str, tuple[str, ...]] = _named_runs(
    "large", large_runs.LARGE, (*large_runs.TRACED, *large_runs.TRACED_SELDOM)
)


@dataclass(frozen=True)
class MemoryAccuracyOptions(options.BenchOptions):
    """Options of the memory accuracy benchmark."""

    traced: bool = True
    """Whether large runs are also traced, which takes some minutes."""


OPTIONS = MemoryAccuracyOptions


@dataclass(frozen=True)
class MemoryAccuracyRow:
    """Predicted and measured peak memory of one run. Field names are those of the record."""

    line: str
    """Overrides of the run."""
    foreseen: int
    """Predicted peak memory, in bytes."""
    found: int
    """Measured peak memory, in bytes."""
    fullest: str
    """Phase of the step with the predicted peak."""

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive: too high."""
        return self.foreseen / self.found - 1


def measure(
    runs: Mapping[str, RunConfig], options: MemoryAccuracyOptions, folder: Path
) -> dict[str, object]:
    """Train the small runs and trace the large ones; print and return predictions and errors."""
    result: dict[str, object] = {}
    for title, names in (("trained", _TRAINED), ("deepspeed", _ZERO)):
        if names:
            named_runs = {name: runs[name] for name in names}
            result[title] = _print_rows(title, _train_and_measure(named_runs, folder))
    if options.traced:
        result["traced"] = _print_rows("traced", _trace({name: runs[name] for name in WORLDS}))
    return result


def _train_and_measure(runs: Mapping[str, RunConfig], folder: Path) -> Iterator[MemoryAccuracyRow]:
    for name, run in runs.items():
        predicted = worst_rank.worst_rank_breakdown(run)
        yield MemoryAccuracyRow(
            name, predicted.peak, _measured_peak(name, run, folder), predicted.peak_phase
        )


def _measured_peak(name: str, run: RunConfig, folder: Path) -> int:
    """Measured peak memory of the rank with the largest peak, in bytes."""
    result = execute(JobSpec(run), folder / "run")
    if result.status == "interrupted":
        raise Interrupted(result.exit_code - 128, f"{result.reason}; nothing was written")
    if result.status != "ok":
        raise ScalewiseError(f"{name}: {result.status}: {result.reason}")
    shutil.rmtree(result.folder)
    return int(result.summary["metrics"]["memory/peak_bytes"])


def _trace(runs: Mapping[str, RunConfig]) -> Iterator[MemoryAccuracyRow]:
    for name, run in runs.items():
        predicted = worst_rank.worst_rank_breakdown(with_cpu_operators(run))
        yield MemoryAccuracyRow(name, predicted.peak, trace_run(run).peak, predicted.peak_phase)


def _print_rows(title: str, rows: Iterator[MemoryAccuracyRow]) -> dict[str, object]:
    """Print each row when it is measured; return all rows and a summary of their errors."""
    print_lines(f"{title}:", f"{'predicted':>11}{'measured':>11}{'error':>9}  overrides")
    finished = []
    for row in rows:
        finished.append(row)
        predicted, measured = format_bytes(row.foreseen), format_bytes(row.found)
        print_lines(f"{predicted:>11}{measured:>11}{row.error:>+9.2%}  {row.line}")
    errors = error_summary([abs(row.error) for row in finished])
    print_lines("{rows} runs: median {median:.2%}, worst {worst:.2%}".format(**errors), "")
    return {"errors": errors, "rows": [vars(row) | {"error": row.error} for row in finished]}
