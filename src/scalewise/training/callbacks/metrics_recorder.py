"""Recording of metrics at every step, without device synchronization between log intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from scalewise.callback_config import EMAArgs, ProfilerArgs
from scalewise.hardware import DeviceKind
from scalewise.measure.memory import MemoryProbe
from scalewise.measure.step_timer import OTHER, StepTimer
from scalewise.metric_names import SOURCE_LOSS, STEP_PHASES
from scalewise.objectives import UserModule
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ParallelStrategy
from scalewise.training.callbacks.expert_metrics import ExpertMetrics
from scalewise.training.lightning_module import TrainingModule

PROBED_STEP = 3
"""First step whose memory may be measured; optimizer state and DDP buckets exist by then."""
PEAK_MICRO_BATCHES = 3
"""Number of micro-batches of a step from which more of them do not raise the peak."""

Row = dict[str, Any]
"""Metrics of one optimizer step by key."""

Sink = Callable[[list[Row]], None]
"""Receiver of the metrics of one log interval, in order of steps: a file, W&B, a terminal."""


class MetricsRecorder(Callback):
    """Record loss, gradient norm, times and memory; pass them to the sinks at log intervals.

    It is the first callback, so that the step time excludes the other ones; ``DataWaitMarker``
    is the last. Only rank 0 has sinks.

    Args:
        run: Config of the run.
        start_step: Optimizer step from which the run resumes; 0: from scratch.
        sinks: Receivers of the metrics.
        unpadded_fraction: Fraction of the training positions that are not padding.
    """

    def __init__(
        self, run: RunConfig, start_step: int, sinks: list[Sink], unpadded_fraction: float = 1.0
    ) -> None:
        self.run, self.sinks, self.unpadded_fraction = run, sinks, unpadded_fraction
        self.start_step = start_step
        self._probed_step = start_step + PROBED_STEP
        per_step = run.micro_batches_per_step
        for end, count in per_step.stages:
            if count < min(per_step.final, PEAK_MICRO_BATCHES):
                self._probed_step = max(self._probed_step, end + 1)
        for end, _ in run.sequence_per_step.stages:
            self._probed_step = max(self._probed_step, end + 1)
        self._step, self._num_micro_batches = start_step, 0
        self._accumulation = per_step.at(start_step)
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._rates: list[float] = []
        self._skipped: list[int] = []
        self._probe: MemoryProbe | None = None
        self._memory: Row = {}
        self.rows: list[Row] = []
        self.initial_validation: Row = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the step timer."""
        strategy = trainer_strategy(trainer)
        self._forward_phase = "forward_backward" if strategy.fuses_forward_backward else "forward"
        strategy.set_backward_callback(self._probe_activations)
        self._experts = ExpertMetrics(pl_module)
        self.timer = StepTimer(pl_module.device)
        self.timer.mark("data")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End the data phase, and start the memory probe at its step."""
        strategy = trainer_strategy(trainer)
        first = max(0, self._accumulation - strategy.num_probed_micro_batches)
        starts = self._num_micro_batches == first
        probed = trainer.global_step == self._probed_step - 1
        if probed and starts and self._can_measure(trainer):
            optimizer = trainer.optimizers[0]
            buffers = strategy.strategy_buffers()
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
                buffers,
                averages=averages,
                compiled=self.run.is_compiled,
            )
            self._probe.start()
        self.timer.mark(self._forward_phase)

    def _can_measure(self, trainer: Trainer) -> bool:
        """Whether memory can be measured.

        A compiled model on the CPU is measured by torch's profiler. A process can have only one
        profiler, which may crash when threads of gloo run.
        """
        if not self.run.is_compiled or self.run.hardware.device is not DeviceKind.cpu:
            return True
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        profiled = any(isinstance(each, ProfilerArgs) for each in callbacks)
        return trainer.world_size == 1 and not profiled

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """End the forward phase."""
        self._probe_activations()
        self.timer.mark("backward")

    def _probe_activations(self) -> None:
        if self._probe:
            self._probe.before_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the backward phase."""
        self.timer.mark("optimizer")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the learning rate of the step."""
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
        """Record the loss of a micro-batch and, after the last one of a step, the step."""
        losses, norm = self.get_loss_and_norm(pl_module, outputs)
        self._losses.append(losses)
        self._num_micro_batches += 1
        if self._num_micro_batches < self._accumulation:
            return
        self._step, self._num_micro_batches = self._step + 1, 0
        self._accumulation = self.run.micro_batches_per_step.at(self._step)
        self._norms.append(norm)
        spikes = getattr(pl_module, "spikes", None)
        if spikes is not None:
            self._skipped.append(spikes.num_skipped)
        self._experts.record_step()
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
        """Losses of the last micro-batch and the gradient norm."""
        assert isinstance(module, TrainingModule)
        return module.last_losses, module.last_grad_norm

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude validation from the step time."""
        if not trainer.sanity_checking:
            self.timer.mark(OTHER)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Flush the metrics together with those of the validation."""
        metrics = validation_metrics(trainer, self.run)
        if trainer.sanity_checking:  # Lightning's name for a validation before the first step
            self.initial_validation = metrics
        else:
            self.flush(trainer, metrics)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Flush the metrics of all steps before the checkpoint."""
        self.flush(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Flush the metrics of a single-rank run; with several ranks it requires a collective."""
        if self._probe:
            self._probe.abandon()
        if trainer.world_size == 1 and self._norms:  # without a step there may be no timer
            self.flush(trainer)

    def flush(self, trainer: Trainer, last_row: Row | None = None) -> None:
        """Pass the recorded steps to the sinks. Every rank must call it at the same step.

        Args:
            trainer: Trainer of the run.
            last_row: Additional metrics of the last step.
        """
        self.timer.mark(OTHER)
        steps = len(self._norms)
        if not steps:
            return
        rows = list(self._build_rows(trainer, steps))
        self._losses, self._norms, self._rates, self._skipped = [], [], [], []
        rows[-1] |= last_row or {}
        for row in rows:
            if self._memory and row["step"] == self._probed_step:
                row |= peak_rank_memory(self._memory, trainer.strategy.root_device)
        self.rows += rows
        for sink in self.sinks:
            sink(rows)

    def _build_rows(self, trainer: Trainer, steps: int) -> Iterator[Row]:
        keys, first = self.run.objective.metric_keys, trainer.global_step - steps + 1
        means_SK = self._mean_losses(first, steps)
        norm_S = torch.stack([norm.to(means_SK.device) for norm in self._norms]).float()
        step_times = self.timer.drain()[-steps:]
        phases = [phase for phase in STEP_PHASES if phase in step_times[0]]
        seconds_SP = torch.tensor(
            [[step[phase] for phase in phases] for step in step_times],
            dtype=torch.float64,
            device=means_SK.device,
        )
        metrics_SK = torch.cat([means_SK, norm_S[:, None]], 1).double()
        if dist.is_initialized() and dist.get_world_size() > 1:
            means_SK = metrics_SK[:, :-1] / dist.get_world_size()
            dist.all_reduce(means_SK, dist.ReduceOp.SUM)
            metrics_SK[:, :-1] = means_SK
        expert_rows = self._experts.take_rows(trainer_strategy(trainer), first, steps)
        metrics, seconds = metrics_SK.tolist(), slowest_rank_times(seconds_SP).tolist()
        for index in range(steps):
            times = dict(zip(phases, seconds[index], strict=True))
            yield {
                "step": first + index,
                **{f"train/{key}": metrics[index][n] for n, key in enumerate(keys)},
                "train/grad_norm": metrics[index][-1],
                **({"train/skipped_steps": self._skipped[index]} if self._skipped else {}),
                "train/lr": self._rates[index],
                **expert_rows[index],
                **self._throughput_metrics(first + index, times),
            }

    def _mean_losses(self, first: int, steps: int) -> torch.Tensor:
        """Mean losses over the micro-batches of each recorded step, ``loss_SK``."""
        per_step = self.run.micro_batches_per_step
        counts = [per_step.at(step - 1) for step in range(first, first + steps)]
        losses_NK = torch.stack(self._losses[: sum(counts)]).float()
        if not per_step.stages:
            return losses_NK.view(steps, per_step.final, losses_NK.shape[1]).mean(1)
        return torch.stack([losses_nK.mean(0) for losses_nK in losses_NK.split(counts)])

    def _throughput_metrics(self, step: int, times: Mapping[str, float]) -> Row:
        run, total = self.run, sum(times.values())
        tokens = run.tokens_in_step.at(step - 1)
        return {
            "train/tokens": run.tokens_in_step.before(step),
            **self._warmup_metrics(step),
            "throughput/tokens_per_s": tokens / total,
            "throughput/tokens_per_s_per_device": tokens / total / run.world_size,
            "throughput/unpadded_tokens_per_s": tokens * self.unpadded_fraction / total,
            **self.flops_metrics(tokens, total),
            "time/step_s": total,
            **{f"time/{phase}_s": times.get(phase) for phase in STEP_PHASES},
        }

    def _warmup_metrics(self, step: int) -> Row:
        """Batch and sequence length of a step, in runs where a warm-up changes them."""
        run = self.run
        batch = {"train/global_batch": run.samples_per_step.at(step - 1)}
        sequence = {"train/sequence": run.sequence_per_step.at(step - 1)}
        return {
            **(batch if run.trainer.batch_warmup else {}),
            **(sequence if run.trainer.sequence_warmup else {}),
        }

    def flops_metrics(self, tokens: int, seconds: float) -> Row:
        """Compute rate and model FLOPs utilization (MFU) of one device, in a step of ``tokens``.

        MFU by both conventions: with causal attention, and with PaLM's.
        """
        run = self.run.warmup_runs[tokens]
        flops = run.flops_per_token * tokens / run.world_size / seconds
        peak = run.hardware.peak_flops(run.precision.peak_kind)
        mfu = flops / self._device_peak_flops(peak) if peak else None
        return {
            "throughput/tflops_per_s_per_device": flops / 1e12,
            "throughput/mfu": mfu,
            "throughput/mfu_palm": None if mfu is None else mfu * run.palm_to_causal_flops,
        }

    def _device_peak_flops(self, peak: float) -> float:
        """Peak of one device, in FLOP/s; ranks on the CPU share one processor."""
        return peak / (self.run.world_size if self.run.hardware.device == "cpu" else 1)


def trainer_strategy(trainer: Trainer) -> ParallelStrategy:
    """Parallelism strategy of a trainer."""
    assert isinstance(trainer.strategy, ParallelStrategy)
    return trainer.strategy


def validation_metrics(trainer: Trainer, run: RunConfig) -> Row:
    """Metrics of the last validation by key; of a user-defined module, the logged loss."""
    metrics, objective = trainer.callback_metrics, run.objective
    if isinstance(objective, UserModule):
        name = objective.held_out
        return {"val/loss": float(metrics[name])} if name in metrics else {}
    keys = [f"val/{key}" for key in objective.metric_keys]
    keys += [key for key in metrics if key.startswith(SOURCE_LOSS)]
    return {key: float(metrics[key]) for key in keys}


def slowest_rank_times(seconds_SP: torch.Tensor) -> torch.Tensor:
    """Step times of the rank with the longest total time.

    The times of one rank add up to its wall time. Maxima over ranks of each step or phase would
    add up to more than the wall time of any rank.

    Args:
        seconds_SP: Times of this rank, steps x phases, in seconds.
    """
    seconds_RSP = _gather_ranks(seconds_SP)
    return seconds_RSP[seconds_RSP.sum((1, 2)).argmax()]


def peak_rank_memory(memory: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """Memory of the rank with the largest peak, in bytes by key."""
    local_K = torch.tensor(list(memory.values()), dtype=torch.int64, device=device)
    bytes_RK = _gather_ranks(local_K)
    peak_rank = bytes_RK[:, list(memory).index("memory/peak_bytes")].argmax()
    return dict(zip(memory, bytes_RK[peak_rank].tolist(), strict=True))


def _gather_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Stack the tensors of all ranks (a collective)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor[None]
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return torch.stack(tensors)


def is_validation_next(trainer: Trainer, run: RunConfig) -> bool:
    """Whether a validation follows the step that has just ended."""
    every = run.trainer.validate_every
    is_due = every is not None and trainer.global_step % every == 0
    return is_due and bool(trainer.val_dataloaders)


class DataWaitMarker(Callback):
    """Start the data phase of the step timer after each micro-batch; it is the last callback."""

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
        """Start the data phase after a micro-batch."""
        self._recorder.timer.mark("data")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the data phase after a validation."""
        if not trainer.sanity_checking:
            self._recorder.timer.mark("data")
