"""Simulate the tensor lifetimes of one model part in its forward and backward pass.

The rules are those of autograd: a tensor is freed after its last use, unless backward reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from scalewise.hardware import DeviceKind
from scalewise.memory_config import OFFLOAD_MIN_BYTES, ActivationCheckpointing
from scalewise.models.base import ModelConfig, StageSlice
from scalewise.models.compiler_fusion import fuse
from scalewise.models.op_graph import (
    BackwardMode,
    ForwardSpec,
    ModelOpGraphs,
    Op,
    OpGraph,
    Recompute,
    RecordedPart,
    SavedOn,
    build_op_graphs,
)
from scalewise.planner.backward_liveness import BackwardLiveness
from scalewise.planner.rank_memory import RankMemory
from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class PartLiveness:
    """Memory of one model part in a forward and backward pass, in bytes."""

    saved_bytes: int
    """Tensors saved between the forward and the backward of the part."""
    forward_peak: int
    """Peak memory of the forward, including its inputs."""
    backward_peak: int
    """Peak memory of the backward, including saved tensors and parameter gradients."""
    gradient_bytes: int
    """Parameter gradients that exist after the backward."""
    offloaded_bytes: int = 0
    """Saved tensors that are offloaded between the forward and the backward.

    Those on the host count in both peaks, because they are copied while the next block runs.
    """


def simulate_part(
    graph: OpGraph,
    recompute: Recompute = Recompute.nothing,
    *,
    inputs: Sequence[int] = (0,),
    fresh_gradients: bool,
    saved_on: SavedOn = SavedOn.device,
    step_scratch_ratio: float = -1,
) -> PartLiveness:
    """Simulate the forward and backward pass of a model part.

    Args:
        graph: Operator graph of the part; the first tensor that its last operator writes is the
            output.
        recompute: Activation checkpointing of the part.
        inputs: Indices of the input tensors.
        fresh_gradients: Whether the parameters have no gradient yet, so that backward allocates it.
        saved_on: Memory of saved tensors between forward and backward.
        step_scratch_ratio: Temporary bytes of an optimizer step in backward, per byte of gradient;
            negative if the optimizer steps after backward.
    """
    if isinstance(graph, RecordedPart):
        return _measure_recorded(
            graph,
            BackwardMode(
                recompute, fresh_gradients or step_scratch_ratio >= 0, saved_on, step_scratch_ratio
            ),
        )
    forward = _ForwardLiveness(graph, inputs)
    forward.run(graph.operators)
    saved_bytes, first_forward, recompute_peak, leftover_bytes = forward.saved_bytes, forward, 0, 0
    offloaded: frozenset[int] = frozenset()
    freed_in_forward: frozenset[int] = frozenset()  # backward computes or reads them again
    if recompute is Recompute.nothing and saved_on is not SavedOn.device:
        large = frozenset(
            tensor for tensor in forward.save_counts if graph.sizes[tensor] >= OFFLOAD_MIN_BYTES
        )
        offloaded = large - graph.weight_casts
        freed_in_forward = large if saved_on is SavedOn.disk else large & graph.weight_casts
        first_forward = _ForwardLiveness(
            graph, inputs, saved=frozenset(forward.save_counts) - freed_in_forward
        )
        first_forward.run(graph.operators)
        saved_bytes -= sum(graph.sizes[tensor] for tensor in large)
    if recompute is not Recompute.nothing:
        cached = selective_ops(graph) if recompute is Recompute.selective else frozenset()
        saved_bytes = sum(graph.sizes[tensor] for tensor in {*inputs, *cached})
        first_forward = _ForwardLiveness(graph, inputs, saved=cached)
        first_forward.run(graph.operators)
        # Recomputation stops at the last operator whose inputs backward reads.
        last_op = max(
            index
            for index, operator in enumerate(graph.operators)
            if operator.backward_reads_forward
        )
        last_op += (
            graph.operators[last_op].cast_bytes[0] > 0
        )  # the cast before it reads the same input
        recomputation = _ForwardLiveness(graph, inputs, cached=cached)
        recomputation.run(graph.operators[:last_op])
        unused_outputs = {tensor for op in graph.operators[last_op:] for tensor in op.writes}
        # Inputs of the block stay alive for recomputation until its backward ends.
        block_inputs = {*inputs} - {*forward.save_counts}
        leftover_bytes = sum(
            graph.sizes[tensor] for tensor in (unused_outputs & cached) | block_inputs
        )
        # Recomputation starts when backward first reads a saved tensor; until then gradients exist.
        recompute_op = max(
            index
            for index, operator in enumerate(graph.operators)
            if operator.backward_reads_forward
        )
        before_recompute = BackwardLiveness(
            graph,
            forward.save_counts,
            0,
            fresh_gradients=fresh_gradients,
            step_scratch_ratio=step_scratch_ratio,
        )
        before_recompute.run(graph.operators[recompute_op + 1 :])
        recompute_peak = recomputation.peak + before_recompute.current_bytes - forward.saved_bytes
        if saved_on is not SavedOn.device:
            offloaded = frozenset(
                tensor for tensor in inputs if graph.sizes[tensor] >= OFFLOAD_MIN_BYTES
            )
            saved_bytes -= sum(graph.sizes[tensor] for tensor in offloaded)
    backward = BackwardLiveness(
        graph,
        forward.save_counts,
        leftover_bytes,
        fresh_gradients=fresh_gradients,
        restored=freed_in_forward,
        step_scratch_ratio=step_scratch_ratio,
    )
    backward.run(graph.operators)
    peak = max(backward.peak, recompute_peak)
    offloaded_bytes = sum(graph.sizes[tensor] for tensor in offloaded)
    return PartLiveness(
        saved_bytes, first_forward.peak, peak, backward.gradient_bytes, offloaded_bytes
    )


def _measure_recorded(part: RecordedPart, backward_mode: BackwardMode) -> PartLiveness:
    saved_bytes, forward_peak, backward_peak, gradient_bytes = part.measure(backward_mode)
    liveness = PartLiveness(saved_bytes, forward_peak, backward_peak, gradient_bytes)
    if backward_mode.saved_on is SavedOn.device:
        return liveness
    with_offloaded, without_offloaded = (
        part.measure(replace(backward_mode, saved_on=memory))[0]
        for memory in (SavedOn.host, SavedOn.disk)
    )
    return replace(
        liveness,
        saved_bytes=without_offloaded,
        offloaded_bytes=with_offloaded - without_offloaded,
    )


def selective_ops(graph: OpGraph) -> frozenset[int]:
    """Return the indices of the tensors that selective checkpointing saves."""
    saved = (operator.writes for operator in graph.operators if operator.saved_by_selective)
    return frozenset(tensor for writes in saved for tensor in writes)


class _ForwardLiveness:
    """Memory counter of a forward pass.

    ``saved`` replaces the set of tensors that backward reads; ``cached`` tensors exist before the
    pass.
    """

    def __init__(
        self,
        graph: OpGraph,
        inputs: Sequence[int],
        saved: frozenset[int] | None = None,
        cached: frozenset[int] = frozenset(),
    ) -> None:
        self._graph, self._cached = graph, cached
        self._sizes = graph.sizes.copy()
        self._last_read = {
            tensor: index
            for index, operator in enumerate(graph.operators)
            for tensor in operator.reads
        }
        self.save_counts: dict[int, int] = {}
        for operator in graph.operators:
            for tensor in operator.saved:
                self.save_counts[tensor] = self.save_counts.get(tensor, 0) + 1
        self._retained = {*inputs, *(self.save_counts if saved is None else saved)}
        for tensor in graph.fused_intermediates - self._retained:
            self._sizes[tensor] = 0
        self._current_bytes = self.peak = sum(graph.sizes[tensor] for tensor in {*inputs, *cached})

    def run(self, operators: Sequence[Op]) -> None:
        sizes, retained, current_bytes, peak = (
            self._sizes,
            self._retained,
            self._current_bytes,
            self.peak,
        )
        for index, operator in enumerate(operators):
            for tensor in operator.writes:
                if tensor not in self._cached:
                    current_bytes += sizes[tensor]
            if current_bytes + operator.forward_scratch > peak:
                peak = current_bytes + operator.forward_scratch
            for tensor in operator.reads:
                if self._last_read[tensor] == index and tensor not in retained:
                    current_bytes -= sizes[tensor]
            for tensor in operator.writes[1:]:
                if tensor not in retained:
                    current_bytes -= sizes[tensor]
        self._current_bytes, self.peak = current_bytes, peak

    @property
    def saved_bytes(self) -> int:
        """Size of the tensors that backward reads, in bytes."""
        return sum(self._graph.sizes[tensor] for tensor in self.save_counts)


@lru_cache(maxsize=1024)
def bytes_before_head(model: ModelConfig, forward_spec: ForwardSpec) -> int:
    """Return the memory of the head part right after the backward pass of its last matmul.

    Without the gradients of parameters: the gradient of the features, and what the norm saves.
    """
    graph = model_op_graphs(model, forward_spec).head
    if isinstance(graph, RecordedPart):
        return 2 * graph.sizes[0]
    forward = _ForwardLiveness(graph, (0,))
    backward = BackwardLiveness(
        graph, forward.save_counts, 0, fresh_gradients=True, step_scratch_ratio=-1
    )
    backward.run(graph.operators[-1:])
    return backward.current_bytes - backward.gradient_bytes


EMPTY = PartLiveness(0, 0, 0, 0)
"""Memory of a part that the rank does not store."""


def model_op_graphs(
    model: ModelConfig, forward_spec: ForwardSpec, full_recompute: bool = False
) -> ModelOpGraphs:
    """Return the operator graphs of a model, compiled kernels fused.

    ``full_recompute``: whether backward recomputes whole blocks.
    """
    return _cached_op_graphs(model, forward_spec, full_recompute and forward_spec.is_compiled)


@lru_cache(maxsize=1024)
def _eager_op_graphs(model: ModelConfig, forward_spec: ForwardSpec) -> ModelOpGraphs:
    return build_op_graphs(model, forward_spec)


@lru_cache(maxsize=1024)
def _cached_op_graphs(
    model: ModelConfig, forward_spec: ForwardSpec, full_recompute: bool
) -> ModelOpGraphs:
    op_graphs = _eager_op_graphs(model, forward_spec)
    if not forward_spec.is_compiled:
        return op_graphs
    block = fuse(op_graphs.block, full_recompute=full_recompute)
    first_block = block
    if op_graphs.first_block is not op_graphs.block:
        first_block = fuse(op_graphs.first_block, full_recompute=full_recompute)
    return replace(op_graphs, first_block=first_block, block=block)


@lru_cache(maxsize=4096)
def block_liveness(
    model: ModelConfig,
    forward_spec: ForwardSpec,
    recompute: Recompute,
    fresh_gradients: bool,
    saved_on: SavedOn = SavedOn.device,
    step_scratch_ratio: float = -1,
    layer: int = 1,
) -> PartLiveness:
    """Return the memory of a block; ``layer``: the first one of the equal blocks."""
    op_graphs = model_op_graphs(model, forward_spec, recompute is Recompute.full)
    return simulate_part(
        op_graphs.layer_graph(layer),
        recompute,
        fresh_gradients=fresh_gradients,
        saved_on=saved_on,
        step_scratch_ratio=step_scratch_ratio,
    )


@lru_cache(maxsize=4096)
def liveness_by_block(
    model: ModelConfig,
    memory: ActivationCheckpointing,
    stages: tuple[StageSlice, ...],
    forward_spec: ForwardSpec,
    fresh_gradients: bool,
    saved_on: SavedOn,
    step_scratch_ratio: float,
) -> tuple[PartLiveness, ...]:
    """Return the memory of each block of ``stages``, in order."""
    equal_layer = model_op_graphs(model, forward_spec).equal_layer
    kinds = [
        (memory.recompute_for_layer(layer), equal_layer(layer))
        for stage in stages
        for layer in stage.layers
    ]
    liveness = {
        (recompute, layer): block_liveness(
            model, forward_spec, recompute, fresh_gradients, saved_on, step_scratch_ratio, layer
        )
        for recompute, layer in dict.fromkeys(kinds)
    }
    return tuple(liveness[kind] for kind in kinds)


def memory_of_saved_tensors(run: RunConfig) -> SavedOn:
    """Return the memory in which tensors that blocks save wait for the backward pass."""
    if not run.memory.offload:
        return SavedOn.device
    return SavedOn.host if run.hardware.device is DeviceKind.cuda else SavedOn.disk


def offloaded_bytes(run: RunConfig, rank_memory: RankMemory) -> int:
    """Return the offloaded bytes of one forward pass through all stages of a rank.

    The last block of a stage is copied to the host only by the next forward pass, so not if its
    backward pass comes first.
    """
    saved_on = memory_of_saved_tensors(run)
    if saved_on is SavedOn.device:
        return 0
    skips_last = saved_on is SavedOn.host and rank_memory.in_flight == len(rank_memory.stages)
    equal_layer = model_op_graphs(run.model, rank_memory.forward_spec).equal_layer
    return sum(
        block_liveness(
            run.model,
            rank_memory.forward_spec,
            run.memory.recompute_for_layer(layer),
            fresh_gradients=True,
            saved_on=saved_on,
            layer=equal_layer(layer),
        ).offloaded_bytes
        for stage in rank_memory.stages
        for layer in stage.layers[: len(stage.layers) - skips_last]
    )


@lru_cache(maxsize=1024)
def non_block_liveness(
    model: ModelConfig,
    forward_spec: ForwardSpec,
    fresh_gradients: bool,
    step_scratch_ratio: float = -1,
) -> tuple[PartLiveness, PartLiveness, PartLiveness]:
    """Return the memory of embedding, head and loss; a chunked loss counts as part of the head."""
    op_graphs = model_op_graphs(model, forward_spec)
    # A tied weight is stepped after both its gradients are summed.
    ratio = min(step_scratch_ratio, 0.0) if model.tied_weights else step_scratch_ratio
    return (
        simulate_part(
            op_graphs.embedding,
            inputs=(),
            fresh_gradients=fresh_gradients,
            step_scratch_ratio=ratio,
        ),
        simulate_part(op_graphs.head, fresh_gradients=fresh_gradients, step_scratch_ratio=ratio),
        simulate_part(op_graphs.loss, fresh_gradients=fresh_gradients) if op_graphs.loss else EMPTY,
    )
