"""Tensor lifetimes of a backward pass that computes the gradients of weights later.

``torch.distributed.pipelining`` runs autograd twice (``_backward.py``). The input backward keeps
the graph, and the gradient of the output of each operator that has weights. The weight backward
runs these operators again, from those gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from scalewise.models.base import ModelConfig
from scalewise.models.op_graph import ForwardSpec, Op, OpGraph
from scalewise.planner.activation_liveness import model_op_graphs
from scalewise.planner.backward_liveness import BackwardLiveness, Buffers

HEAD, LOSS = -1, -2
"""Parts of a model that are no block, next to the indices of layers."""


@dataclass(frozen=True)
class SplitPartLiveness:
    """Memory of one model part in a split backward pass, in bytes.

    Except for ``kept_bytes``, relative to the tensors that its forward has saved.
    """

    input_peak: int
    """Peak of the input backward, with the gradients of the output and of the input."""
    retained_bytes: int
    """Gradients kept for the weights, without that of the output of the part."""
    retained_output_bytes: int
    """Gradient of the output of the part, if it is kept for the weights."""
    has_weights: bool
    """Whether a weight of the part is trained."""
    kept_bytes: int
    """Saved tensors that the weights of the part keep alive between both passes."""
    keeps_input: bool
    """Whether the input of the part is one of these tensors."""
    weight_peak: int
    """Peak of the weight backward."""
    weight_change: int
    """Bytes that the weight backward of the part leaves; negative if it frees more."""


class InputBackwardLiveness(BackwardLiveness):
    """Memory counter of an input backward, above the saved tensors, none of which it frees.

    Args:
        graph: Operator graph of the part.
    """

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph, {}, 0, fresh_gradients=False, step_scratch_ratio=-1)
        self.retained: list[tuple[Op, Buffers]] = []
        """Operators with trained weights and the gradients of their outputs, last one first."""
        self.run(graph.operators)

    @property
    def output_buffer(self) -> int:
        """Index of the gradient of the output, which is allocated first."""
        return 0

    def buffer_size(self, buffer: int) -> int:
        """Return the size of a buffer, in bytes."""
        return self._buffer_sizes[buffer]

    @property
    def retained_buffers(self) -> set[int]:
        """Buffers of the retained gradients, without that of the input of the part."""
        buffers = {buffer for _, each in self.retained for buffer in each}
        return buffers - {*self._gradient_buffers.get(0, ())}

    def _run_op(self, operator: Op) -> None:
        output_gradient = self._gradient_buffers.pop(operator.writes[0])
        input_gradients = [*self._unfused_gradients(operator, output_gradient)]
        weight_gradient = operator.weight_gradient_bytes[0]
        unused_bytes = weight_gradient * operator.has_joint_backward
        self._grow(unused_bytes)
        self.peak = max(self.peak, self.current_bytes + operator.backward_scratch)
        if weight_gradient:
            self.retained.append((operator, output_gradient))
        else:
            self._release(output_gradient)
        for tensor, buffers in input_gradients:
            self._accumulate(tensor, buffers)
        self.current_bytes -= unused_bytes


@lru_cache(maxsize=4096)
def split_part_liveness(
    model: ModelConfig,
    forward_spec: ForwardSpec,
    part: int,
    *,
    fresh_gradients: bool,
    keeps_all: bool,
) -> SplitPartLiveness:
    """Return the memory of a part of a model; see ``simulate_split_part``.

    ``part``: layer of a block, ``HEAD`` or ``LOSS``.
    """
    graph = _part_graph(model, forward_spec, part)
    return simulate_split_part(graph, fresh_gradients=fresh_gradients, keeps_all=keeps_all)


def simulate_split_part(
    graph: OpGraph, *, fresh_gradients: bool, keeps_all: bool
) -> SplitPartLiveness:
    """Simulate a split backward pass of a model part.

    Args:
        graph: Operator graph of the part.
        fresh_gradients: Whether the weights have no gradient yet.
        keeps_all: Whether a later part of the stage has trained weights, so that the graph of this
            part stays alive.
    """
    backward = InputBackwardLiveness(graph)
    buffers = backward.retained_buffers
    output = backward.output_buffer
    saved = {tensor for op in graph.operators for tensor in op.saved}
    if not keeps_all:
        saved = {tensor for op in _iter_kept_ops(graph) for tensor in op.saved}
    peak, change = _weight_backward(graph, backward, fresh_gradients=fresh_gradients)
    return SplitPartLiveness(
        backward.peak,
        sum(map(backward.buffer_size, buffers - {output})),
        backward.buffer_size(output) * (output in buffers),
        bool(backward.retained),
        sum(graph.sizes[tensor] for tensor in saved),
        0 in saved,
        peak,
        change,
    )


def _part_graph(model: ModelConfig, forward_spec: ForwardSpec, part: int) -> OpGraph:
    op_graphs = model_op_graphs(model, forward_spec)
    if part == LOSS:
        assert op_graphs.loss is not None
        return op_graphs.loss
    return op_graphs.head if part == HEAD else op_graphs.layer_graph(part)


def _iter_kept_ops(graph: OpGraph) -> Iterator[Op]:
    """Yield the operators with trained weights, and those that lead to one."""
    kept: set[int] = set()
    for operator in reversed(graph.operators):
        if operator.weight_gradient_bytes[0] or not kept.isdisjoint(operator.writes):
            kept.update(operator.gradients)
            yield operator


def _weight_backward(
    graph: OpGraph, backward: InputBackwardLiveness, *, fresh_gradients: bool
) -> tuple[int, int]:
    """Return peak and final bytes of a weight backward, relative to the bytes before it.

    An operator frees what it alone has saved. Others do not run: what they have saved is freed
    with the whole graph, after the pass.
    """
    num_saves = Counter(tensor for op in graph.operators for tensor in op.saved)
    num_reads = Counter(buffer for _, buffers in backward.retained for buffer in buffers)
    freed_with_graph = {*num_reads} - backward.retained_buffers
    current = peak = previous_bytes = 0
    for operator, buffers in reversed(backward.retained):
        computed_bytes, gradient_bytes = operator.weight_gradient_bytes
        scratch = previous_bytes + operator.backward_scratch
        if operator.has_joint_backward:
            scratch += sum(graph.sizes[tensor] for tensor in operator.gradients)
        peak = max(peak, current + computed_bytes + scratch)
        if fresh_gradients:
            current += gradient_bytes
            peak = max(peak, current)
        else:  # added to the gradient, and alive until the next one is computed
            previous_bytes = computed_bytes
        num_saves.subtract(operator.saved)
        num_reads.subtract(buffers)
        current -= sum(graph.sizes[tensor] for tensor in {*operator.saved} if not num_saves[tensor])
        current -= sum(
            backward.buffer_size(buffer)
            for buffer in {*buffers} - freed_with_graph
            if not num_reads[buffer]
        )
    return peak, current
