"""Overhead of the trainer per step, compared with a hand-written loop, and launch time of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from scalewise.bench import options, ranks
from scalewise.bench.interleaved import compare_loops, measure_steps
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import DeviceKind, this_machine
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json, write_json
from scalewise.training.device_setup import RankInfo
from scalewise.units import format_seconds

LAUNCHES = 5
BOUND = 1.03
"""Maximum ratio of the step time to that of the hand-written loop."""
LAUNCH_BOUND = 0.5
"""Maximum time from the start of torch elastic to the first code of a rank, in seconds."""

_BASE = (
    "data=synthetic",
    "data.sequence=256",
    "schedule.warmup_steps=2",
    "trainer.micro_batch=4",
    "trainer.validate_every=null",
    "checkpoint=none",
    "tracking=none",
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("parallelism=ddp", *_BASE),
    "fsdp": ("parallelism=fsdp", *_BASE),
}
_TIMES = ".times.json"


@dataclass(frozen=True)
class ParallelOptions(options.BenchOptions):
    """Options of the parallel benchmark."""

    pairs: int = 40
    """Measured steps per strategy, each between two steps of the hand-written loop."""


OPTIONS = ParallelOptions


def measure(
    runs: Mapping[str, RunConfig], options: ParallelOptions, folder: Path
) -> dict[str, object]:
    """Measure step times, their ratio with a confidence interval, and launch times."""
    for run in runs.values():
        check_options(run)
    print_lines(f"{'':<6}{'scalewise':>10}{'baseline':>10}   ratio (95% interval)    noise ratio")
    results: dict[str, object] = {}
    for name, run in runs.items():
        results[name] = result = compare_loops(measure_ranks(run, folder, options.pairs))
        print_lines(
            f"{name:<6}{format_seconds(result['suite_s']):>10}"
            f"{format_seconds(result['hand_s']):>10}"
            f"   {_ratio_text(result['ratio'])}   {_ratio_text(result['self_check'])}"
        )  # fmt: skip
    launches = [
        _launch_seconds(next(iter(runs.values())).world_size, folder) for _ in range(LAUNCHES)
    ]
    print_lines(
        "", f"launch time: {format_seconds(median(launches))} from torch elastic to the last rank"
    )
    first = next(iter(runs.values()))
    return {
        "bounds": {"ratio": BOUND, "launch_s": LAUNCH_BOUND},
        "model": {"parameters": first.model.num_parameters, "option": first.choices["model"]},
        "rows_a_rank": first.micro_batch,
        "sequence": first.data.sequence,
        "ranks": first.world_size,
        "layouts": results,
        "launch_s": {"median": median(launches), "all": launches},
    }


def measure_ranks(run: RunConfig, folder: Path, pairs: int) -> dict[str, Any]:
    """Step times of a run with several ranks and of hand-written loops; see ``measure_steps``."""
    ranks.run_ranks(partial(_measure_rank, run, folder, pairs), run.world_size, folder)
    times = read_json(folder / _TIMES)
    (folder / _TIMES).unlink()
    return times


def check_options(run: RunConfig) -> None:
    """Raise ``ConfigError`` for runs that the hand-written loops do not support."""
    on_cuda = run.hardware.device is DeviceKind.cuda
    machine = this_machine()
    gpus = len(machine.gpus) if on_cuda else None
    ranks.check_ranks(run.world_size, "ranks", gpus, machine.max_cpu_ranks)
    issues = []
    if run.precision.compute is not FloatFormat.fp32:
        chosen = run.choices.get("precision")
        reason = "is not supported: the hand-written loop computes in fp32"
        issues.append(ConfigIssue("precision", chosen, reason))
    if run.accumulation > 1:
        reason = "is not supported: the hand-written loop has one micro-batch per step"
        issues.append(ConfigIssue("trainer.global_batch", run.global_batch, reason, "leave it out"))
    if issues:
        raise ConfigError(issues)


def _ratio_text(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def _launch_seconds(count: int, folder: Path) -> float:
    """Time from the start of torch elastic to the first code of the last rank, in seconds."""
    start = time.time()
    ranks.run_ranks(partial(_write_start_time, folder), count, folder)
    start_times = [float(path.read_text("utf-8")) for path in folder.glob(".started-*")]
    for path in folder.glob(".started-*"):
        path.unlink()
    return max(start_times) - start


def _write_start_time(folder: Path) -> None:
    now = time.time()
    (folder / f".started-{os.environ['RANK']}").write_text(str(now), "utf-8")


def _measure_rank(run: RunConfig, folder: Path, pairs: int) -> None:
    """Train in one rank, interleaved with the hand-written loops; rank 0 writes the times."""
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    rank_info = RankInfo(rank, local, int(os.environ["LOCAL_WORLD_SIZE"]))
    on_cuda = run.hardware.device is DeviceKind.cuda
    if on_cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    times = measure_steps(run, folder, rank_info, pairs)
    if rank == 0:
        write_json(folder / _TIMES, times)
    dist.barrier()
    dist.destroy_process_group()
