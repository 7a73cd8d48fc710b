"""Data loader that interleaves the steps of a run with those of hand-written loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cached_property

import torch
import torch.distributed as dist

from scalewise.bench.baseline_loop import BaselineLoop
from scalewise.data.dataloader import Batch, TrainLoader
from scalewise.run_config import RunConfig

Times = dict[str, list[float]]


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
        dist.barrier()
        return time.perf_counter(), time.process_time()

    def _record_time(self, name: str, start: tuple[float, float]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._wall[name].append(time.perf_counter() - start[0])
        self._cpu[name].append(time.process_time() - start[1])
