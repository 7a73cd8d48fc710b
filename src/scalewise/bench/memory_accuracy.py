"""The planner's ledger beside what small runs hold here, and beside a trace of large ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scalewise.bench import memory_accuracy_ranks as worlds
from scalewise.bench import memory_accuracy_runs as lines
from scalewise.bench import options
from scalewise.bench.compare_published import error_summary
from scalewise.console import print_lines
from scalewise.errors import Interrupted, ScalewiseError
from scalewise.launch.job import JobSpec, execute
from scalewise.planner import worst_rank
from scalewise.run_config import RunConfig
from scalewise.units import format_bytes


def _run_name(
    name: str, base_overrides: lines.Line, variants: Iterable[lines.Line]
) -> dict[str, lines.Line]:
    return {" ".join((name, *line)): (*base_overrides, *line) for line in variants}


_TRAINED = _run_name("small", lines.SMALL, (*lines.TRAINED, *lines.TRAINED_SELDOM))
_ZERO = _run_name("small", lines.SMALL, lines.ZERO if find_spec("deepspeed") else ())
RUNS: Mapping[str, tuple[str, ...]] = _TRAINED | _ZERO
WORLDS: Mapping[str, tuple[str, ...]] = _run_name(
    "large", worlds.LARGE, (*worlds.TRACED, *worlds.TRACED_SELDOM)
)


@dataclass(frozen=True)
class MemoryAccuracyOptions(options.BenchOptions):
    """What can be chosen."""

    traced: bool = True
    """Whether large runs are traced as well, which takes some minutes."""


OPTIONS = MemoryAccuracyOptions


@dataclass(frozen=True)
class MemoryAccuracyRow:
    """One run: the most that a rank holds, foreseen and found, bytes."""

    line: str
    foreseen: int
    found: int
    fullest: str
    """The moment of a step at which the ledger has the most."""

    @property
    def error(self) -> float:
        """Returns how much too high the ledger is, as a share of what was found."""
        return self.foreseen / self.found - 1


def measure(
    runs: Mapping[str, RunConfig], options: MemoryAccuracyOptions, folder: Path
) -> dict[str, object]:
    """Trains the small runs, traces the large ones, prints each and returns all."""
    result: dict[str, object] = {}
    for title, names in (("trained", _TRAINED), ("deepspeed", _ZERO)):
        if names:
            chosen = {name: runs[name] for name in names}
            result[title] = _print_rows(title, _train_and_measure(chosen, folder))
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
    """Returns the most that a rank held, bytes."""
    result = execute(JobSpec(run), folder / "run")
    if result.status == "interrupted":
        raise Interrupted(result.exit_code - 128, f"{result.reason}; nothing was written")
    if result.status != "ok":
        raise ScalewiseError(f"{name}: {result.status}: {result.reason}")
    shutil.rmtree(result.folder)
    return int(result.summary["metrics"]["memory/peak_bytes"])


def _trace(runs: Mapping[str, RunConfig]) -> Iterator[MemoryAccuracyRow]:
    from scalewise.training.fake_tensor_trace import trace_run, with_cpu_operators

    for name, run in runs.items():
        predicted = worst_rank.worst_rank_breakdown(with_cpu_operators(run))
        yield MemoryAccuracyRow(name, predicted.peak, trace_run(run).peak, predicted.peak_phase)


def _print_rows(title: str, rows: Iterator[MemoryAccuracyRow]) -> dict[str, object]:
    """Prints the rows as they come, and returns them with what their errors are together."""
    print_lines(f"{title}:", f"{'foreseen':>11}{'found':>11}{'error':>9}  line")
    kept = []
    for row in rows:
        kept.append(row)
        predicted, found = format_bytes(row.foreseen), format_bytes(row.found)
        print_lines(f"{predicted:>11}{found:>11}{row.error:>+9.2%}  {row.line}")
    errors = error_summary([abs(row.error) for row in kept])
    print_lines("{rows} rows: median {median:.2%}, worst {worst:.2%}".format(**errors), "")
    return {"errors": errors, "rows": [vars(row) | {"error": row.error} for row in kept]}
