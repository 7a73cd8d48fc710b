"""One step of the suite's own module, strategy and optimizer, with no memory behind its tensors.

The same code that trains runs under ``FakeTensorMode`` on a rank of a world that is not there, and
the same probe counts what is alive. Shallow copies are enough: every moment of a step (the last
blocks going forward, the first ones going backward, ...) grows by as much with each further block.
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

from scalewise.config.registry import option_name
from scalewise.hardware import DeviceKind
from scalewise.measure.memory import MemoryProbe
from scalewise.measure.storages import storage_bytes
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule
from scalewise.parallelism.mesh import MeshConfig
from scalewise.parallelism.single import SingleConfig
from scalewise.planner.memory_breakdown import MemoryBreakdown, MemoryEntry, StepPhase
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ParallelStrategy, ScaledLoss
from scalewise.strategies.nd_parallel import MeshStrategy
from scalewise.torch_compile import CompileScope
from scalewise.training import fake_distributed
from scalewise.training.callbacks.callback_args import averaging_callback

DEPTHS = (4, 6)
"""Layers of the copies: in fewer, the first blocks and the last are the same ones."""
WARM_STEPS = 2
"""Steps before the one that is counted: the optimizer's state is there, gradients were."""
PARTS = ("parameters", "optimizer", "average", "activations", "gradients")
"""What a trace tells apart."""

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
"""What a ledger calls the moments of a step."""

Moments = dict[str, int]


@dataclass(frozen=True)
class StepTrace:
    """What a step holds on one rank, bytes."""

    peak: int
    phase_peaks: Moments
    """The most by moment of the step."""
    probe_metrics: dict[str, int]
    """What a probe measures of the step, by ``memory/..._bytes`` key."""
    traced_depths: tuple[int, ...]
    """Layers of the copies that were run; of one, all that the rank has."""
    rank: int = 0
    """The rank: the fullest."""

    @property
    def persistent_bytes(self) -> int:
        """Returns the bytes of what is there throughout the step."""
        return sum(self.probe_metrics[f"memory/{name}_bytes"] for name in PARTS[:3])

    def build_breakdown(self) -> MemoryBreakdown:
        """Returns the lines of each phase, as far as a step without pipelines tells them apart."""
        phases: dict[StepPhase, int] = {}
        for name, most in self.phase_peaks.items():
            phases[PHASES[name]] = max(most, phases.get(PHASES[name], 0))
        part = {name: self.probe_metrics[f"memory/{name}_bytes"] for name in PARTS}
        lines = [
            MemoryEntry("parameters", dict.fromkeys(phases, part["parameters"]), "", "and buffers"),
            MemoryEntry(
                "optimizer state", dict.fromkeys(phases, part["optimizer"]), "", "between steps"
            ),
            MemoryEntry("average", dict.fromkeys(phases, part["average"]), "", "of the weights"),
            MemoryEntry(
                "activations", {StepPhase.backward_loss: part["activations"]}, "", "kept by forward"
            ),
            MemoryEntry("gradients", {StepPhase.optimizer: part["gradients"]}, "", "all of them"),
        ]
        told = MemoryBreakdown(tuple(lines)).phases
        rest = {phase: most - told[phase] for phase, most in phases.items()}
        why = "activations and gradients of that moment, and results on their way"
        return MemoryBreakdown((*lines, MemoryEntry("what else is alive", rest, "", why)))


def rejection_reason(run: RunConfig) -> str | None:
    """Returns why a run cannot be traced; None: it can."""
    layout = run.parallelism
    if not isinstance(layout, MeshConfig | SingleConfig):
        return f"{option_name(layout)} works on real memory"
    if run.memory.offload or (isinstance(layout, MeshConfig) and layout.cpu_offload):
        return "what is offloaded is copied from real memory"
    if run.precision.compute is FloatFormat.fp16:
        return "fp16 is not computed on the CPU, whose operators a trace runs"
    if run.compile.scope is not CompileScope.none:
        return "what a compiler fuses is not seen"
    return None


