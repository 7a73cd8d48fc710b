"""What the suite's trainer costs a step beside a loop written by hand, and how fast ranks start."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from scalewise.bench import options, paired_ratio, ranks
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import DeviceKind, this_machine
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import read_json, write_json
from scalewise.units import format_seconds

WARM_UP = 4
"""Steps of each loop before the first that counts; the suite measures memory in its second."""

LAUNCHES = 5
BOUND = 1.03
"""A step of the suite may take this much of a hand-written one, at the most."""
LAUNCH_BOUND = 0.5
"""Seconds from elastic's start to a rank's own code, at the most."""

_AT_REST = (
    "data=synthetic",
    "data.sequence=256",
    "schedule.warmup_steps=2",
    "trainer.micro_batch=4",
    "trainer.validate_every=null",
    "checkpoint=none",
    "tracking=none",
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("parallelism=ddp", *_AT_REST),
    "fsdp": ("parallelism=fsdp", *_AT_REST),
}
_TIMES = ".times.json"


@dataclass(frozen=True)
class ParallelOptions(options.BenchOptions):
    """How much is measured."""

    pairs: int = 40
    """Steps of the suite for each layout, each between two steps of the hand-written loop."""


OPTIONS = ParallelOptions


def measure(
    runs: Mapping[str, RunConfig], options: ParallelOptions, folder: Path
) -> dict[str, object]:
    """Returns step times, their ratio with its interval, and times of launching."""
    for run in runs.values():
        _check_options(run)
    print_lines(f"{'':<6}{'suite':>10}{'hand':>10}   ratio (95 % interval)   hand beside itself")
    layouts: dict[str, object] = {}
    for name, run in runs.items():
        run = replace(run, trainer=replace(run.trainer, max_steps=WARM_UP + options.pairs + 1))
        ranks.run_ranks(partial(_measure_rank, run, folder), run.world_size, folder)
        times: Any = read_json(folder / _TIMES)
        (folder / _TIMES).unlink()
        layouts[name] = found = _compare_layout(times)
        print_lines(
            f"{name:<6}{format_seconds(found['suite_s']):>10}{format_seconds(found['hand_s']):>10}"
            f"   {_ratio_text(found['ratio'])}   {_ratio_text(found['self_check'])}"
        )  # fmt: skip
    launches = [
        _launch_seconds(next(iter(runs.values())).world_size, folder) for _ in range(LAUNCHES)
    ]
    print_lines(
        "", f"a rank's own code runs {format_seconds(median(launches))} after elastic starts"
    )
    first = next(iter(runs.values()))
    return {
        "bounds": {"ratio": BOUND, "launch_s": LAUNCH_BOUND},
        "model": {"parameters": first.model.num_parameters, "option": first.choices["model"]},
        "rows_a_rank": first.micro_batch,
        "sequence": first.data.sequence,
        "ranks": first.world_size,
        "layouts": layouts,
        "launch_s": {"median": median(launches), "all": launches},
    }


def _check_options(run: RunConfig) -> None:
    on_cuda = run.hardware.device is DeviceKind.cuda
    machine = this_machine()
    gpus = len(machine.gpus) if on_cuda else None
    ranks.check_ranks(run.world_size, "ranks", gpus, machine.max_cpu_ranks)
    wrong = []
    if run.precision.compute is not FloatFormat.fp32:
        chosen = run.choices.get("precision")
        wrong.append(ConfigIssue("precision", chosen, "the hand-written loop computes in fp32"))
    if run.accumulation > 1:
        reason, fix = "the hand-written loop has one micro batch a step", "leave it out"
        wrong.append(ConfigIssue("trainer.global_batch", run.global_batch, reason, fix))
    if wrong:
        raise ConfigError(wrong)


def _compare_layout(times: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ratios of one layout from the times of its loops, s: wall and processor."""
    wall, cpu = times["wall"], times["cpu"]
    hand, suite = wall["hand"], wall["suite"]
    return {
        "suite_s": median(suite),
        "hand_s": median(hand),
        "extra_s": median(paired_ratio.neighbor_excess(suite, hand)),
        "ratio": asdict(paired_ratio.paired_ratio(suite, hand)),
        "self_check": asdict(paired_ratio.paired_ratio(wall["twin"], hand)),
        "cpu_ratio": asdict(paired_ratio.paired_ratio(cpu["suite"], cpu["hand"])),
        "loss": times["loss"],
    }


def _ratio_text(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def _launch_seconds(count: int, folder: Path) -> float:
    """Returns the seconds from elastic's start until the last of the ranks runs its own code."""
    began = time.time()
    ranks.run_ranks(partial(_note_arrival, folder), count, folder)
    arrived = [float(path.read_text("utf-8")) for path in folder.glob(".arrived-*")]
    for path in folder.glob(".arrived-*"):
        path.unlink()
    return max(arrived) - began


def _note_arrival(folder: Path) -> None:
    now = time.time()
    (folder / f".arrived-{os.environ['RANK']}").write_text(str(now), "utf-8")


def _measure_rank(run: RunConfig, folder: Path) -> None:
    """Trains with the suite in one of the ranks; between its steps the hand-written loops take one.

    Rank 0 writes the times: of the slowest rank, and of all their processors together.
    """
    import torch
    import torch.distributed as dist

    from scalewise.bench.interleaved_loader import InterleavedLoader
    from scalewise.data.dataloader import BatchShare, TrainLoader
    from scalewise.tracking.run_files import MetricsFile
    from scalewise.training.callbacks.metrics_recorder import MetricsRecorder
    from scalewise.training.fit import RankInfo, build_trainer, set_device, silence_lightning
    from scalewise.training.lightning_module import TrainingModule

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    place = RankInfo(rank, local, int(os.environ["LOCAL_WORLD_SIZE"]))
    set_device(run, place)
    on_cuda = run.hardware.device is DeviceKind.cuda
    device = torch.device("cuda", local) if on_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if on_cuda else "gloo")
    splits = run.data.prepare(run.model.vocabulary, run.seed)
    steps = run.num_steps(len(splits.train))
    share = BatchShare(run.global_batch, run.micro_batch, rank, run.world_size)

    def loader() -> TrainLoader:
        return TrainLoader(
            splits.train, share, seed=run.seed, steps=steps + 1, start=0, pin_memory=on_cuda
        )

    module, recorder = TrainingModule(run, steps), MetricsRecorder(run, 0, [])
    if rank == 0:
        recorder.sinks.append(MetricsFile(folder / ".metrics.csv").append)
    turns = InterleavedLoader(run, steps, loader, device)
    with silence_lightning():
        build_trainer(run, folder, place, steps, recorder).fit(module, turns)
    wall, cpu = turns.gather_times(WARM_UP)
    losses = {"suite": module.last_loss.item(), "hand": turns.baseline.loss.item()}
    if rank == 0:
        (folder / ".metrics.csv").unlink()
        write_json(folder / _TIMES, {"wall": wall, "cpu": cpu, "loss": losses})
    dist.barrier()
    dist.destroy_process_group()
