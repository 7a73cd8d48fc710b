"""What a job of a sweep costs beyond its training, beside a fresh process for the same line.

A sweep's job leaves the calling process, so that nothing of it stays there; it is forked from a
server that has imported everything. Whoever starts a process for each job has the same isolation,
and imports everything each time.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from scalewise.bench import options, paired_ratio
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ScalewiseError
from scalewise.launch import processes
from scalewise.launch.job import JobSpec, execute
from scalewise.reports import page
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import read_json
from scalewise.units import format_seconds

BOUND = 0.10
"""A warm job may cost this much of a fresh process, training aside, at the most."""
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
    """How much is measured."""

    pairs: int = 10
    """Jobs of the sweep, each between two fresh processes."""


OPTIONS = SweepOptions


@dataclass(frozen=True)
class JobOverhead:
    """What one job took beyond its steps, seconds."""

    job: float
    """From its start, a process's or an order's, to its status."""
    whole: float
    """With its report, and the process's own end."""


def measure(
    runs: Mapping[str, RunConfig], options: SweepOptions, folder: Path
) -> dict[str, object]:
    """Returns seconds beyond training of both, and their ratio with its interval."""
    run = runs["job"]
    if run.world_size > 1:
        chosen = run.choices.get("parallelism")
        raise ConfigError.for_key("parallelism", chosen, "a job of one process is compared")
    began = time.perf_counter()
    processes.start_forkserver(run.imports)
    processes.await_forkserver()
    nursery = time.perf_counter() - began
    _warm_overhead(run, folder / "warm" / "first")  # prepares data, imports what this process needs
    fresh, warm = [_fresh_overhead(run, folder / "fresh" / "0")], []
    for number in range(1, options.pairs + 1):
        warm.append(_warm_overhead(run, folder / "warm" / str(number)))
        fresh.append(_fresh_overhead(run, folder / "fresh" / str(number)))
    found = paired_ratio.paired_ratio(_run_jobs(warm), _run_jobs(fresh))
    whole = paired_ratio.paired_ratio([one.whole for one in warm], [one.whole for one in fresh])
    print_lines(
        f"beyond its steps a job takes {format_seconds(median(_run_jobs(warm)))} in a sweep and "
        f"{format_seconds(median(_run_jobs(fresh)))} as a process of its own: {found.median:.3f} "
        f"({found.low:.3f} to {found.high:.3f}), with its report {whole.median:.3f}; "
        f"a sweep is warm after {format_seconds(nursery)}"
    )
    return {
        "bounds": {"ratio": BOUND},
        "model": {"parameters": run.model.num_parameters, "option": run.choices["model"]},
        "steps": run.trainer.max_steps,
        "fresh_s": {"median": median(_run_jobs(fresh)), "all": [asdict(one) for one in fresh]},
        "warm_s": {"median": median(_run_jobs(warm)), "all": [asdict(one) for one in warm]},
        "ratio": asdict(found),
        "ratio_with_report": asdict(whole),
        "nursery_s": nursery,
    }


def _run_jobs(costs: Sequence[JobOverhead]) -> list[float]:
    return [cost.job for cost in costs]


def _warm_overhead(run: RunConfig, folder: Path) -> JobOverhead:
    """Returns what a job of a sweep takes in this process."""
    began = time.time()
    result = execute(JobSpec(run, sweep="bench/sweep"), folder)
    page.write_page(result.folder)
    if result.status != "ok":
        raise ScalewiseError(f"the job to measure {result.status}: {result.reason}")
    return _overhead_since(folder, began)


def _fresh_overhead(run: RunConfig, folder: Path) -> JobOverhead:
    """Returns what a process for the same line takes."""
    line = [sys.executable, "-m", "scalewise", "train", *run.overrides, f"hydra.run.dir={folder}"]
    began = time.time()
    ended = subprocess.run(  # noqa: S603 (a list of our own words)
        line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise ScalewiseError(f"the process to measure failed: {ended.stderr.strip()[-500:]}")
    return _overhead_since(folder, began)


def _overhead_since(folder: Path, start: float) -> JobOverhead:
    """Returns what was taken until now, since ``start``, beyond the steps of the run."""
    now = time.time()
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        steps = sum(float(row["time/step_s"]) for row in csv.DictReader(file))
    ended = datetime.fromisoformat(str(read_json(folder / "status.json")["ended"])).timestamp()
    return JobOverhead(ended - start - steps, now - start - steps)
