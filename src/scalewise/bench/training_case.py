"""Benchmark case of one training run: step time, MFU and memory next to the plan."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from scalewise.bench.suite import CaseError, Entry
from scalewise.errors import Interrupted
from scalewise.hardware import DeviceKind
from scalewise.launch.job import JobSpec, Result, execute
from scalewise.planner.fit_check import check_fit
from scalewise.planner.step_time import predict_step_time
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json, read_metrics
from scalewise.units import TERA, format_bytes, format_mfu, format_seconds

WARM_UP_STEPS = 3
"""Steps that are not timed: compilation, allocator warm-up and the memory measurement."""


@dataclass(frozen=True)
class StepSeconds:
    """Time of the steps after the warm-up, in seconds."""

    median: float
    """Median."""
    low: float
    """Shortest step."""
    high: float
    """Longest step."""
    steps: int
    """Number of steps."""


@dataclass(frozen=True)
class TrainingCase:
    """Training run of a few steps, without validation, checkpoints and tracking."""

    name: str
    """Name in records, ``GROUP/CASE``."""
    seconds: float
    """Estimated duration on an H100 with start and compilation, in seconds."""
    overrides: tuple[str, ...]
    """Overrides of the run."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Train the run in ``folder``; return step time, MFU and memory, measured and planned.

        The folder of a successful run is removed.

        Raises:
            CaseError: The plan is certain that the run does not fit, or the run failed.
            Interrupted: A signal stopped the run.
        """
        fit, predicted = check_fit(run), predict_step_time(run)
        if fit.status.is_out_of_memory:
            needed, capacity = format_bytes(fit.reserved[0]), format_bytes(fit.capacity or 0)
            raise CaseError("skipped", f"does not fit: {needed} of {capacity}")
        on_cuda = run.hardware.device is DeviceKind.cuda
        start_bytes = torch.cuda.memory_allocated() if on_cuda else None
        result = execute(JobSpec(run), folder)
        _raise_if_failed(result)
        rows = read_metrics(result.folder / "metrics.csv")
        step_times = [float(row["time/step_s"] or 0.0) for row in rows]
        timed_rows = rows[WARM_UP_STEPS:]
        timed = step_times[WARM_UP_STEPS:]
        step = StepSeconds(median(timed), min(timed), max(timed), len(timed))
        flops_per_s = run.flops_per_step / run.world_size / step.median
        peak_rate = run.hardware.peak_flops(run.precision.peak_kind)
        mfu = flops_per_s / peak_rate if peak_rate else None
        peak_bytes = result.summary["metrics"]["memory/peak_bytes"]
        planned_s = None if predicted is None else predicted.seconds
        shutil.rmtree(result.folder)
        return {
            "step_s": asdict(step),
            "first_step_s": step_times[0],
            "data_share": median(float(row["time/data_s"] or 0.0) for row in timed_rows)
            / step.median,
            "tokens_per_s": run.tokens_per_step / step.median,
            "tflops_per_s": flops_per_s / TERA,
            "mfu": mfu,
            "mfu_palm": None if mfu is None else mfu * run.palm_to_causal_flops,
            "peak_bytes": peak_bytes,
            "reserved_bytes": torch.cuda.max_memory_reserved() if on_cuda else None,
            "start_bytes": start_bytes,
            "planned_peak_bytes": fit.peak,
            "peak_error": fit.peak / peak_bytes - 1,
            "planned_step_s": planned_s,
            "step_error": None if planned_s is None else planned_s / step.median - 1,
            "loss": rows[-1]["train/loss"],
            "parameters": run.model.num_parameters,
        }

    def describe(self, entry: Entry) -> str:
        """Figures of a case in one line."""
        parts = [
            f"{format_seconds(entry['step_s']['median'])} per step",
            f"{entry['tokens_per_s']:,.0f} tokens/s",
            *([format_mfu(entry["mfu"], entry["mfu_palm"])] if entry["mfu"] else []),
            f"peak {format_bytes(entry['peak_bytes'])} (plan {entry['peak_error']:+.1%})",
        ]
        if entry["step_error"] is not None:
            parts.append(f"planned step {entry['step_error']:+.1%}")
        return ", ".join(parts)


def _raise_if_failed(result: Result) -> None:
    if result.status == "interrupted":
        raise Interrupted(result.exit_code - 128, result.reason)
    if result.status != "ok":
        log_tail = read_json(result.folder / "status.json").get("log_tail", ())
        raise CaseError(result.status, result.reason, log_tail)
