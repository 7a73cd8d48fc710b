"""Overhead of a job of a sweep beyond its training, compared with a separate process.

A job of a sweep is forked from a forkserver that has already imported all packages. A separate
process provides the same isolation, but imports them for each job.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from scalewise.bench import options, paired_ratio
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ScalewiseError
from scalewise.launch import processes
from scalewise.launch.job import JobSpec, execute
from scalewise.reports import html_report
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json
from scalewise.units import format_seconds

BOUND = 0.10
"""Maximum overhead of a job of a sweep, as a fraction of that of a separate process."""
RUNS: Mapping[str, tuple[str, ...]] = {
    "job": (
        "data=synthetic",
        "data.sequence=64",
        "schedule.warmup_steps=2",
        "trainer.max_steps=8",
        "trainer.validate_every=null",
        "checkpoint=none",
        "tracking=none",
    )
}


@dataclass(frozen=True)
class SweepOptions(options.BenchOptions):
    """Options of the sweep benchmark."""

    pairs: int = 10
    """Number of jobs of the sweep, each between two separate processes."""


OPTIONS = SweepOptions


@dataclass(frozen=True)
class JobOverhead:
    """Time of a job beyond its training steps, in seconds. Field names are those of the record."""

    job: float
    """Overhead from the start of the job to its final status."""
    whole: float
    """Overhead including the report and the end of the process."""


def measure(
    runs: Mapping[str, RunConfig], options: SweepOptions, folder: Path
) -> dict[str, object]:
    """Measure the overhead of jobs and of separate processes, and their ratio."""
    run = runs["job"]
    if run.world_size > 1:
        chosen = run.choices.get("parallelism")
        raise ConfigError.for_key("parallelism", chosen, "requires a job of one process")
    start = time.perf_counter()
    processes.start_forkserver(run.imports)
    processes.await_forkserver()
    forkserver_s = time.perf_counter() - start
    warm, fresh = measure_overheads(run, options.pairs, folder)
    warm_s, fresh_s = ([overhead.job for overhead in each] for each in (warm, fresh))
    ratio = paired_ratio.paired_ratio(warm_s, fresh_s)
    ratio_with_report = paired_ratio.paired_ratio(
        [overhead.whole for overhead in warm], [overhead.whole for overhead in fresh]
    )
    print_lines(
        f"overhead of a job: {format_seconds(median(warm_s))} in a sweep, "
        f"{format_seconds(median(fresh_s))} in a separate process; ratio {ratio.median:.3f} "
        f"({ratio.low:.3f} to {ratio.high:.3f}), {ratio_with_report.median:.3f} with its report; "
        f"the forkserver starts in {format_seconds(forkserver_s)}"
    )
    return {
        "bounds": {"ratio": BOUND},
        "model": {"parameters": run.model.num_parameters, "option": run.choices["model"]},
        "steps": run.trainer.max_steps,
        "fresh_s": {"median": median(fresh_s), "all": [asdict(overhead) for overhead in fresh]},
        "warm_s": {"median": median(warm_s), "all": [asdict(overhead) for overhead in warm]},
        "ratio": asdict(ratio),
        "ratio_with_report": asdict(ratio_with_report),
        "nursery_s": forkserver_s,
    }


def measure_overheads(
    run: RunConfig, pairs: int, folder: Path
) -> tuple[list[JobOverhead], list[JobOverhead]]:
    """Overheads of jobs of a sweep, and of one more fresh processes, measured in turn."""
    _warm_overhead(run, folder / "warm" / "first")  # warm-up: prepares data, imports packages
    fresh, warm = [_fresh_overhead(run, folder / "fresh" / "0")], []
    for number in range(1, pairs + 1):
        warm.append(_warm_overhead(run, folder / "warm" / str(number)))
        fresh.append(_fresh_overhead(run, folder / "fresh" / str(number)))
    return warm, fresh


def _warm_overhead(run: RunConfig, folder: Path) -> JobOverhead:
    """Overhead of a job of a sweep."""
    start = time.time()
    result = execute(JobSpec(run, sweep="bench/sweep"), folder)
    html_report.write_page(result.folder)
    if result.status != "ok":
        raise ScalewiseError(f"the measured job ended as {result.status}: {result.reason}")
    return _overhead_since(folder, start)


def _fresh_overhead(run: RunConfig, folder: Path) -> JobOverhead:
    """Overhead of the same job in a separate process."""
    overrides = [*run.overrides, f"hydra.run.dir={folder}"]
    command = [sys.executable, "-m", "scalewise", "train", *overrides]
    start = time.time()
    result = subprocess.run(  # noqa: S603 (fixed arguments)
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise ScalewiseError(f"the measured process failed: {result.stderr.strip()[-500:]}")
    return _overhead_since(folder, start)


def _overhead_since(folder: Path, start: float) -> JobOverhead:
    """Time since ``start`` beyond the training steps of the run."""
    now = time.time()
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        training_s = sum(float(row["time/step_s"]) for row in csv.DictReader(file))
    end = datetime.fromisoformat(str(read_json(folder / "status.json")["ended"])).timestamp()
    return JobOverhead(end - start - training_s, now - start - training_s)