def trace_run(run: RunConfig, *, full_depth: bool = False) -> StepTrace:
    """Returns the peak of a run that ``refusal`` admits; ``full_depth``: at its full depth.

    Of a pipeline it is that of the fullest rank, each kind of which is traced. The run is traced
    as on the CPU, whose attention keeps what fused attention on CUDA keeps.
    """
    run, wire = with_cpu_operators(run), fake_distributed.FakeStageChannel()
    layout = run.parallelism
    ranks = layout.distinct_ranks(run) if isinstance(layout, MeshConfig) else (0,)
    found = [_trace_rank(run, rank, wire, full_depth=full_depth) for rank in ranks]
    return max(found, key=lambda trace: trace.peak)


def _trace_rank(
    run: RunConfig, rank: int, channel: fake_distributed.FakeStageChannel, *, full_depth: bool
) -> StepTrace:
    parts = run.parallelism.rank_memory(run, rank).stages
    fewest, layers = min(len(part.layers) for part in parts), sum(len(p.layers) for p in parts)
    alike = len(run.memory.count_by_recompute(run.model.layers)) == 1
    if full_depth or not alike or fewest <= max(DEPTHS):
        moments, found = _trace_step(run, rank, channel)
        return StepTrace(max(moments.values()), moments, found, (layers,), rank)
    (less, less_found), (more, more_found) = (
        _trace_step(run, rank, channel, depth) for depth in DEPTHS
    )
    further = layers / len(parts) - DEPTHS[1]
    moments, found = (
        _extrapolate_layers(less, more, further),
        _extrapolate_layers(less_found, more_found, further),
    )
    return StepTrace(max(moments.values()), moments, found, DEPTHS, rank)


def _extrapolate_layers(shallow: Moments, deep: Moments, extra_layers: float) -> Moments:
    """Returns bytes of so many layers more than the deeper copy has."""
    slopes = {name: (deep[name] - shallow[name]) / (DEPTHS[1] - DEPTHS[0]) for name in shallow}
    return {name: round(deep[name] + extra_layers * slope) for name, slope in slopes.items()}


def with_cpu_operators(run: RunConfig) -> RunConfig:
    """Returns the run with the operators of the CPU."""
    return replace(run, hardware=replace(run.hardware, device=DeviceKind.cpu))


def _trace_step(
    run: RunConfig, rank: int, channel: fake_distributed.FakeStageChannel, depth: int | None = None
) -> tuple[Moments, dict[str, int]]:
    """Returns the most of each moment of one step, after a few that are not counted, and its parts.

    ``depth``: layers to which the model, or each stage of a pipeline, is cut.
    """
    at = patch.object(MeshStrategy, "global_rank", rank)  # Lightning's knows of the first alone
    with (
        fake_distributed.fake_ranks(run.world_size, rank, channel),
        at,
        _with_depth(run, depth) as model,
    ):
        run = replace(run, model=model)
        layout = fake_strategy(run)
        with (
            fake_distributed.fake_tensor_mode(),
            patch.object(type(run.model), "init_weights", _skip_init),
            patch.object(type(run.adapter), "init_or_load_weights", _skip_init),
        ):
            precision = precision_plugin(run)
            with precision.module_init_context():
                module = layout.build(run)
            layout.model = module
            step = _ManualStep(run, layout, module, precision)
            for _ in range(WARM_STEPS):
                step.take_step(None)
            averages = averages_of(run, module)
            counted = MemoryProbe(
                module,
                step.optimizer,
                layout.root_device,
                layout.strategy_buffers(),
                averages=averages,
            )
            moments, average = step.take_step(counted), storage_bytes(averages)
            return moments, counted.finish() | {"memory/average_bytes": average}


def averages_of(run: RunConfig, module: nn.Module) -> list[Tensor]:
    """Returns what a callback that averages the weights holds next to a module, uninitialized."""
    if averaging_callback(run.callbacks) is None:
        return []
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return [torch.empty_like(it.detach(), dtype=torch.float32) for it in trained]


@contextmanager
def _with_depth(run: RunConfig, depth: int | None) -> Iterator[ModelConfig]:
    """Yields the model with ``depth`` layers, or as many in each stage that it is cut into."""
    model, layout = run.model, run.parallelism
    if depth is None:
        yield model
    elif not isinstance(layout, MeshConfig) or layout.num_stages == 1:
        yield model.with_layers(depth)
    else:
        parts = model.split_stages(layout.num_stages, run.data.sequence)
        shallow = tuple(replace(part, layers=part.layers[:depth]) for part in parts)
        with patch.object(type(model), "split_stages", lambda *_: shallow):
            yield model


