"""The planner beside published measurements: memory, verdicts and tokens/s, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.table import Table as Drawn

from scalewise import console
from scalewise.bench import published_rows, published_runs
from scalewise.bench.options import BenchOptions as BaseOptions
from scalewise.bench.published_rows import Row
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.planner.fit_check import RESERVED, FitStatus, check_fit
from scalewise.planner.step_time import predict_step_time
from scalewise.run_config import RunConfig
from scalewise.units import GIB

SAID = (FitStatus.fits, FitStatus.borderline, FitStatus.out_of_memory)
_ENDS = (("ran", True), ("ran_out_of_memory", False))
RUNS: Mapping[str, tuple[str, ...]] = {"here": ("hardware=cpu",)}
TITLES = {
    "memory": "memory, as predicted",
    "memory_scaled": "memory, one scale a stack",
    "tokens_per_s": "tokens/s, as predicted",
    "tokens_per_s_others": "tokens/s, the scale of the other sources",
    "tokens_per_s_scaled": "tokens/s, one scale a stack",
}
Ratios = dict[str, list[float]]
Table = dict[str, dict[str, float]]


@dataclass(frozen=True)
class PlannerOptions(BaseOptions):
    """What can be chosen."""

    data: str = ""
    """A CSV file of measured rows."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields a file that is not there."""
        if not Path(self.data).is_file():
            yield ConfigIssue("data", self.data, "there is no such file", "give data=ROWS.csv")


OPTIONS = PlannerOptions


@dataclass(frozen=True)
class RowPrediction:
    """What the planner says of one row, beside what was measured."""

    source: str
    stack: str
    """Source, device and format: what one scale of time is learnt for."""
    memory: tuple[float, float] | None
    """Predicted and measured, GiB."""
    throughput: tuple[float, float] | None
    """Predicted and measured, tokens/s of a device."""
    fit_status: FitStatus
    fit_in_memory: bool


def measure(
    runs: Mapping[str, RunConfig], options: PlannerOptions, folder: Path
) -> dict[str, object]:
    """Predicts every row of the file, prints the tables and returns them."""
    predictions, left = _predict_rows(Path(options.data))
    if left:
        print_lines(f"{len(left)} rows left out:")
        print_lines(*(f"  {line}" for line in left))
    if not predictions:
        raise ConfigError.for_key("data", options.data, "holds no rows that can be predicted")
    memory = _group_ratios(predictions, lambda p: p.stack, lambda p: p.memory)
    rates = _group_ratios(predictions, lambda p: p.stack, lambda p: p.throughput)
    by_source = _group_ratios(predictions, lambda p: p.source, lambda p: p.throughput)
    tables = {
        "memory": _group_errors(_group_ratios(predictions, lambda p: p.source, lambda p: p.memory)),
        "memory_scaled": _group_errors(memory, _scale_by_group(memory)),
        "tokens_per_s": _group_errors(rates),
        "tokens_per_s_others": _group_errors(by_source, _leave_one_group_out(by_source)),
        "tokens_per_s_scaled": _group_errors(rates, _scale_by_group(rates)),
    }
    for name, title in TITLES.items():
        if tables[name]:
            _print_table(title, tables[name])
    verdicts = _count_fit_status(predictions)
    print_lines(*_print_results(verdicts))
    counted: dict[str, object] = {"rows": len(predictions), "left_out": left}
    return counted | tables | {"step_scale": _step_scale(rates), "verdicts": verdicts}


def _predict_rows(path: Path) -> tuple[list[RowPrediction], list[str]]:
    """Returns what the planner says of each row of a file, and why it says nothing of others."""
    kept, left = published_rows.read_rows(path)
    found = []
    for row in kept:
        try:
            found.append(predict_row(row))
        except ConfigError as error:
            what = "; ".join(str(issue) for issue in error.issues)
            left.append(f"{row['source']} {row['model']}: {what}")
    return found, left


