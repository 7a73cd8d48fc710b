"""Trace of a training step on fake tensors, to measure its peak memory without allocating it.

The code of a training step runs under ``FakeTensorMode`` in a fake process group, and the memory
probe of real runs counts the live tensors. Shallow copies of the model are sufficient: the memory
of each phase of a step is linear in the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn

from scalewise.adapters.build import disable_adapter
from scalewise.callback_config import averaging_callback
from scalewise.checkpoints import adapter_resume
from scalewise.hardware import DeviceKind
from scalewise.measure.memory import MemoryProbe
from scalewise.measure.storages import storage_bytes
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule
from scalewise.parallelism.mesh import MeshConfig
from scalewise.parallelism.single import SingleConfig
from scalewise.planner.memory_breakdown import MemoryBreakdown, MemoryEntry, StepPhase
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.planner.rank_partition import list_distinct_ranks
from scalewise.precision import FloatFormat
from scalewise.registry import option_name
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ParallelStrategy, ScaledLoss
from scalewise.strategies.build import build_strategy
from scalewise.strategies.nd_parallel import MeshStrategy
from scalewise.torch_compile import CompileScope
from scalewise.training import fake_distributed

DEPTHS = (4, 6)
"""Layers of the shallow copies; with fewer, the first and the last blocks coincide."""
WARM_UP_STEPS = 2
"""Steps before the measured one; they allocate optimizer state and gradients."""
MEMORY_CATEGORIES = ("parameters", "optimizer", "average", "activations", "gradients")
"""Categories of memory that a trace measures; the first three persist between steps."""

PHASES = {
    "forward": StepPhase.forward,
    "head": StepPhase.backward_loss,
    "block -1": StepPhase.backward_last,
    "block -2": StepPhase.backward_next,
    "blocks": StepPhase.backward_next,
    "block 1": StepPhase.backward_second,
    "block 0": StepPhase.backward_first,
    "optimizer": StepPhase.optimizer,
}
"""Phases of the memory breakdown by phases of a trace."""

PhaseBytes = dict[str, int]
"""Peak bytes by phase of a trace."""


@dataclass(frozen=True)
class StepTrace:
    """Memory of a training step on one rank."""

    peak: int
    """Peak memory, in bytes."""
    phase_peaks: PhaseBytes
    """Peak memory of each phase of the step, in bytes."""
    probe_metrics: dict[str, int]
    """Measurements of the memory probe, in bytes by ``memory/..._bytes`` key."""
    traced_depths: tuple[int, ...]
    """Numbers of layers that were traced; a single one is the number of layers of the rank."""
    rank: int = 0
    """Rank with the largest peak."""

    @property
    def persistent_bytes(self) -> int:
        """Memory that is allocated throughout the step, in bytes."""
        return sum(self.probe_metrics[f"memory/{name}_bytes"] for name in MEMORY_CATEGORIES[:3])

    def build_breakdown(self) -> MemoryBreakdown:
        """Memory breakdown by phase, for a step without pipeline parallelism."""
        peaks: dict[StepPhase, int] = {}
        for name, peak in self.phase_peaks.items():
            peaks[PHASES[name]] = max(peak, peaks.get(PHASES[name], 0))
        size = {name: self.probe_metrics[f"memory/{name}_bytes"] for name in MEMORY_CATEGORIES}
        entries = [
            MemoryEntry("parameters", dict.fromkeys(peaks, size["parameters"]), "", "and buffers"),
            MemoryEntry(
                "optimizer state", dict.fromkeys(peaks, size["optimizer"]), "", "between steps"
            ),
            MemoryEntry("average", dict.fromkeys(peaks, size["average"]), "", "of the weights"),
            MemoryEntry(
                "activations",
                {StepPhase.backward_loss: size["activations"]},
                "",
                "saved for backward",
            ),
            MemoryEntry("gradients", {StepPhase.optimizer: size["gradients"]}, "", "all of them"),
        ]
        totals = MemoryBreakdown(tuple(entries)).phases
        other = {phase: peak - totals[phase] for phase, peak in peaks.items()}
        reason = "activations, gradients and temporary tensors of the phase"
        return MemoryBreakdown((*entries, MemoryEntry("what else is alive", other, "", reason)))


def rejection_reason(run: RunConfig) -> str | None:
    """Reason why a run cannot be traced; None: it can."""
    parallelism = run.parallelism
    if not isinstance(parallelism, MeshConfig | SingleConfig):
        return f"{option_name(parallelism)} requires real memory"
    if run.memory.offload or (isinstance(parallelism, MeshConfig) and parallelism.cpu_offload):
        return "offloading copies real memory"
    if run.precision.compute is FloatFormat.fp16:
        return "a trace runs CPU operators, which do not support fp16"
    if run.compile.scope is not CompileScope.none:
        return "a trace does not include the fusion of torch.compile"
    return None


def trace_run(run: RunConfig, *, full_depth: bool = False) -> StepTrace:
    """Trace the rank with the largest peak memory.

    Of a pipeline, one rank of each kind is traced. The trace runs CPU operators; their attention
    saves the same tensors for backward as fused attention on CUDA.

    Args:
        run: Config of a run for which ``rejection_reason`` is None.
        full_depth: Whether to trace all layers instead of extrapolating from shallow copies.
    """
    run, channel = with_cpu_operators(run), fake_distributed.FakeStageChannel()
    ranks = list_distinct_ranks(run.parallelism, run)
    traces = [_trace_rank(run, rank, channel, full_depth=full_depth) for rank in ranks]
    return max(traces, key=lambda trace: trace.peak)


def _trace_rank(
    run: RunConfig, rank: int, channel: fake_distributed.FakeStageChannel, *, full_depth: bool
) -> StepTrace:
    stages = build_rank_memory(run.parallelism, run, rank).stages
    stage_layers = [len(stage.layers) for stage in stages]
    uniform = len(run.memory.count_by_recompute(run.model.layers)) == 1
    if full_depth or not uniform or min(stage_layers) <= max(DEPTHS):
        phase_peaks, metrics = _trace_step(run, rank, channel)
        peak = max(phase_peaks.values())
        return StepTrace(peak, phase_peaks, metrics, (sum(stage_layers),), rank)
    (shallow_peaks, shallow_metrics), (deep_peaks, deep_metrics) = (
        _trace_step(run, rank, channel, depth) for depth in DEPTHS
    )
    extra_layers = sum(stage_layers) / len(stages) - DEPTHS[1]
    phase_peaks, metrics = (
        _extrapolate_layers(shallow_peaks, deep_peaks, extra_layers),
        _extrapolate_layers(shallow_metrics, deep_metrics, extra_layers),
    )
    return StepTrace(max(phase_peaks.values()), phase_peaks, metrics, DEPTHS, rank)


def _extrapolate_layers(shallow: PhaseBytes, deep: PhaseBytes, extra_layers: float) -> PhaseBytes:
    """Extrapolate bytes linearly to ``extra_layers`` more layers than the deeper copy has."""
    slopes = {name: (deep[name] - shallow[name]) / (DEPTHS[1] - DEPTHS[0]) for name in shallow}
    return {name: round(deep[name] + extra_layers * slope) for name, slope in slopes.items()}


def with_cpu_operators(run: RunConfig) -> RunConfig:
    """Run with CPU operators."""
    return replace(run, hardware=replace(run.hardware, device=DeviceKind.cpu))


def _trace_step(
    run: RunConfig, rank: int, channel: fake_distributed.FakeStageChannel, depth: int | None = None
) -> tuple[PhaseBytes, dict[str, int]]:
    """Peak bytes of each phase of one step after the warm-up steps, and the probe's metrics.

    ``depth``: number of layers of the model, or of each pipeline stage; None: all.
    """
    with (
        fake_distributed.fake_ranks(run.world_size, rank, channel),
        patch.object(MeshStrategy, "global_rank", rank),  # Lightning's is 0 in this process
        _with_depth(run, depth) as model,
    ):
        run = replace(run, model=model)
        strategy = fake_strategy(run)
        with (
            fake_distributed.fake_tensor_mode(),
            patch.object(adapter_resume, "init_parameters", _skip_init),
        ):
            precision = precision_plugin(run)
            with precision.module_init_context():
                module = strategy.build(run)
            strategy.model = module
            step = _ManualStep(run, strategy, module, precision)
            for _ in range(WARM_UP_STEPS):
                step.take_step(None)
            averages = allocate_averages(run, module)
            probe = MemoryProbe(
                module,
                step.optimizer,
                strategy.root_device,
                strategy.strategy_buffers(),
                averages=averages,
            )
            phase_peaks, average = step.take_step(probe), storage_bytes(averages)
            return phase_peaks, probe.finish() | {"memory/average_bytes": average}


def allocate_averages(run: RunConfig, module: nn.Module) -> list[Tensor]:
    """Uninitialized tensors of the callback that averages the weights; empty: there is none."""
    if averaging_callback(run.callbacks) is None:
        return []
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return [torch.empty_like(it.detach(), dtype=torch.float32) for it in trained]


@contextmanager
def _with_depth(run: RunConfig, depth: int | None) -> Iterator[ModelConfig]:
    """Model with ``depth`` layers, or with ``depth`` layers in each pipeline stage."""
    model, parallelism = run.model, run.parallelism
    if depth is None:
        yield model
    elif not isinstance(parallelism, MeshConfig) or parallelism.num_stages == 1:
        yield model.with_layers(depth)
    else:
        stages = model.split_stages(parallelism.num_stages, run.data.sequence)
        shallow = tuple(replace(stage, layers=stage.layers[:depth]) for stage in stages)
        with patch.object(type(model), "split_stages", lambda *_: shallow):
            yield model


def _skip_init(*_: object) -> None:
    """Skip the initialization of weights, which have no memory."""


def fake_strategy(run: RunConfig) -> ParallelStrategy:
    """Parallelism strategy of a run in the fake process group of ``fake_ranks``."""
    strategy = build_strategy(run.parallelism, DeviceKind.cpu)
    if isinstance(strategy, MeshStrategy):
        strategy.parallel_devices = [torch.device("cpu")]
        # The fake process group exists already; Lightning would create a real one.
        strategy._setup_distributed = _skip_init  # type: ignore[method-assign]  # no public API
        strategy.setup_environment()
    return strategy


def precision_plugin(run: RunConfig) -> Precision:
    """Lightning's precision plugin, as its Trainer chooses it."""
    name = run.precision.lightning_precision()
    if name == "bf16-mixed":
        return MixedPrecision(name, "cpu")
    return HalfPrecision(name) if name == "bf16-true" else Precision()


class _ManualStep:
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
        self.begin_phase: Callable[[str], None] = _skip_init
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

        self.begin_phase = _skip_init
        for index in range(self.run.accumulation):
            last = index + 1 == self.run.accumulation
            if probe is not None and last:
                probe.start()
                self.begin_phase = begin_phase
            self._forward_backward(last=last, probe=probe if last else None)
        self.begin_phase, self.num_micro_batches = _skip_init, 0
        begin_phase("optimizer")
        if probe is not None:
            probe.before_optimizer()
        self.strategy.clip_grad_norm(self.module, self.run.trainer.clip_norm)
        self.optimizer.step()
        begin_phase("")
        persistent_bytes = probe.persistent_bytes if probe is not None else 0
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
                loss = strategy.compute_train_loss(
                    self.module, self.batch, ScaledLoss(run.objective, factor), last=last
                )
            loss = loss[0] if loss.dim() else loss
            self.begin_phase("head")
            if probe is not None:
                probe.before_backward()
            with strategy.loss_context():
                cast(Any, loss / run.accumulation).backward()
