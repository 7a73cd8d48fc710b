"""Roofline times of operators on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from scalewise.cached_hash import cache_hash
from scalewise.memory_config import ActivationCheckpointing
from scalewise.models.base import ModelConfig, StageSlice
from scalewise.models.op_graph import ForwardSpec, Op, OpGraph, OpWork, Recompute
from scalewise.planner.activation_liveness import model_op_graphs, selective_ops


@cache_hash
@dataclass(frozen=True)
class DeviceRates:
    """Sustained rates of a device."""

    matmul_flops_per_s: float
    """Matmul rate, in FLOP/s."""
    fp8_matmul_flops_per_s: float
    """fp8 matmul rate, in FLOP/s."""
    attention_flops_per_s: float
    """Attention rate, in FLOP/s."""
    memory_bytes_per_s: float
    """Memory bandwidth, in bytes/s."""
    launch_s: float
    """Launch time of one operator on the host, in seconds."""

    def op_seconds(
        self,
        work: OpWork,
        flops: float,
        moved_bytes: float,
        *,
        rate_share: float = 1.0,
        is_launched: bool = True,
    ) -> float:
        """Return the time of an operator, in seconds; collectives count elsewhere.

        Args:
            work: Resource that bounds its time.
            flops: Number of FLOPs.
            moved_bytes: Bytes read from memory and written to it.
            rate_share: Rate of the kernel, relative to the sustained rate of the device.
            is_launched: Whether the operator is a kernel of its own, or the last one of a kernel.
        """
        if work is OpWork.communication or not moved_bytes:
            return 0.0
        rates = {
            OpWork.attention: self.attention_flops_per_s,
            OpWork.matmul_fp8: self.fp8_matmul_flops_per_s,
        }
        rate = rates.get(work, self.matmul_flops_per_s)
        seconds = max(flops / (rate * rate_share), moved_bytes / self.memory_bytes_per_s)
        return max(seconds, self.launch_s) if is_launched else seconds


def _backward_seconds(graph: OpGraph, operator: Op, rates: DeviceRates) -> float:
    return rates.op_seconds(
        operator.work,
        operator.backward_flops,
        graph.backward_bytes(operator),
        rate_share=operator.rate_share,
        is_launched=_ends_kernel(graph, operator),
    )


def forward_seconds(graph: OpGraph, operator: Op, rates: DeviceRates) -> float:
    """Return the time of an operator in forward, in seconds."""
    forward = rates.op_seconds(
        operator.work,
        operator.flops,
        graph.forward_bytes(operator),
        rate_share=operator.rate_share,
        is_launched=_ends_kernel(graph, operator),
    )
    return forward + inner_seconds(operator, rates, 0)


def inner_seconds(operator: Op, rates: DeviceRates, index: int) -> float:
    """Return the time of elementwise kernels inside an operator; index: 0 forward, 1 backward."""
    inner_bytes = operator.cast_bytes[index] + operator.elementwise_bytes[index]
    return rates.op_seconds(OpWork.pointwise, 0.0, inner_bytes)


def _ends_kernel(graph: OpGraph, operator: Op) -> bool:
    return operator.writes[0] not in graph.fused_intermediates


@dataclass(frozen=True)
class GraphSeconds:
    """Times of one operator graph, in seconds."""

    forward: float
    """Forward pass."""
    by_work: Mapping[OpWork, float]
    """Forward and backward, by the resource that bounds the operators."""
    weight_gradients: float
    """Weight gradients of the matmuls, a part of backward."""
    recompute: Mapping[Recompute, float]
    """Recomputation in backward, by what is recomputed."""


@dataclass(frozen=True, eq=False)
class ModelSeconds:
    """Times of the operator graphs of a model."""

    blocks: tuple[GraphSeconds, ...]
    """Each kind of block."""
    layer_kinds: tuple[int, ...]
    """Kind of each block of a model with unequal blocks; empty: all blocks are of one kind."""
    ends: tuple[GraphSeconds, ...]
    """Head and loss."""

    def kind_of_layer(self, layer: int) -> int:
        """Return the index in ``blocks`` of the block of a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else 0

    @lru_cache(maxsize=4096)  # noqa: B019 (a search plans thousands of runs with few models)
    def count_blocks(self, stages: tuple[StageSlice, ...]) -> tuple[tuple[GraphSeconds, int], ...]:
        """Return the times of each kind of block of some stages, with the number of blocks."""
        counts = Counter(self.kind_of_layer(layer) for stage in stages for layer in stage.layers)
        return tuple((self.blocks[kind], count) for kind, count in counts.items())

    @lru_cache(maxsize=4096)  # noqa: B019 (as above)
    def recompute_seconds(
        self, memory: ActivationCheckpointing, stages: tuple[StageSlice, ...]
    ) -> float:
        """Return the time of the recomputation of all blocks of some stages, in seconds."""
        counts = Counter(
            (self.kind_of_layer(layer), memory.recompute_for_layer(layer))
            for stage in stages
            for layer in stage.layers
        )
        return sum(
            count * self.blocks[kind].recompute[recompute]
            for (kind, recompute), count in counts.items()
        )


@lru_cache(maxsize=4096)
def model_seconds(model: ModelConfig, spec: ForwardSpec, rates: DeviceRates) -> ModelSeconds:
    """Return the times of the operator graphs of a model on one rank."""
    graphs = model_op_graphs(model, spec)
    ends = (graph for graph in (graphs.head, graphs.loss) if graph is not None)
    layers = graphs.distinct_layers
    return ModelSeconds(
        tuple(_graph_seconds(graphs.layer_graph(layer), rates) for layer in layers),
        tuple(layers.index(graphs.equal_layer(layer)) for layer in range(len(graphs.blocks))),
        tuple(_graph_seconds(graph, rates) for graph in ends),
    )


def _graph_seconds(graph: OpGraph, rates: DeviceRates) -> GraphSeconds:
    by_work, saved = dict.fromkeys(OpWork, 0.0), selective_ops(graph)
    forward = selective = weight_gradients = 0.0
    for operator in graph.operators:
        op_forward = forward_seconds(graph, operator, rates)
        op_backward = _backward_seconds(graph, operator, rates)
        by_work[operator.work] += op_forward + op_backward + inner_seconds(operator, rates, 1)
        forward += op_forward
        # Of saved matmuls, only casts to 8 bits or fewer are computed again.
        is_saved = operator.writes[0] in saved
        selective += inner_seconds(operator, rates, 0) if is_saved else op_forward
        weight_gradients += _weight_gradient_share(operator) * op_backward
    return GraphSeconds(
        forward,
        by_work,
        weight_gradients,
        {Recompute.nothing: 0.0, Recompute.selective: selective, Recompute.full: forward},
    )


def _weight_gradient_share(operator: Op) -> float:
    """Return the share of a matmul's backward that computes its weight gradient."""
    if not operator.weight_gradient_bytes[0] or not operator.backward_flops:
        return 0.0
    return min(1.0, operator.flops / operator.backward_flops)
