"""Peak memory of a training step, traced on fake tensors.

The code of a training step runs in a fake process group. Shallow copies of the model are
sufficient: the memory of each phase of a step is linear in the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

from scalewise.checkpoints import initial_parameters
from scalewise.hardware import DeviceKind
from scalewise.models.base import ModelConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.parallelism.single import SingleConfig
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.planner.rank_partition import list_distinct_ranks
from scalewise.precision import FloatFormat
from scalewise.quantization.config import BitsAndBytesConfig
from scalewise.registry import option_name
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope
from scalewise.tracing.fake_cuda import loaded_fake_cuda
from scalewise.tracing.fake_tensors import FakeStageChannel, ReadableScalars, precision_plugin
from scalewise.tracing.training_step import (
    ManualStep,
    PhaseBytes,
    fake_training,
    measure_step,
    skip_call,
)

DEPTHS = (4, 6)
"""Layers of the shallow copies; with fewer, the first and the last blocks coincide."""


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
    device: DeviceKind = DeviceKind.cpu
    """Device whose operators the trace has run."""


def rejection_reason(run: RunConfig) -> str | None:
    """Reason why a run cannot be traced; None: it can."""
    parallelism = run.parallelism
    if not isinstance(parallelism, MeshConfig | SingleConfig):
        return f"{option_name(parallelism)} requires real memory"
    if isinstance(parallelism, MeshConfig) and parallelism.cpu_offload:
        return "offloading copies real memory"
    offloads_to_host = run.memory.offload and run.hardware.device is DeviceKind.cuda
    if offloads_to_host and not loaded_fake_cuda():
        return "a trace runs CPU operators, which offload activations to disk"
    if run.precision.compute is FloatFormat.fp16 and not loaded_fake_cuda():
        return "a trace runs CPU operators, which do not support fp16"
    return None


def trace_run(run: RunConfig, *, full_depth: bool = False) -> StepTrace:
    """Trace the rank with the largest peak memory.

    Of a pipeline, one rank of each kind is traced. The trace runs the operators of
    ``with_traced_operators``.

    Args:
        run: Config of a run for which ``rejection_reason`` is None.
        full_depth: Whether to trace all layers instead of extrapolating from shallow copies.
    """
    run, channel = with_traced_operators(run), FakeStageChannel()
    ranks = list_distinct_ranks(run.parallelism, run)
    traces = [_trace_rank(run, rank, channel, full_depth=full_depth) for rank in ranks]
    return max(traces, key=lambda trace: trace.peak)


def _trace_rank(
    run: RunConfig, rank: int, channel: FakeStageChannel, *, full_depth: bool
) -> StepTrace:
    device = run.hardware.device
    stages = build_rank_memory(run.parallelism, run, rank).stages
    stage_layers = [len(stage.layers) for stage in stages]
    uniform = len(run.memory.count_by_recompute(run.model.layers)) == 1
    has_equal_blocks = uniform and run.model.has_equal_blocks
    if full_depth or not has_equal_blocks or min(stage_layers) <= max(DEPTHS):
        phase_peaks, metrics = _trace_step(run, rank, channel)
        peak = max(phase_peaks.values())
        return StepTrace(peak, phase_peaks, metrics, (sum(stage_layers),), rank, device)
    (shallow_peaks, shallow_metrics), (deep_peaks, deep_metrics) = (
        _trace_step(run, rank, channel, depth) for depth in DEPTHS
    )
    extra_layers = sum(stage_layers) / len(stages) - DEPTHS[1]
    phase_peaks, metrics = (
        _extrapolate_layers(shallow_peaks, deep_peaks, extra_layers),
        _extrapolate_layers(shallow_metrics, deep_metrics, extra_layers),
    )
    return StepTrace(max(phase_peaks.values()), phase_peaks, metrics, DEPTHS, rank, device)


def _extrapolate_layers(shallow: PhaseBytes, deep: PhaseBytes, extra_layers: float) -> PhaseBytes:
    """Extrapolate bytes linearly to ``extra_layers`` more layers than the deeper copy has."""
    slopes = {name: (deep[name] - shallow[name]) / (DEPTHS[1] - DEPTHS[0]) for name in shallow}
    return {name: round(deep[name] + extra_layers * slope) for name, slope in slopes.items()}


def with_traced_operators(run: RunConfig) -> RunConfig:
    """Eager run on the device whose operators a trace runs.

    That is the CPU for a run on CUDA, unless this process has loaded a fake CUDA device, on which
    bitsandbytes has no kernels. Attention on the CPU saves the same tensors for backward as fused
    attention on CUDA.
    """
    is_traceable = not isinstance(run.quantization, BitsAndBytesConfig)
    if run.hardware.device is DeviceKind.cuda and loaded_fake_cuda() and is_traceable:
        return _without_compile(run)
    return with_cpu_operators(run)


def with_cpu_operators(run: RunConfig) -> RunConfig:
    """Eager run with CPU operators."""
    hardware = replace(run.hardware, device=DeviceKind.cpu)
    return _without_compile(replace(run, hardware=hardware))


def _without_compile(run: RunConfig) -> RunConfig:
    return replace(run, compile=replace(run.compile, scope=CompileScope.none))


def _trace_step(
    run: RunConfig, rank: int, channel: FakeStageChannel, depth: int | None = None
) -> tuple[PhaseBytes, dict[str, int]]:
    """Peak bytes of each phase of one step after the warm-up steps, and the probe's metrics.

    ``depth``: number of layers of the model, or of each pipeline stage; None: all.
    """
    with _with_depth(run, depth) as model:
        run = replace(run, model=model)
        with (
            fake_training(run, rank, channel) as (strategy, _),
            ReadableScalars(),
            patch.object(initial_parameters, "init_parameters", skip_call),
        ):
            precision = precision_plugin(run.precision.lightning_precision(), run.hardware.device)
            with precision.module_init_context():
                module = strategy.build(run)
            strategy.model = module
            step = ManualStep(run, strategy, module, precision)
            return measure_step(run, strategy, module, step.optimizer, step.take_step)


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
