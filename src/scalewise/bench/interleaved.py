"""Steps of a trainer, interleaved with those of two hand-written loops in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from scalewise.bench import paired_ratio
from scalewise.bench.baseline_loop import BaselineLoop
from scalewise.data.dataloader import Batch, BatchShare, TrainLoader
from scalewise.data.prepare import prepare_splits
from scalewise.hardware import DeviceKind
from scalewise.run_config import RunConfig
from scalewise.run_files import MetricsFile
from scalewise.training.callbacks.metrics_recorder import MetricsRecorder
from scalewise.training.device_setup import RankInfo, set_device
from scalewise.training.lightning_module import TrainingModule
from scalewise.training.trainer import build_trainer, silence_lightning

Times = dict[str, list[float]]

WARM_UP_STEPS = 4
"""Steps of each loop that are not counted; the trainer measures memory in the third."""


class InterleavedLoader:
    """Data loader of a run that takes one step of two hand-written loops before each batch.

    So all loops run under the same conditions of the machine. The ranks start each step together.

    Args:
        run: Config of the run.
        steps: Number of optimizer steps.
        loader: Function that builds the training loader of this rank.
        device: Device of this rank.
    """

    def __init__(
        self, run: RunConfig, steps: int, loader: Callable[[], TrainLoader], device: torch.device
    ) -> None:
        self._run, self._steps, self._loader, self._device = run, steps, loader, device
        self._wall: Times = {"hand": [], "twin": [], "suite": []}
        self._cpu: Times = {"hand": [], "twin": [], "suite": []}

    @cached_property
    def baseline(self) -> BaselineLoop:
        """Loop that the trainer is compared with."""
        return self._build_baseline()

    @cached_property
    def second_baseline(self) -> BaselineLoop:
        """Second loop, which shows the noise in comparison with the first."""
        return self._build_baseline()

    def _build_baseline(self) -> BaselineLoop:
        return BaselineLoop(self._run, self._steps, iter(self._loader()), self._device)

    def __len__(self) -> int:
        return len(self._loader())

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader())
        while True:
            self._time_step("hand", self.baseline.step)
            self._time_step("twin", self.second_baseline.step)
            start = self._read_clocks()
            batch = next(batches, None)  # counts to the step, as in the hand-written loops
            if batch is None:
                return
            yield batch
            self._record_time("suite", start)

    def gather_times(self, warmup_steps: int) -> tuple[Times, Times]:
        """Wall time of the slowest rank and CPU time of all ranks, in seconds by loop.

        The warm-up steps are excluded. The first hand-written loop has one step more than the
        others.
        """
        results = []
        for times, reduction in ((self._wall, dist.ReduceOp.MAX), (self._cpu, dist.ReduceOp.SUM)):
            reduced = {}
            for name, seconds in times.items():
                count = len(self._wall["suite"]) - warmup_steps + (name == "hand")
                step_times = torch.tensor(seconds[warmup_steps:][:count], dtype=torch.float64)
                step_times = step_times.to(self._device)
                if dist.is_initialized():
                    dist.all_reduce(step_times, reduction)
                reduced[name] = step_times.tolist()
            results.append(reduced)
        return results[0], results[1]

    def _time_step(self, name: str, step: Callable[[], object]) -> None:
        start = self._read_clocks()
        step()
        self._record_time(name, start)

    def _read_clocks(self) -> tuple[float, float]:
        """Wall and CPU clock after a barrier."""
        if dist.is_initialized():
            dist.barrier()
        return time.perf_counter(), time.process_time()

    def _record_time(self, name: str, start: tuple[float, float]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._wall[name].append(time.perf_counter() - start[0])
        self._cpu[name].append(time.process_time() - start[1])


Fit = Callable[[RunConfig, Path, RankInfo, int, InterleavedLoader], float]
"""Function that trains a run on a loader for a number of steps and returns the last loss."""


def fit_scalewise(
    run: RunConfig, folder: Path, rank_info: RankInfo, steps: int, loader: InterleavedLoader
) -> float:
    """Train with the trainer of scalewise, which writes its metrics to a file."""
    module, recorder = TrainingModule(run, steps), MetricsRecorder(run, 0, [])
    metrics_file = folder / ".metrics.csv"
    if rank_info.rank == 0:
        recorder.sinks.append(MetricsFile(metrics_file).append)
    with silence_lightning():
        build_trainer(run, folder, rank_info, steps, recorder).fit(module, loader)
    if rank_info.rank == 0:
        metrics_file.unlink()
    return module.last_loss.item()


def measure_steps(
    run: RunConfig, folder: Path, rank_info: RankInfo, pairs: int, fit: Fit = fit_scalewise
) -> dict[str, Any]:
    """Step times of ``fit`` and of two hand-written loops, without the warm-up.

    All ranks call it.

    Returns:
        ``wall`` and ``cpu``: seconds by loop (``hand``, ``twin``, ``suite``), with one more step of
        ``hand``. ``loss``: last loss of ``suite`` and ``hand``.
    """
    run = replace(run, trainer=replace(run.trainer, max_steps=WARM_UP_STEPS + pairs + 1))
    set_device(run, rank_info)
    on_cuda = run.hardware.device is DeviceKind.cuda
    device = torch.device("cuda", rank_info.local_rank) if on_cuda else torch.device("cpu")
    splits = prepare_splits(run.data, run.model.vocabulary, run.seed)
    steps = run.num_steps(len(splits.train))
    batch_share = BatchShare(run.global_batch, run.micro_batch, rank_info.rank, run.world_size)

    def build_loader() -> TrainLoader:
        return TrainLoader(
            splits.train, batch_share, seed=run.seed, steps=steps + 1, pin_memory=on_cuda
        )

    interleaved = InterleavedLoader(run, steps, build_loader, device)
    loss = fit(run, folder, rank_info, steps, interleaved)
    wall, cpu = interleaved.gather_times(WARM_UP_STEPS)
    losses = {"suite": loss, "hand": interleaved.baseline.loss.item()}
    return {"wall": wall, "cpu": cpu, "loss": losses}


def compare_loops(times: dict[str, Any]) -> dict[str, Any]:
    """Ratios of the step times of the trainer and the hand-written loops."""
    wall, cpu = times["wall"], times["cpu"]
    baseline, trainer = wall["hand"], wall["suite"]
    return {
        "suite_s": median(trainer),
        "hand_s": median(baseline),
        "extra_s": median(paired_ratio.neighbor_excess(trainer, baseline)),
        "ratio": asdict(paired_ratio.paired_ratio(trainer, baseline)),
        "self_check": asdict(paired_ratio.paired_ratio(wall["twin"], baseline)),
        "cpu_ratio": asdict(paired_ratio.paired_ratio(cpu["suite"], cpu["hand"])),
        "loss": times["loss"],
    }
