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
    def hand(self) -> BaselineLoop:
        """Returns the loop that the suite is compared with."""
        return self._loop()

    @cached_property
    def twin(self) -> BaselineLoop:
        """Returns a second such loop: compared with the first, it shows what is noise."""
        return self._loop()

    def _loop(self) -> BaselineLoop:
        return BaselineLoop(self._run, self._steps, iter(self._loader()), self._device)

    def __len__(self) -> int:
        return len(self._loader())

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader())
        while True:
            self._time("hand", self.hand.step)
            self._time("twin", self.twin.step)
            began = self._now()
            batch = next(batches, None)  # part of the suite's step, as it is of the others'
            if batch is None:
                return
            yield batch
            self._note("suite", began)

    def times(self, skipped: int) -> tuple[Times, Times]:
        """Returns wall seconds of the slowest rank and processor seconds of all ranks, by loop.

        The first steps are left out; the hand-written loop has one more than the others.
        """
        found = []
        for times, over in ((self._wall, dist.ReduceOp.MAX), (self._cpu, dist.ReduceOp.SUM)):
            counted = {}
            for name, seconds in times.items():
                count = len(self._wall["suite"]) - skipped + (name == "hand")
                told = torch.tensor(seconds[skipped:][:count], dtype=torch.float64)
                told = told.to(self._device)
                dist.all_reduce(told, over)
                counted[name] = told.tolist()
            found.append(counted)
        return found[0], found[1]

    def _time(self, name: str, step: Callable[[], object]) -> None:
        began = self._now()
        step()
        self._note(name, began)

    def _now(self) -> tuple[float, float]:
        """Returns the clocks at a moment that all ranks share."""
        dist.barrier()
        return time.perf_counter(), time.process_time()

    def _note(self, name: str, began: tuple[float, float]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._wall[name].append(time.perf_counter() - began[0])
        self._cpu[name].append(time.process_time() - began[1])
