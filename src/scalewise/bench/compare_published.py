"""Comparison of the planner with published measurements: memory, fit status and tokens/s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.table import Table as RichTable

from scalewise import plain_console
from scalewise.bench import published_devices, published_frameworks, published_rows, published_runs
from scalewise.bench.options import BenchOptions as BaseOptions
from scalewise.bench.published_rows import Row
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import Hardware
from scalewise.planner.fit_check import FitStatus, check_fit
from scalewise.planner.step_time import predict_step_time
from scalewise.run_config import RunConfig
from scalewise.units import GIB

FIT_STATUSES = (FitStatus.fits, FitStatus.borderline, FitStatus.out_of_memory)
TASK_COLUMNS = ("source", "model", "gpu", "world", "seq", "precision", "quant", "peft", "compile")
_OUTCOMES = (("ran", True), ("ran_out_of_memory", False))
RUNS: Mapping[str, tuple[str, ...]] = {"here": ("hardware=cpu",)}
WORLDS: Mapping[str, tuple[str, ...]] = {
    name: (f"hardware={name}",) for name in published_devices.PROFILES
}
"""Overrides of the planned runs, whose hardware is that of the published measurements."""
TITLES = {
    "memory": "memory, unscaled",
    "memory_scaled": "memory, one scale per stack",
    "tokens_per_s": "tokens/s, unscaled",
    "tokens_per_s_others": "tokens/s, scale of the other sources",
    "tokens_per_s_scaled": "tokens/s, one scale per stack",
}
"""Title of each table of the record."""
Ratios = dict[str, list[float]]
"""Ratios of predicted to measured values by group."""
Table = dict[str, dict[str, float]]
"""Summary of relative errors by group."""


@dataclass(frozen=True)
class PlannerOptions(BaseOptions):
    """Options of the planner benchmark."""

    data: str = ""
    """CSV files of published measurements, separated by commas."""

    @property
    def files(self) -> list[Path]:
        """Paths of the files."""
        return [Path(name) for name in self.data.split(",")]

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of missing files."""
        for file in self.files:
            if not file.is_file():
                yield ConfigIssue("data", str(file), "is not a file", "set data=ROWS.csv")


OPTIONS = PlannerOptions


@dataclass(frozen=True)
class RowPrediction:
    """Prediction for one row, and its measurements."""

    source: str
    """Source of the measurement."""
    stack: str
    """Source, device and format; the group for which one scale is fitted."""
    memory: tuple[float, float] | None
    """Predicted and measured peak memory, in GiB."""
    throughput: tuple[float, float] | None
    """Predicted and measured throughput, in tokens/s per device."""
    fit_status: FitStatus
    """Predicted fit status."""
    fit_in_memory: bool
    """Whether the published run fit in memory."""
    task: tuple[str, ...] = ()
    """Cells of source, model, devices, sequence length and formats: what rows must have in common
    for their layouts to be compared."""


def measure(
    runs: Mapping[str, RunConfig], options: PlannerOptions, folder: Path
) -> dict[str, object]:
    """Predict all rows of the file; print and return the tables of errors."""
    profiles = {name: runs[name].hardware for name in WORLDS}
    predictions, skipped = [], []
    for file in options.files:
        predicted, reasons = _predict_rows(file, profiles)
        predictions += predicted
        skipped += reasons
    if skipped:
        print_lines(f"{len(skipped)} rows skipped:")
        print_lines(*(f"  {line}" for line in skipped))
    if not predictions:
        raise ConfigError.for_key("data", options.data, "contains no rows that can be predicted")
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
    fit_counts, coverage = _count_fit_status(predictions), _interval_coverage(by_source)
    print_lines(*_fit_count_lines(fit_counts))
    if coverage is not None:
        print_lines(
            f"step times in the interval of the other sources (10th to 90th percentile): "
            f"{coverage:.0%}"
        )
    regrets = _relative_speeds_of_choices(predictions)
    if regrets:
        print_lines(
            f"measured speed of the layout that is predicted to be fastest, over the best measured "
            f"one, in {len(regrets)} sets of layouts: {median(regrets):.2f} at the median, "
            f"{min(regrets):.2f} at the least"
        )
    counts: dict[str, object] = {
        "choices": {"sets": len(regrets), "median": median(regrets), "worst": min(regrets)}
        if regrets
        else None,
        "rows": len(predictions),
        "sources": len({prediction.source for prediction in predictions}),
        "left_out": skipped,
        "interval_coverage": coverage,
    }
    return counts | tables | {"step_scale": _step_scale(rates), "verdicts": fit_counts}


def _predict_rows(
    path: Path, profiles: Mapping[str, Hardware]
) -> tuple[list[RowPrediction], list[str]]:
    """Predictions for the rows of a file, and the reasons why rows are skipped."""
    rows, skipped = published_rows.read_rows(path)
    predictions = []
    for row in rows:
        try:
            predictions.append(predict_row(row, profiles))
        except ConfigError as error:
            issues = "; ".join(str(issue) for issue in error.issues)
            skipped.append(f"{row['source']} {row['model']}: {issues}")
    return predictions, skipped


