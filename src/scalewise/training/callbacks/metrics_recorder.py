"""Measures every step and reports every few: nothing waits for the device in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from scalewise.hardware import DeviceKind
from scalewise.measure.memory import MemoryProbe
from scalewise.measure.steptime import OTHER, StepTimer
from scalewise.objectives import UserModule
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ParallelStrategy
from scalewise.torch_compile import CompileScope
from scalewise.tracking.metric_names import TIMES
from scalewise.training.callbacks.callback_args import EMAArgs, ProfilerArgs
from scalewise.training.lightning_module import TrainingModule

PROBED_STEP = 3
"""The step whose memory is measured: by then there is optimizer state, and DDP has its buckets."""

Row = dict[str, Any]


Sink = Callable[[list[Row]], None]
"""Takes the rows of one window, a step each, in order: a file, W&B, a terminal."""


class MetricsRecorder(Callback):
    """Keeps loss, gradient norm, times and memory; hands whole windows to the sinks of rank 0.

    The first callback in line, so that a step ends before the others do their work; ``Waiting``
    is the last.
    """

    def __init__(
        self, run: RunConfig, start_step: int, sinks: list[Sink], unpadded_fraction: float = 1.0
    ) -> None:
        """``unpadded_fraction``: share of the training rows' places that hold tokens, not
        padding."""
        self.run, self.sinks, self.unpadded_fraction = run, sinks, unpadded_fraction
        self.start_step = start_step
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._rates: list[float] = []
        self._probe: MemoryProbe | None = None
        self._memory: Row = {}
        self.rows: list[Row] = []
        self.initial_validation: Row = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        layout = trainer_strategy(trainer)
        self._forward_phase = "forward_backward" if layout.fuses_forward_backward else "forward"
        layout.set_backward_callback(self._probe_activations)
        self.timer = StepTimer(pl_module.device)
        self.timer.mark("data")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Ends the wait for data."""
        last = (batch_idx + 1) % self.run.accumulation == 0
        probed = trainer.global_step == self.start_step + PROBED_STEP - 1
        if probed and last and self._can_measure(trainer):
            optimizer = trainer.optimizers[0]
            holdings = trainer_strategy(trainer).strategy_buffers()
            averages = [
                tensor
                for callback in trainer.callbacks  # type: ignore[attr-defined]  # Lightning's
                if isinstance(callback, EMAArgs)
                for tensor in callback.average_tensors
            ]
            self._probe = MemoryProbe(
                pl_module,
                optimizer,
                pl_module.device,
                holdings,
                averages=averages,
                compiled=self._is_compiled,
            )
            self._probe.start()
        self.timer.mark(self._forward_phase)

    @property
    def _is_compiled(self) -> bool:
        return self.run.compile.scope is not CompileScope.none

    def _can_measure(self, trainer: Trainer) -> bool:
        """Returns whether memory is counted: compiled on the CPU, torch's profiler does it.

        There is one in a process, which may crash beside gloo's threads.
        """
        if not self._is_compiled or self.run.hardware.device is not DeviceKind.cpu:
            return True
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        profiled = any(isinstance(each, ProfilerArgs) for each in callbacks)
        return trainer.world_size == 1 and not profiled

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Ends the forward pass."""
        self._probe_activations()
        self.timer.mark("backward")

    def _probe_activations(self) -> None:
        if self._probe:
            self._probe.before_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the backward pass."""
        self.timer.mark("optimizer")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Keeps the rate of the step to come."""
        if self._probe:
            self._probe.before_optimizer()
        self._rates.append(float(optimizer.param_groups[0]["lr"]))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Ends a micro batch and, at the last of a step, the step."""
        measured, norm = self.get_loss_and_norm(pl_module, outputs)
        self._losses.append(measured)
        if len(self._losses) % self.run.accumulation:
            return
        self._norms.append(norm)
        if self._probe:
            self._memory, self._probe = self._probe.finish(), None
        self.timer.end_step()
        step = trainer.global_step
        due = step % self.run.trainer.log_every == 0 or step == trainer.max_steps
        if due and not is_validation_next(trainer, self.run):
            self.flush(trainer)

    def get_loss_and_norm(
        self, module: LightningModule, outputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what was measured of the last micro batch, and the norm of the gradient."""
        assert isinstance(module, TrainingModule)
        return module.last_losses, module.last_grad_norm

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps validation out of the step."""
        if not trainer.sanity_checking:
            self.timer.mark(OTHER)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hands on what was measured on held-out rows, with its step."""
        found = validation_metrics(trainer, self.run)
        if trainer.sanity_checking:  # what Lightning calls a validation before the first step
            self.initial_validation = found
        else:
            self.flush(trainer, found)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Hands on every step that a checkpoint stands on."""
        self.flush(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Hands on what is known, where no other rank has to help."""
        if self._probe:
            self._probe.abandon()
        if trainer.world_size == 1 and self._norms:  # else no step, or no clock, was begun
            self.flush(trainer)

    def flush(self, trainer: Trainer, last_row: Row | None = None) -> None:
        """Hands the steps kept so far to the sinks; every rank must call it at the same step.

        ``last_row`` are further measurements of the last of them.
        """
        self.timer.mark(OTHER)
        steps = len(self._norms)
        if not steps:
            return
        rows = list(self._build_rows(trainer, steps))
        self._losses, self._norms, self._rates = [], [], []
        rows[-1] |= last_row or {}
        for row in rows:
            if self._memory and row["step"] == self.start_step + PROBED_STEP:
                row |= fullest_rank_memory(self._memory, trainer.strategy.root_device)
        self.rows += rows
        for sink in self.sinks:
            sink(rows)

    def _build_rows(self, trainer: Trainer, steps: int) -> Iterator[Row]:
        accumulation = self.run.accumulation
        kept, keys = steps * accumulation, self.run.objective.metric_keys
        passes_NK = torch.stack(self._losses[:kept]).float()
        means_SK = passes_NK.view(steps, accumulation, len(keys)).mean(1)
        norm_S = torch.stack([norm.to(means_SK.device) for norm in self._norms]).float()
        spent = self.timer.drain()[-steps:]
        phases = [phase for phase in TIMES if phase in spent[0]]
        seconds_SP = torch.tensor(
            [[step[phase] for phase in phases] for step in spent],
            dtype=torch.float64,
            device=means_SK.device,
        )
        found_SK = torch.cat([means_SK, norm_S[:, None]], 1).double()
        if dist.is_initialized() and dist.get_world_size() > 1:
            means_SK = found_SK[:, :-1] / dist.get_world_size()
            dist.all_reduce(means_SK, dist.ReduceOp.SUM)
            found_SK[:, :-1] = means_SK
        numbers, seconds = found_SK.tolist(), slowest_rank_times(seconds_SP).tolist()
        first = trainer.global_step - steps + 1
        for place in range(steps):
            times = dict(zip(phases, seconds[place], strict=True))
            yield {
                "step": first + place,
                **{f"train/{key}": numbers[place][n] for n, key in enumerate(keys)},
                "train/grad_norm": numbers[place][-1],
                "train/lr": self._rates[place],
                **self._throughput_metrics(first + place, times),
            }

    def _throughput_metrics(self, step: int, times: Mapping[str, float]) -> Row:
        run, total = self.run, sum(times.values())
        return {
            "train/tokens": step * run.tokens_per_step,
            "throughput/tokens_per_s": run.tokens_per_step / total,
            "throughput/tokens_per_s_per_device": run.tokens_per_step / total / run.world_size,
            "throughput/unpadded_tokens_per_s": run.tokens_per_step
            * self.unpadded_fraction
            / total,
            **self.flops_metrics(total),
            "time/step_s": total,
            **{f"time/{phase}_s": times.get(phase) for phase in TIMES},
        }

    def flops_metrics(self, seconds: float) -> Row:
        """Returns what one device computes in a step of so many seconds."""
        run = self.run
        flops = run.flops_per_step / run.world_size / seconds
        peak = run.hardware.peak_flops(run.precision.peak_kind)
        return {
            "throughput/tflops_per_s_per_device": flops / 1e12,
            "throughput/mfu": flops / self._device_peak_flops(peak) if peak else None,
        }

    def _device_peak_flops(self, peak: float) -> float:
        """Returns the peak of one device; ranks on the CPU share one processor."""
        return peak / (self.run.world_size if self.run.hardware.device == "cpu" else 1)


def trainer_strategy(trainer: Trainer) -> ParallelStrategy:
    """Returns the layout that a trainer trains with."""
    assert isinstance(trainer.strategy, ParallelStrategy)
    return trainer.strategy


def validation_metrics(trainer: Trainer, run: RunConfig) -> Row:
    """Returns what the last validation measured, by key; of a user's module what it has logged."""
    found, objective = trainer.callback_metrics, run.objective
    if isinstance(objective, UserModule):
        name = objective.held_out
        return {"val/loss": float(found[name])} if name in found else {}
    return {f"val/{key}": float(found[f"val/{key}"]) for key in objective.metric_keys}


def slowest_rank_times(seconds_SP: torch.Tensor) -> torch.Tensor:
    """Returns the seconds, a row a step, of the rank that took longest for all steps together.

    Steps of one rank, end to end, are its wall time; the longest of each step or phase, from
    whichever rank, would add up to more than any rank took.
    """
    everyone_RSP = _gather_ranks(seconds_SP)
    return everyone_RSP[everyone_RSP.sum((1, 2)).argmax()]


def fullest_rank_memory(memory: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """Returns the memory, bytes by key, that the rank with the largest peak measured."""
    own_K = torch.tensor(list(memory.values()), dtype=torch.int64, device=device)
    everyone_RK = _gather_ranks(own_K)
    fullest = everyone_RK[:, list(memory).index("memory/peak_bytes")].argmax()
    return dict(zip(memory, everyone_RK[fullest].tolist(), strict=True))


def _gather_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of each rank, by rank; all ranks must call it at once."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor[None]
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return torch.stack(everyone)


def is_validation_next(trainer: Trainer, run: RunConfig) -> bool:
    """Returns whether a validation follows the step that has just ended."""
    every = run.trainer.validate_every
    asked = every is not None and trainer.global_step % every == 0
    return asked and bool(trainer.val_dataloaders)


class DataWaitMarker(Callback):
    """Says that what follows a micro batch is waiting for data; the last callback in line."""

    def __init__(self, recorder: MetricsRecorder) -> None:
        self._recorder = recorder

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Marks the time after a micro batch."""
        self._recorder.timer.mark("data")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Marks the time after validation."""
        if not trainer.sanity_checking:
            self._recorder.timer.mark("data")
