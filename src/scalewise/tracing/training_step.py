"""One training step on fake tensors, and the memory that a probe measures in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from scalewise.adapters.build import disable_adapter
from scalewise.callback_config import averaging_callback
from scalewise.compat.lightning import skip_process_group
from scalewise.compat.torch import FakeTensorMode
from scalewise.hardware import DeviceKind
from scalewise.measure.allocated_bytes import storage_bytes
from scalewise.measure.memory import MemoryProbe
from scalewise.models.base_module import ModelModule
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ParallelStrategy, ScaledLoss
from scalewise.strategies.build import build_strategy
from scalewise.strategies.nd_parallel import MeshStrategy
from scalewise.tracing.fake_tensors import (
    FakeStageChannel,
    fake_device,
    fake_ranks,
    fake_tensor_mode,
)

WARM_UP_STEPS = 2
"""Steps before the measured one; they allocate optimizer state and gradients."""
Result = TypeVar("Result")
PhaseBytes = dict[str, int]
"""Peak bytes by phase of a trace."""


@contextmanager
def fake_training(
    run: RunConfig, rank: int, channel: FakeStageChannel
) -> Iterator[tuple[ParallelStrategy, FakeTensorMode]]:
    """Context with fake tensors in which this process is ``rank``; yields strategy and mode."""
    device = run.hardware.device
    with (
        fake_device(device),
        torch.device(device.value),
        fake_ranks(run.parallelism, rank, channel),
        patch.object(MeshStrategy, "global_rank", rank),  # Lightning's is 0 in this process
    ):
        strategy = _fake_strategy(run)  # before fake mode: a mesh reads its ranks
        # torchao compiles the steps of its optimizers, which dispatch modes do not support.
        with torch.compiler.set_stance("force_eager"), fake_tensor_mode() as mode:
            yield strategy, mode


def _fake_strategy(run: RunConfig) -> ParallelStrategy:
    """Parallelism strategy of a run in the fake process group of ``fake_ranks``."""
    strategy = build_strategy(run.parallelism, run.hardware.device, timedelta())
    if isinstance(strategy, MeshStrategy):
        is_cuda = run.hardware.device is DeviceKind.cuda
        strategy.parallel_devices = [torch.device("cuda", 0) if is_cuda else torch.device("cpu")]
        # The fake process group exists already; Lightning would create a real one.
        skip_process_group(strategy)
        strategy.setup_environment()
    return strategy


def measure_step(
    run: RunConfig,
    strategy: ParallelStrategy,
    module: nn.Module,
    optimizer: Optimizer,
    take_step: Callable[[MemoryProbe | None], Result],
) -> tuple[Result, dict[str, int]]:
    """Measure an optimizer step after the warm-up steps.

    Returns:
        Result of ``take_step`` in the measured step, and the probe's bytes by metric key.
    """
    for _ in range(WARM_UP_STEPS):
        take_step(None)
    averages = _allocate_averages(run, module)
    counted = torch.device("cpu")  # operators count fake tensors, which no allocator has
    probe = MemoryProbe(module, optimizer, counted, strategy.strategy_buffers(), averages=averages)
    result = take_step(probe)
    return result, probe.finish() | {
        "memory/average_bytes": storage_bytes(averages),
        "memory/workspaces_bytes": run.hardware.matmul_workspace_bytes,
    }


def _allocate_averages(run: RunConfig, module: nn.Module) -> list[Tensor]:
    """Uninitialized tensors of the callback that averages the weights; empty: there is none."""
    if averaging_callback(run.callbacks) is None:
        return []
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return [torch.empty_like(it.detach(), dtype=torch.float32) for it in trained]


def skip_call(*_: object) -> None:
    """Do nothing, instead of an initialization that fake tensors do not need."""


class ManualStep:
    """Optimizer step in the order of Lightning's training loop, with phases for the probe."""

    def __init__(
        self, run: RunConfig, strategy: ParallelStrategy, module: nn.Module, precision: Precision
    ) -> None:
        self.run, self.strategy, self.module, self.precision = run, strategy, module, precision
        self.optimizer = strategy.build_optimizer(run, module)
        shape = (run.sequences_per_forward, run.data.sequence)
        keys = ("inputs", "labels", *["positions"] * run.data.packing)
        self.batch = {key: torch.zeros(shape, dtype=torch.long) for key in keys}
        if target := run.data.target_length:
            self.batch["inputs"] = self.batch["inputs"][:, :-target].clone()
            self.batch["labels"] = self.batch["labels"][:, :target].clone()
        if side := run.data.image_size:
            self.batch["inputs"] = torch.zeros((shape[0], 3, side, side), dtype=torch.uint8)
        if run.objective.pairs:
            self.batch["reference"] = torch.zeros(shape[:1])
        if run.objective.rollouts_per_sample:
            self.batch |= {key: torch.zeros(shape[:1]) for key in ("advantage", "reward")}
            self.batch["reference"] = torch.zeros(shape)
        self.begin_phase: Callable[[str], None] = skip_call
        self.num_micro_batches = 0
        strategy.set_backward_callback(self._begin_micro_batch)
        stages = module.values() if isinstance(module, nn.ModuleDict) else [module]
        for stage in stages:
            blocks = cast(Any, stage).layers()
            for index, block in enumerate(blocks):
                block.register_forward_hook(self._build_block_hook(index, len(blocks)))

    def _begin_micro_batch(self) -> None:
        """Begin the phases of the next micro-batch whose backward pass a pipeline starts."""
        self.num_micro_batches += 1
        self.begin_phase("head")

    def _build_block_hook(self, index: int, count: int) -> Callable[..., None]:
        """Forward hook of a block that begins its phase when the backward pass reaches it."""
        from_end = count - index
        name = f"block -{from_end}" if from_end <= 2 else "blocks"
        name = f"block {index}" if index < 2 else name

        def add_hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            hidden = output if isinstance(output, Tensor) else output[0]
            if hidden.requires_grad:
                cast(Any, hidden).register_hook(lambda _: self.begin_phase(name))

        return add_hook

    def take_step(self, probe: MemoryProbe | None) -> PhaseBytes:
        """Take an optimizer step; return the peak bytes of each phase, if there is a probe."""
        phase_peaks: PhaseBytes = {}
        phase = "forward"

        def begin_phase(name: str) -> None:
            nonlocal phase
            if probe is not None:
                phase_peaks[phase] = max(phase_peaks.get(phase, 0), probe.take_phase_peak())
            micro_batch = self.num_micro_batches
            phase = f"{name}, micro-batch {micro_batch}" if micro_batch else name

        self.begin_phase = skip_call
        first_probed = max(0, self.run.accumulation - self.strategy.num_probed_micro_batches)
        for index in range(self.run.accumulation):
            is_probed = probe is not None and index >= first_probed
            if probe is not None and index == first_probed:
                probe.start()
                self.begin_phase = begin_phase
            self.num_micro_batches = 0
            self.begin_phase("forward")
            last = index + 1 == self.run.accumulation
            self._forward_backward(last=last, probe=probe if is_probed else None)
        self.begin_phase, self.num_micro_batches = skip_call, 0
        begin_phase("optimizer")
        if probe is not None:
            probe.before_optimizer()
        self.strategy.clip_grad_norm([*self.module.parameters()], self.run.trainer.clip_norm)
        self.optimizer.step()
        begin_phase("")
        persistent_bytes = probe.persistent_bytes if probe is not None else 0
        persistent_bytes += self.run.hardware.matmul_workspace_bytes  # no fake tensor has them
        self.module.zero_grad()
        return {name: peak + persistent_bytes for name, peak in phase_peaks.items()}

    def _forward_backward(self, *, last: bool, probe: MemoryProbe | None) -> None:
        strategy, run = self.strategy, self.run
        factor = torch.ones(())
        skips_sync = isinstance(strategy, MeshStrategy) and not last
        with cast(MeshStrategy, strategy).block_backward_sync() if skips_sync else nullcontext():
            with self.precision.forward_context():
                if run.runs_reference_forward and run.objective.reference_objective is not None:
                    with (
                        torch.no_grad(),
                        disable_adapter(run.adapter, cast(ModelModule, self.module)),
                    ):
                        strategy.compute_validation_loss(
                            self.module, self.batch, ScaledLoss(run.objective.reference_objective)
                        )
                scaled_loss = ScaledLoss(run.objective, factor, accumulation=run.accumulation)
                loss = strategy.compute_train_loss(self.module, self.batch, scaled_loss, last=last)
            loss = loss[0] if loss.dim() else loss
            self.begin_phase("head")
            if probe is not None:
                probe.before_backward()
            with strategy.loss_context():
                cast(Any, loss / run.accumulation).backward()
