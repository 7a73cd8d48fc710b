"""The suite's data, behind which hand-written loops take their steps in turn with it."""

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
    """A loader for the suite that lets two hand-written loops step before each of its batches.

    All loops see the same neighbours and the same state of the machine; ranks start each step
    together.
    """

    def __init__(
        self, run: RunConfig, steps: int, loader: Callable[[], TrainLoader], device: torch.device
    ) -> None:
        self._run, self._steps, self._loader, self._device = run, steps, loader, device
        self._wall: Times = {"hand": [], "twin": [], "suite": []}
        self._cpu: Times = {"hand": [], "twin": [], "suite": []}

    @cached_property
    def baseline(self) -> BaselineLoop:
        """Returns the loop that the suite is compared with."""
        return self._build_baseline()

    @cached_property
    def second_baseline(self) -> BaselineLoop:
        """Returns a second such loop: compared with the first, it shows what is noise."""
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
            began = self._read_clocks()
            batch = next(batches, None)  # part of the suite's step, as it is of the others'
            if batch is None:
                return
            yield batch
            self._record_time("suite", began)

    def gather_times(self, warmup_steps: int) -> tuple[Times, Times]:
        """Returns wall seconds of the slowest rank and processor seconds of all ranks, by loop.

        The first steps are left out; the hand-written loop has one more than the others.
        """
        found = []
        for times, over in ((self._wall, dist.ReduceOp.MAX), (self._cpu, dist.ReduceOp.SUM)):
            counted = {}
            for name, seconds in times.items():
                count = len(self._wall["suite"]) - warmup_steps + (name == "hand")
                told = torch.tensor(seconds[warmup_steps:][:count], dtype=torch.float64)
                told = told.to(self._device)
                dist.all_reduce(told, over)
                counted[name] = told.tolist()
            found.append(counted)
        return found[0], found[1]

    def _time_step(self, name: str, step: Callable[[], object]) -> None:
        began = self._read_clocks()
        step()
        self._record_time(name, began)

    def _read_clocks(self) -> tuple[float, float]:
        """Returns the clocks at a moment that all ranks share."""
        dist.barrier()
        return time.perf_counter(), time.process_time()

    def _record_time(self, name: str, start: tuple[float, float]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._wall[name].append(time.perf_counter() - start[0])
        self._cpu[name].append(time.process_time() - start[1])
