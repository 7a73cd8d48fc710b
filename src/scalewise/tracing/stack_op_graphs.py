"""Operator graphs of models with unequal blocks, measured by one run with fake tensors.

The run has a few blocks of each stack: the first, the last, and one of each kind between them. All
blocks of a stack take part in the same run, since they share tensors: the image features that the
Q-Former attends to, for example, live from the vision model's end until the Q-Former's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import lcm
from typing import Any, cast

import torch
from torch import Tensor, nn

from scalewise.measure.allocated_bytes import LiveBytes, storage_bytes
from scalewise.models.base import StageSlice
from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.models.hf.model_info import ModelInfo
from scalewise.models.op_graph import (
    BackwardMode,
    ForwardSpec,
    ModelOpGraphs,
    OpGraph,
    RecordedPart,
)
from scalewise.objectives.losses import sum_over_tokens
from scalewise.tracing.fake_tensor_runner import FRESH, FakeTensorRunner, measured_part
from scalewise.tracing.op_recorder import OpRecorder, Sizes, first_tensor, gradient_bytes

EMBEDDING, HEAD, LOSS = "embedding", "head", "loss"


def stack_op_graphs(spec: HuggingFaceConfig, forward_spec: ForwardSpec) -> ModelOpGraphs:
    """Return the operator graphs of a model with several stacks, or several kinds of blocks."""
    shallow, layers = representative_layers(spec)
    runner = StackRunner(shallow, forward_spec)
    recorded = runner.record_parts()
    blocks = [runner.measured_part(recorded, str(layer)) for layer in range(shallow.layers)]
    return ModelOpGraphs(
        embedding=runner.measured_part(recorded, EMBEDDING),
        first_block=blocks[0],
        block=blocks[1],
        head=runner.measured_part(recorded, HEAD),
        loss=None if runner.uses_chunked_loss else runner.measured_part(recorded, LOSS),
        shared_bytes=0,
        blocks=tuple(blocks[layer] for layer in layers),
    )


def representative_layers(spec: HuggingFaceConfig) -> tuple[HuggingFaceConfig, tuple[int, ...]]:
    """Return a shallow copy of a model, and the layer of it that stands for each layer.

    Between the first and the last layer of a stack, the shapes of weights repeat with a period: it
    is 2 if every second layer has cross-attention. A model without such a copy stands for itself.
    """
    stacks = _stack_shapes(spec.info)
    periods = [_find_period(shapes) for shapes in stacks]
    shortest, period = min(map(len, stacks)), lcm(*periods)
    for depth in range(2 + max(periods), min(shortest, 2 + 2 * period) + 1):
        pairs = zip(stacks, periods, strict=True)
        if all((len(shapes) - depth) % each == 0 for shapes, each in pairs):
            break
    else:
        return spec, tuple(range(spec.layers))
    layers: list[int] = []
    for index, (shapes, each) in enumerate(zip(stacks, periods, strict=True)):
        middle = [1 + position % each for position in range(len(shapes) - 2)]
        layers += [index * depth + layer for layer in (0, *middle, depth - 1)]
    return spec.with_layers(depth), tuple(layers)


def _stack_shapes(info: ModelInfo) -> list[list[frozenset[tuple[str, tuple[int, ...]]]]]:
    """Return the names and shapes of the weights of each layer, by stack."""
    layers: list[set[tuple[str, tuple[int, ...]]]] = [set() for _ in range(info.layers)]
    for weight in info.weight_census:
        if weight.layer is not None:
            name = weight.name.removeprefix(f"blocks.{weight.layer}.")
            layers[weight.layer].add((name, weight.shape))
    bounds = pairwise((*info.stack_starts, info.layers))
    return [[*map(frozenset, layers[start:end])] for start, end in bounds]


def _find_period(shapes: Sequence[object]) -> int:
    """Return the smallest distance at which layers between the first and the last are equal."""
    inner = shapes[1:-1]
    return next(
        (period for period in range(1, len(inner)) if [*inner[period:]] == [*inner[:-period]]),
        max(1, len(inner)),
    )


@dataclass
class PartMeter:
    """Memory of the parts of a model, from one forward and one backward pass.

    A part begins where its block reads its input. Its backward begins with the gradient of the
    block's output.
    """

    live: LiveBytes
    """Counter of the memory of the run."""
    module: nn.Module
    """Module of the run."""
    fresh_gradients: bool
    """Whether backward allocates the gradients of parameters."""
    names: list[str] = field(default_factory=lambda: [EMBEDDING])
    """Parts, in the order of their forward passes."""
    saved_before: dict[str, int] = field(default_factory=lambda: {EMBEDDING: 0})
    """Bytes that parts before a part save for backward."""
    forward_peaks: dict[str, int] = field(default_factory=dict)
    """Peak of the run during the forward pass of a part, in bytes."""
    backward_peaks: dict[str, int] = field(default_factory=dict)
    """Peak of the run during the backward pass of a part, in bytes."""
    gradients_before: dict[str, int] = field(default_factory=dict)
    """Bytes of the gradients of parameters at the start of the backward pass of a part."""

    def begin_forward(self, name: str, x: Tensor) -> None:
        """End the forward pass of the last part and begin the next one, which reads ``x``."""
        self.forward_peaks[self.names[-1]] = self.live.take_peak()
        self.names.append(name)
        self.saved_before[name] = self.live.current_bytes - storage_bytes([x])

    def begin_backward(self, name: str) -> None:
        """End the backward pass of the last part and begin that of ``name``."""
        self.end_backward()
        self.gradients_before[name] = self._gradient_bytes()

    def end_backward(self) -> None:
        """End the backward pass of the last part."""
        peak = self.live.take_peak()
        if self.gradients_before:
            self.backward_peaks[[*self.gradients_before][-1]] = peak

    def sizes(self) -> dict[str, Sizes]:
        """Return the sizes of each part, after the backward pass."""
        # The callers of blocks hold tensors until they return, which no backward may read.
        saved_before = dict(self.saved_before)
        saved_before[HEAD] = min(saved_before[HEAD], saved_before[self.names[-1]])
        saved_after = dict(zip(self.names, [*saved_before.values()][1:], strict=False))
        following = dict(pairwise([*self.gradients_before]))
        gradients_after = {
            name: self.gradients_before.get(following.get(name, ""), self._gradient_bytes())
            for name in self.gradients_before
        }
        parts: dict[str, Sizes] = {}
        for name in self.names:
            before, gradients = saved_before[name], self.gradients_before.get(name, 0)
            parts[name] = (
                saved_after.get(name, before) - before,
                self.forward_peaks[name] - before,
                max(0, self.backward_peaks.get(name, 0) - before - gradients),
                gradients_after.get(name, 0) - gradients,
            )
        return parts

    def _gradient_bytes(self) -> int:
        return gradient_bytes(self.module) * self.fresh_gradients


class StackRunner(FakeTensorRunner):
    """Runs a shallow copy of a model with unequal blocks on fake tensors."""

    def __init__(self, spec: HuggingFaceConfig, forward_spec: ForwardSpec) -> None:
        super().__init__(spec, forward_spec, StageSlice(range(spec.layers)))
        self._measured: dict[BackwardMode, dict[str, Sizes]] = {}

    def measured_part(self, recorded: dict[str, OpGraph], name: str) -> RecordedPart:
        """Return a named part; the first read of its sizes runs the model."""
        return measured_part(recorded[name], lambda mode: self.measure_parts(mode, name)[name])

    def measure_parts(self, backward_mode: BackwardMode, name: str) -> dict[str, Sizes]:
        """Return the sizes of the parts of a run with a part's options; equal runs are cached.

        What blocks recompute does not change the sizes of the parts outside of blocks.
        """
        is_block = name not in (EMBEDDING, HEAD, LOSS)
        for known_mode, sizes in self._measured.items():
            if known_mode == backward_mode or (
                not is_block and known_mode.fresh_gradients == backward_mode.fresh_gradients
            ):
                return sizes
        return self._measured.setdefault(backward_mode, self._measure_parts(backward_mode))

    def empty_inputs(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return pixels or tokens, labels, and the positions of packed texts.

        A model with one stack reads labels only if it computes the loss itself.
        """
        if self.spec.num_stacks == 1:
            inputs, labels, positions = self._empty_batch()
            return inputs, labels if self.uses_chunked_loss else None, positions
        sequences, tokens = self.forward_spec.sequences, self.forward_spec.tokens_per_sequence
        if side := self.spec.image_size:
            pixels = torch.zeros((sequences, 3, side, side), dtype=torch.uint8)
            return pixels, self.empty_labels(), None
        source = tokens - self.forward_spec.target_tokens
        return torch.zeros((sequences, source), dtype=torch.long), self.empty_labels(), None

    def empty_labels(self) -> Tensor:
        """Return the labels of all sequences."""
        tokens = self.forward_spec.target_tokens or self.forward_spec.tokens_per_sequence
        return torch.zeros((self.forward_spec.sequences, tokens), dtype=torch.long)

    def _measure_parts(self, backward_mode: BackwardMode) -> dict[str, Sizes]:
        """Run the model forward and backward, and return the sizes of its parts by name."""
        in_forward = self.forward_spec.loss_in_forward
        module = self._build_module(backward_mode, in_forward=in_forward)
        with self.fake_tensors():
            inputs, labels = self.empty_inputs(), self.empty_labels()
        with self.fake_tensors(), LiveBytes() as live:
            meter = PartMeter(live, module, backward_mode.fresh_gradients)
            self._begin_parts(module, meter.begin_forward, meter.begin_backward)
            with self._forward_context():
                loss = module(*inputs)
            if not self.uses_chunked_loss:
                logits = loss
                meter.begin_forward(LOSS, logits)
                _begin_with_gradient(logits, partial(meter.begin_backward, HEAD))
                loss = sum_over_tokens(self.objective, logits, labels)
                del logits
            meter.forward_peaks[meter.names[-1]] = live.take_peak()
            meter.begin_backward(meter.names[-1])
            cast(Any, loss).backward()
            del loss
            meter.end_backward()
            return meter.sizes()

    def _begin_parts(
        self,
        module: nn.Module,
        begin_forward: Callable[[str, Tensor], None],
        begin_backward: Callable[[str], None] | None = None,
    ) -> None:
        """Call functions where parts begin, with the input of a block, or with the last output."""
        blocks = cast(Any, module).layers()
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(
                partial(_begin_block, str(index), begin_forward, begin_backward), with_kwargs=True
            )
            is_last = index + 1 == len(blocks)
            block.register_forward_hook(
                partial(_end_block, str(index), begin_forward if is_last else None, begin_backward)
            )

    def record_parts(self) -> dict[str, OpGraph]:
        """Return the operators of each part, by name."""
        module, recorder = self._build_module(FRESH), OpRecorder(self.forward_spec)
        recorder.begin_part(EMBEDDING, ())
        self._begin_parts(module, lambda name, x: recorder.begin_part(name, (x,)))
        with self.fake_tensors():
            inputs, labels = self.empty_inputs(), self.empty_labels()
            with self._forward_context(), recorder:
                logits = module(*inputs)
                recorder.begin_part(LOSS, (logits,))
                if not self.uses_chunked_loss:
                    sum_over_tokens(self.objective, logits, labels)
        return recorder.graphs


def _begin_block(
    name: str,
    begin_forward: Callable[[str, Tensor], None],
    begin_backward: Callable[[str], None] | None,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    x = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    begin_forward(name, x)
    if name == "0" and begin_backward is not None:
        _begin_with_gradient(x, partial(begin_backward, EMBEDDING))


def _end_block(
    name: str,
    begin_head: Callable[[str, Tensor], None] | None,
    begin_backward: Callable[[str], None] | None,
    block: nn.Module,
    args: object,
    output: Tensor | tuple[Tensor, ...],
) -> None:
    x = first_tensor(output)
    if begin_head is not None:
        begin_head(HEAD, x)
    if begin_backward is not None:
        _begin_with_gradient(x, partial(begin_backward, name))


def _begin_with_gradient(tensor: Tensor, begin: Callable[[], None]) -> None:
    """Call ``begin`` once backward has computed the gradient of ``tensor``."""
    if tensor.requires_grad:
        cast(Any, tensor).register_hook(lambda _: begin())
