"""Hand-written training loop, the baseline of a benchmark, and its interleaving with a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scalewise.data.dataloader import Batch, TrainLoader
from scalewise.models.build import build_model
from scalewise.objectives.losses import sum_over_tokens
from scalewise.optimizers.build import build_optimizer
from scalewise.parallelism.ddp import DDPConfig
from scalewise.run_config import RunConfig
from scalewise.strategies.ddp import CONSTANT_BUFFERS
from scalewise.training.lightning_module import build_lr_scheduler

Times = dict[str, list[float]]


class BaselineLoop:
    """Training loop with the model, data, optimizer, schedule and clipping of a run.

    Every rank must construct it.

    Args:
        run: Config of the run.
        steps: Length of the learning-rate schedule.
        batches: Batches of this rank.
        device: Device of this rank.
    """

    def __init__(
        self, run: RunConfig, steps: int, batches: Iterator[Batch], device: torch.device
    ) -> None:
        self._run, self._batches, self._device = run, batches, device
        self._labels = run.tokens_per_step // run.world_size
        model: Any = build_model(run.model, run.seed).to(device)
        if isinstance(run.parallelism, DDPConfig):
            self._model: nn.Module = DistributedDataParallel(
                model,
                bucket_cap_mb=run.parallelism.bucket_mib,
                gradient_as_bucket_view=run.parallelism.gradient_as_bucket_view,
                **CONSTANT_BUFFERS,
            )
        else:
            mesh = init_device_mesh(device.type, (run.world_size,))
            for block in model.layers():
                fully_shard(block, mesh=mesh)
            self._model = fully_shard(model, mesh=mesh)
        weights = {weight.name: weight for weight in run.weight_census()}
        parameters = [
            (weights[name.removeprefix("module.")], parameter)
            for name, parameter in self._model.named_parameters()
        ]
        self._optimizer = build_optimizer(run.optimizer, parameters)
        self._schedule = build_lr_scheduler(run.schedule, self._optimizer, steps)
        self.loss = torch.zeros(())

    def step(self) -> Tensor:
        """Take one optimizer step; return the loss of this rank."""
        batch = {name: x_BT.to(self._device) for name, x_BT in next(self._batches).items()}
        logits_BTV = self._model(batch["inputs"])
        loss = sum_over_tokens(self._run.objective, logits_BTV, batch["labels"]) / self._labels
        loss.backward()
        limit = self._run.trainer.clip_norm
        if limit is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), limit)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self.loss = loss.detach()
        return self.loss


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