def predict_row(row: Row, profiles: Mapping[str, Hardware]) -> RowPrediction:
    """Predict the measurements of a row.

    Args:
        row: Row of published measurements.
        profiles: Hardware profiles by name.

    Raises:
        ConfigError: the model is invalid or the device is unknown.
    """
    run, facts = published_runs.build_run(row, profiles), published_frameworks.framework_of(row)
    if issues := [*run.model.validate()]:
        raise ConfigError(issues)
    fit = check_fit(run)
    source = row["source"].split()[0]
    peak_bytes = published_runs.measured_peak(row, run, fit.breakdown.peak)
    peak_gib = peak_bytes * (facts.reserved_factor if facts.reports_reserved else 1.0) / GIB
    peak_gib += run.hardware.context_gib * facts.adds_context
    step = predict_step_time(run)
    if step and not facts.overlaps_collectives:
        step = step.without_overlap()
    rate = run.tokens_per_step / step.seconds / run.world_size if step else 0.0
    measured_peak, measured_rate = row["peak_mem_GiB"], row["tokens_per_s_per_gpu"]
    has_peak = bool(measured_peak) and measured_peak.upper() != "OOM"
    return RowPrediction(
        source,
        " ".join(part for part in (source, row["gpu"], row["precision"], row["quant"]) if part),
        (peak_gib, float(measured_peak)) if has_peak else None,
        (rate, float(measured_rate)) if measured_rate and rate else None,
        replace(fit, traced_peak=peak_bytes).status,
        fit_in_memory=bool(measured_rate) or has_peak,
        task=tuple(row.get(column, "") for column in TASK_COLUMNS),
    )


def _group_ratios(predictions: Sequence[RowPrediction], group_key: Any, value_pair: Any) -> Ratios:
    """Ratios of predicted to measured values by group."""
    groups: dict[str, list[float]] = {}
    for prediction in predictions:
        pair = value_pair(prediction)
        if pair is not None:
            groups.setdefault(group_key(prediction), []).append(pair[0] / pair[1])
    return groups


def _scale_by_group(groups: Ratios) -> dict[str, float]:
    """Median ratio of each group with more than one row."""
    return {name: median(ratios) for name, ratios in groups.items() if len(ratios) > 1}


def _leave_one_group_out(groups: Ratios) -> dict[str, float]:
    """Median ratio of all other groups, by group."""
    others = {
        name: [r for other in groups if other != name for r in groups[other]] for name in groups
    }
    return {name: median(ratios) for name, ratios in others.items() if ratios}


def _group_errors(groups: Ratios, scales: Mapping[str, float] | None = None) -> Table:
    """Summary of the relative errors of each group and of all rows.

    ``scales``: divisor of the predictions by group; groups without one are excluded. None: 1.
    """
    if scales is None:
        scales = dict.fromkeys(groups, 1.0)
    table: Table = {}
    all_errors: list[float] = []
    for name, scale in scales.items():
        errors = [abs(ratio / scale - 1) for ratio in groups[name]]
        all_errors += errors
        table[name] = error_summary(errors) | {"scale": scale}
    if all_errors:
        table["all"] = error_summary(all_errors) | {"scale": 1.0}
    return table


def _step_scale(throughput_ratios: Ratios) -> dict[str, float]:
    """Ratio of measured to predicted step times: median, and p10 and p90 relative to it.

    Profiles in ``conf/hardware`` use it for GPUs before Hopper, on which no run of scalewise is
    measured.
    """
    scales = sorted(ratio for ratios in throughput_ratios.values() for ratio in ratios)
    if len(scales) < 2:
        return {}
    center, deciles = median(scales), quantiles(scales, n=10)
    return {"median": center, "low": deciles[0] / center, "high": deciles[-1] / center}


def _relative_speeds_of_choices(predictions: Sequence[RowPrediction]) -> list[float]:
    """Measured speed of the layout that is predicted to be fastest, over the best measured one.

    One value for each task with at least two layouts; 1: the best one is chosen.
    """
    tasks: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for prediction in predictions:
        if prediction.throughput is not None:
            tasks.setdefault(prediction.task, []).append(prediction.throughput)
    return [
        max(rates)[1] / max(measured for _, measured in rates)
        for rates in tasks.values()
        if len(rates) > 1
    ]


def _interval_coverage(throughput_ratios: Ratios) -> float | None:
    """Share of the step times between the 10th and the 90th percentile of the other sources.

    The interval of a plan should contain 80 % of the runs of a source that nobody has measured.
    None: there are not enough sources.
    """
    covered = []
    for name, ratios in throughput_ratios.items():
        others = [r for other, rs in throughput_ratios.items() if other != name for r in rs]
        if len(others) > 1:
            deciles = quantiles(others, n=10)
            covered += [deciles[0] <= ratio <= deciles[-1] for ratio in ratios]
    return sum(covered) / len(covered) if covered else None


def error_summary(errors: Sequence[float]) -> dict[str, float]:
    """Number of errors, their median, 90th percentile and maximum."""
    ordered = sorted(errors)
    return {
        "rows": len(ordered),
        "median": median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "worst": ordered[-1],
    }


def _count_fit_status(predictions: Sequence[RowPrediction]) -> dict[str, dict[str, int]]:
    """Number of rows by outcome of the published run and predicted fit status."""
    statuses = {
        name: [p.fit_status for p in predictions if p.fit_in_memory == ran]
        for name, ran in _OUTCOMES
    }
    return {
        name: {status.value: predicted.count(status) for status in FIT_STATUSES}
        for name, predicted in statuses.items()
    }


def _print_table(title: str, rows: Table) -> None:
    table = RichTable(box=None, pad_edge=False, header_style="dim")
    table.add_column(title)
    for name in ("rows", "scale", "median", "p90", "worst"):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        errors = (f"{row[key]:.1%}" for key in ("median", "p90", "worst"))
        table.add_row(name, str(int(row["rows"])), f"{row['scale']:.2f}", *errors)
    plain_console.get_console().print(table)


def _fit_count_lines(fit_counts: Any) -> list[str]:
    lines = []
    for name, _ in _OUTCOMES:
        counts = ", ".join(f"{status} {count}" for status, count in fit_counts[name].items())
        lines.append(f"predicted fit status of runs that {name.replace('_', ' ')}: {counts}")
    return lines