def predict_row(row: Row) -> RowPrediction:
    """Returns what the planner says of a row.

    Raises ``ConfigError`` for a model that cannot be, or a device that is not known.
    """
    run, facts = published_runs.build_run(row), published_runs.framework_of(row)
    if wrong := [*run.model.validate()]:
        raise ConfigError(wrong)
    fit = check_fit(run)
    source = row["source"].split()[0]
    bytes_there = published_runs.measured_peak(row, run, fit.breakdown.peak)
    gib = bytes_there * (RESERVED[1] if facts.reports_reserved else 1.0) / GIB
    step = predict_step_time(run)
    rate = run.tokens_per_step / step.seconds / run.world_size if step else 0.0
    measured, ran = row["peak_mem_GiB"], row["tokens_per_s_per_gpu"]
    ran_through = measured.upper() != "OOM"
    return RowPrediction(
        source,
        " ".join(part for part in (source, row["gpu"], row["precision"], row["quant"]) if part),
        (gib, float(measured)) if measured and ran_through else None,
        (rate, float(ran)) if ran and rate else None,
        replace(fit, traced_peak=bytes_there).status,
        fit_in_memory=bool(ran or (measured and ran_through)),
    )


def _group_ratios(predictions: Sequence[RowPrediction], group_key: Any, value_pair: Any) -> Ratios:
    """Returns predicted over measured values by group."""
    groups: dict[str, list[float]] = {}
    for prediction in predictions:
        pair = value_pair(prediction)
        if pair is not None:
            groups.setdefault(group_key(prediction), []).append(pair[0] / pair[1])
    return groups


def _scale_by_group(groups: Ratios) -> dict[str, float]:
    """Returns the scale of each group that has more rows than that one scale fits."""
    return {name: median(ratios) for name, ratios in groups.items() if len(ratios) > 1}


def _leave_one_group_out(groups: Ratios) -> dict[str, float]:
    """Returns for each group the scale of all others: it has seen none of the group's rows."""
    rest = {
        name: [r for other in groups if other != name for r in groups[other]] for name in groups
    }
    return {name: median(ratios) for name, ratios in rest.items() if ratios}


def _group_errors(groups: Ratios, scales: Mapping[str, float] | None = None) -> Table:
    """Returns the relative errors by group and of all: rows, scale, median, p90, worst.

    With ``scales``, of the groups that have one.
    """
    if scales is None:
        scales = dict.fromkeys(groups, 1.0)
    found: Table = {}
    everything: list[float] = []
    for name, scale in scales.items():
        errors = [abs(ratio / scale - 1) for ratio in groups[name]]
        everything += errors
        found[name] = error_summary(errors) | {"scale": scale}
    if everything:
        found["all"] = error_summary(everything) | {"scale": 1.0}
    return found


def _step_scale(throughput_ratios: Ratios) -> dict[str, float]:
    """Returns what measured steps take of predicted ones: the median, and around it p10 to p90.

    ``conf/hardware`` gives them to devices of which there are no runs of our own.
    """
    scales = sorted(ratio for ratios in throughput_ratios.values() for ratio in ratios)
    if len(scales) < 2:
        return {}
    middle, tenths = median(scales), quantiles(scales, n=10)
    return {"median": middle, "low": tenths[0] / middle, "high": tenths[-1] / middle}


def error_summary(errors: Sequence[float]) -> dict[str, float]:
    """Returns how many errors there are, their median, 90th percentile and worst."""
    ordered = sorted(errors)
    return {
        "rows": len(ordered),
        "median": median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "worst": ordered[-1],
    }


def _count_fit_status(predictions: Sequence[RowPrediction]) -> dict[str, dict[str, int]]:
    """Returns how many rows got which verdict, of those that ran and those that could not."""
    said = {
        name: [p.fit_status for p in predictions if p.fit_in_memory == ran] for name, ran in _ENDS
    }
    return {
        name: {verdict.value: verdicts.count(verdict) for verdict in SAID}
        for name, verdicts in said.items()
    }


def _print_table(title: str, rows: Table) -> None:
    table = Drawn(box=None, pad_edge=False, header_style="dim")
    table.add_column(title)
    for name in ("rows", "scale", "median", "p90", "worst"):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        shares = (f"{row[key]:.1%}" for key in ("median", "p90", "worst"))
        table.add_row(name, str(int(row["rows"])), f"{row['scale']:.2f}", *shares)
    console.get_console().print(table)


def _print_results(fit_counts: Any) -> list[str]:
    lines = []
    for name, _ in _ENDS:
        told = ", ".join(f"{count} called {verdict}" for verdict, count in fit_counts[name].items())
        lines.append(f"rows that {name.replace('_', ' ')}: {told}")
    return lines
