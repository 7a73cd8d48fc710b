"""One step of the suite's own module, strategy and optimizer, with no memory behind its tensors.

The same code that trains runs under ``FakeTensorMode`` on a rank of a world that is not there, and
the same probe counts what is alive. Shallow copies are enough: every moment of a step (the last
blocks going forward, the first ones going backward, ...) grows by as much with each further block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn

from scalewise.compilation import Scope
from scalewise.hardware import DeviceKind
from scalewise.layouts.base import Layout, Loss
from scalewise.layouts.mesh import MeshLayout
from scalewise.measure.memory import MemoryProbe
from scalewise.parallelism.mesh import Mesh
from scalewise.parallelism.single import Single
from scalewise.precision import Number
from scalewise.run import Run
from scalewise.training import fake

DEPTHS = (4, 6)
"""Layers of the copies: in fewer, the first blocks and the last are the same ones."""
WARM_STEPS = 2
"""Steps before the one that is counted: the optimizer's state is there, gradients were."""

Moments = dict[str, int]


@dataclass(frozen=True)
class Trace:
    """What a step holds on one rank, bytes."""

    peak: int
    moments: Moments
    """The most by moment of the step."""
    depths: tuple[int, ...]
    """Layers of the copies that were run; of one, the whole model."""


def refusal(run: Run) -> str | None:
    """Returns why a run cannot be traced; None: it can."""
    layout = run.parallelism
    if isinstance(layout, Mesh) and layout.sizes["pipeline"] > 1:
        return "stages of a pipeline wait for each other"
    if not isinstance(layout, Mesh | Single):
        return f"{type(layout).__name__} works on real memory"
    if isinstance(layout, Mesh) and layout.cpu_offload:
        return "what is offloaded is copied from real memory"
    if run.precision.compute is Number.fp16:
        return "fp16 is not computed on the CPU, whose operators a trace runs"
    if run.compile.scope is not Scope.none:
        return "what a compiler fuses is not seen"
    return None


def traced(run: Run, *, whole: bool = False) -> Trace:
    """Returns the peak of a run that ``refusal`` admits; ``whole``: at its full depth.

    The run is traced as on the CPU, whose attention keeps what fused attention on CUDA keeps.
    """
    run = on_cpu(run)
    layers = run.model.layers
    if whole or layers <= max(DEPTHS):
        moments = _step(run)
        return Trace(max(moments.values()), moments, (layers,))
    shallow, deep = (_step(_of_depth(run, depth)) for depth in DEPTHS)
    slopes = {name: (deep[name] - shallow[name]) / (DEPTHS[1] - DEPTHS[0]) for name in shallow}
    moments = {
        name: round(deep[name] + (layers - DEPTHS[1]) * slope) for name, slope in slopes.items()
    }
    return Trace(max(moments.values()), moments, DEPTHS)


def on_cpu(run: Run) -> Run:
    """Returns the run with the operators of the CPU."""
    return replace(run, hardware=replace(run.hardware, device=DeviceKind.cpu))


def _of_depth(run: Run, layers: int) -> Run:
    return replace(run, model=replace(cast(Any, run.model), layers=layers))


def _step(run: Run) -> Moments:
    """Returns the most of each moment of one step, after a few that are not counted."""
    with fake.ranks(run.world_size):
        layout = _layout(run)
        with (
            fake.tensors(),
            patch.object(type(run.model), "fill", _nothing),
            patch.object(type(run.adapter), "fill", _nothing),
        ):
            precision = _precision(run)
            with precision.module_init_context():
                module = layout.build(run)
            layout.model = module
            step = _Step(run, layout, module, precision)
            for _ in range(WARM_STEPS):
                step.take(None)
            counted = MemoryProbe(module, step.optimizer, layout.root_device, layout.holdings())
            return step.take(counted)


def _nothing(*_: object) -> None:
    """Draws no weights: they have no memory."""


def _layout(run: Run) -> Layout:
    layout = run.parallelism.strategy(DeviceKind.cpu)
    if isinstance(layout, MeshLayout):
        layout.parallel_devices = [torch.device("cpu")]
        # The process group is there already, and Lightning's would be a real one.
        layout._setup_distributed = _nothing  # type: ignore[method-assign]
        layout.setup_environment()
    return layout


def _precision(run: Run) -> Precision:
    """Returns Lightning's plugin for a precision, as its Trainer would choose it."""
    name = run.precision.plugin()
    if name == "bf16-mixed":
        return MixedPrecision(name, "cpu")
    return HalfPrecision(name) if name == "bf16-true" else Precision()


class _Step:
    """An optimizer step as Lightning takes it, by hand."""

    def __init__(self, run: Run, layout: Layout, module: nn.Module, precision: Precision) -> None:
        self.run, self.layout, self.module, self.precision = run, layout, module, precision
        self.optimizer = layout.optimizer(run, module)
        shape = (run.trainer.micro_batch, run.data.sequence)
        self.batch = {key: torch.zeros(shape, dtype=torch.long) for key in ("inputs", "labels")}
        self.mark: Callable[[str], None] = _nothing
        blocks = cast(Any, module).layers()
        for place, block in enumerate(blocks):
            block.register_forward_hook(self._watched(place, len(blocks)))

    def _watched(self, place: int, count: int) -> Callable[..., None]:
        """Returns a hook that has the moment begin at which backward comes to a block."""
        from_end = count - place
        name = f"block -{from_end}" if from_end <= 2 else "blocks"
        name = f"block {place}" if place < 2 else name

        def watch(module: nn.Module, args: object, output: Tensor) -> None:
            if output.requires_grad:
                cast(Any, output).register_hook(lambda _: self.mark(name))

        return watch

    def take(self, probe: MemoryProbe | None) -> Moments:
        """Takes a step; returns the most of each moment, if somebody counts."""
        moments: Moments = {}
        began = "forward"

        def mark(name: str) -> None:
            nonlocal began
            if probe is not None:
                moments[began] = max(moments.get(began, 0), probe.most())
            began = name

        self.mark = _nothing
        for number in range(self.run.accumulation):
            last = number + 1 == self.run.accumulation
            if probe is not None and last:
                probe.start()
                self.mark = mark
            self._pass(last=last, forward_ended=lambda: self.mark("head"))
        self.mark = _nothing
        mark("optimizer")
        if probe is not None:
            probe.before_optimizer()
        self.layout.clip(self.module, self.run.trainer.clip_norm)
        self.optimizer.step()
        mark("")
        lasting = probe.lasting if probe is not None else 0
        if probe is not None:
            probe.abandon()
        self.module.zero_grad()
        return {name: most + lasting for name, most in moments.items()}

    def _pass(self, *, last: bool, forward_ended: Callable[[], None]) -> None:
        layout, run = self.layout, self.run
        factor = torch.ones(())
        waits = isinstance(layout, MeshLayout) and not last
        with cast(MeshLayout, layout).block_backward_sync() if waits else nullcontext():
            with self.precision.forward_context():
                loss = layout.train(self.module, self.batch, Loss(run.objective, factor), last=last)
            forward_ended()
            with layout.loss_context():
                cast(Any, loss / run.accumulation).backward()