def _skip_init(*_: object) -> None:
    """Draws no weights: they have no memory."""


def fake_strategy(run: RunConfig) -> ParallelStrategy:
    """Returns a run's layout on the ranks of ``fake.ranks``."""
    layout = run.parallelism.build_strategy(DeviceKind.cpu)
    if isinstance(layout, MeshStrategy):
        layout.parallel_devices = [torch.device("cpu")]
        # The process group is there already, and Lightning's would be a real one.
        layout._setup_distributed = _skip_init  # type: ignore[method-assign]  # there are no ranks
        layout.setup_environment()
    return layout


def precision_plugin(run: RunConfig) -> Precision:
    """Returns Lightning's plugin for a precision, as its Trainer would choose it."""
    name = run.precision.lightning_precision()
    if name == "bf16-mixed":
        return MixedPrecision(name, "cpu")
    return HalfPrecision(name) if name == "bf16-true" else Precision()


class _ManualStep:
    """An optimizer step as Lightning takes it, by hand."""

    def __init__(
        self, run: RunConfig, strategy: ParallelStrategy, module: nn.Module, precision: Precision
    ) -> None:
        self.run, self.strategy, self.module, self.precision = run, strategy, module, precision
        self.optimizer = strategy.build_optimizer(run, module)
        shape = (run.sequences_per_forward, run.data.sequence)
        keys = ("inputs", "labels", *["places"] * run.data.packing)
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
            for place, block in enumerate(blocks):
                block.register_forward_hook(self._build_block_hook(place, len(blocks)))

    def _begin_micro_batch(self) -> None:
        """Has the moments begin of the next piece that a pipeline takes backward."""
        self.num_micro_batches += 1
        self.begin_phase("head")

    def _build_block_hook(self, index: int, count: int) -> Callable[..., None]:
        """Returns a hook that has the moment begin at which backward comes to a block."""
        from_end = count - index
        name = f"block -{from_end}" if from_end <= 2 else "blocks"
        name = f"block {index}" if index < 2 else name

        def watch(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            passed = output if isinstance(output, Tensor) else output[0]
            if passed.requires_grad:
                cast(Any, passed).register_hook(lambda _: self.begin_phase(name))

        return watch

    def take_step(self, probe: MemoryProbe | None) -> Moments:
        """Takes a step; returns the most of each moment, if somebody counts."""
        moments: Moments = {}
        began = "forward"

        def mark(name: str) -> None:
            nonlocal began
            if probe is not None:
                moments[began] = max(moments.get(began, 0), probe.take_phase_peak())
            began = f"{name}, piece {self.num_micro_batches}" if self.num_micro_batches else name

        self.begin_phase = _skip_init
        for number in range(self.run.accumulation):
            last = number + 1 == self.run.accumulation
            if probe is not None and last:
                probe.start()
                self.begin_phase = mark
            self._forward_backward(last=last, probe=probe if last else None)
        self.begin_phase, self.num_micro_batches = _skip_init, 0
        mark("optimizer")
        if probe is not None:
            probe.before_optimizer()
        self.strategy.clip_grad_norm(self.module, self.run.trainer.clip_norm)
        self.optimizer.step()
        mark("")
        lasting = probe.persistent_bytes if probe is not None else 0
        self.module.zero_grad()
        return {name: most + lasting for name, most in moments.items()}

    def _forward_backward(self, *, last: bool, probe: MemoryProbe | None) -> None:
        layout, run = self.strategy, self.run
        factor = torch.ones(())
        waits = isinstance(layout, MeshStrategy) and not last
        with cast(MeshStrategy, layout).block_backward_sync() if waits else nullcontext():
            with self.precision.forward_context():
                if run.runs_reference_forward and run.objective.reference_objective is not None:
                    with torch.no_grad(), run.adapter.disable(cast(ModelModule, self.module)):
                        layout.compute_validation_loss(
                            self.module, self.batch, ScaledLoss(run.objective.reference_objective)
                        )
                loss = layout.compute_train_loss(
                    self.module, self.batch, ScaledLoss(run.objective, factor), last=last
                )
            loss = loss[0] if loss.dim() else loss
            self.begin_phase("head")
            if probe is not None:
                probe.before_backward()
            with layout.loss_context():
                cast(Any, loss / run.accumulation).backward()
