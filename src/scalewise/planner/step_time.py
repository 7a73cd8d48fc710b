"""How long a step takes: operators over the device's rates, messages over its links.

A roofline (Williams et al., 2009): a product takes its flops over the rate that products reach, a
pointwise operator its bytes over the memory's bandwidth. Where a profile does not say how long a
launch takes, models of few features run slower than said here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import Recompute
from scalewise.hardware import DeviceKind
from scalewise.models.op_graph import ModelOpGraphs, Op, OpGraph, OpWork
from scalewise.parallelism.communication import Collective, CollectiveKind
from scalewise.parallelism.mesh import AXES
from scalewise.parallelism.ring_cost import RingLink
from scalewise.planner import host_transfer
from scalewise.planner.activation_liveness import selective_ops
from scalewise.planner.liveness_cache import model_op_graphs
from scalewise.units import GIGA, MICRO

if TYPE_CHECKING:
    from scalewise.hardware import Hardware
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig

HIDDEN_SHARE = 0.8
"""Part of a block's arithmetic under which its messages can hide: the rest waits for the first."""


@dataclass(frozen=True)
class DeviceRates:
    """What a device reaches: flop/s in products and in attention, bytes/s of its memory."""

    matmul_flops_per_s: float
    fp8_matmul_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    """Seconds in which the host starts one operator."""

    def op_seconds(self, work: OpWork, flops: float, moved_bytes: float) -> float:
        """Returns the time of an operator; 0 where there is none."""
        if work is OpWork.communication or not moved_bytes:
            return 0.0
        rates = {
            OpWork.attention: self.attention_flops_per_s,
            OpWork.matmul_fp8: self.fp8_matmul_flops_per_s,
        }
        rate = rates.get(work, self.matmul_flops_per_s)
        return max(flops / rate, moved_bytes / self.memory_bytes_per_s, self.launch_s)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on the slowest rank, by what they go into."""

    matmul: float
    attention: float
    pointwise: float
    recompute: float
    optimizer: float
    exposed_communication: dict[str, float]
    """Seconds of messages that nothing hides, by the axes that they cross."""
    overlapped_communication: float
    """Seconds of messages under the arithmetic."""
    pipeline_bubble: float
    """Seconds for which a pipeline's ranks wait for the first and the last piece."""
    data_loading: float = 0.0
    """Seconds in which the loader gathers rows, before each micro batch."""
    host_copies: float = 0.0
    """Seconds of copies off the device and back that nothing hides."""
    forward_only: float = 0.0
    """Seconds of passes forward alone: a reference is asked, or answers are written."""

    @property
    def seconds(self) -> float:
        """Returns their sum; what is hidden takes none."""
        busy = self.matmul + self.attention + self.pointwise + self.recompute + self.forward_only
        waits = (
            sum(self.exposed_communication.values())
            + self.pipeline_bubble
            + self.data_loading
            + self.host_copies
        )
        return busy + self.optimizer + waits

    def scale(self, factor: float) -> StepTime:
        """Returns a step of which every part takes ``factor`` times as long."""
        messages = {axes: seconds * factor for axes, seconds in self.exposed_communication.items()}
        others = {
            entry.name: getattr(self, entry.name) * factor
            for entry in fields(self)
            if entry.name != "exposed_communication"
        }
        return StepTime(exposed_communication=messages, **others)

    def parts(self) -> dict[str, float]:
        """Returns seconds by what they go into, the largest first."""
        named = {
            "products": self.matmul,
            "attention": self.attention,
            "pointwise": self.pointwise,
            "recompute": self.recompute,
            "reference": self.forward_only,
            "optimizer": self.optimizer,
            "bubble": self.pipeline_bubble,
            "loading rows": self.data_loading,
            "copies off the device and back": self.host_copies,
            **{
                f"messages along {axes}": seconds
                for axes, seconds in self.exposed_communication.items()
            },
        }
        return dict(sorted(named.items(), key=lambda item: -item[1]))


def device_rates(run: RunConfig) -> DeviceRates | None:
    """Returns what a rank reaches in the run's precision; None where a figure is missing."""
    hardware, kind = run.hardware, run.precision.peak_kind
    peak, products = hardware.peak_flops(kind), hardware.matmul_flops(kind)
    if not peak or not products or not hardware.memory_gb_per_s:
        return None
    ranks = run.world_size if hardware.device is DeviceKind.cpu else 1  # on one processor
    return DeviceRates(
        products / ranks,
        (hardware.matmul_flops("fp8") or products) / ranks,  # else emulated
        peak * hardware.attention_share / ranks,
        hardware.memory_gb_per_s * GIGA * hardware.bandwidth_share / ranks,
        hardware.launch_us * MICRO,
    )


def predict_step_time(run: RunConfig) -> StepTime | None:
    """Returns the time of a step on the slowest rank; None where the profile lacks a figure."""
    reached = device_rates(run)
    if reached is None:
        return None
    ranks = run.parallelism.distinct_ranks(run)
    slowest = max(
        (_rank_step_time(run, rank, reached) for rank in ranks), key=lambda step: step.seconds
    )
    return slowest.scale(run.hardware.step_scale)


def _rank_step_time(run: RunConfig, rank: int, rates: DeviceRates) -> StepTime:
    rank_memory = run.parallelism.rank_memory(run, rank)
    op_graphs = model_op_graphs(run.model, rank_memory.forward_spec)
    passes = run.accumulation * rank_memory.num_pipeline_micro_batches
    spent = dict.fromkeys(OpWork, 0.0)
    for graph, count in _rank_parts(op_graphs, rank_memory):
        for operator in graph.operators:
            spent[operator.work] += (
                passes * count * _forward_backward_seconds(graph, operator, rates)
            )
    recompute = passes * _part_recompute_seconds(
        op_graphs.block, Counter(run.memory.recompute_per_layer(rank_memory.stages)), rates
    )
    reference = passes * run.extra_forward_passes * _reference_seconds(rank_memory, run, rates)
    host = host_transfer.transfer_seconds(run, rank_memory)
    optimizer = host.stepping
    if not rank_memory.states_on_host or run.hardware.device is DeviceKind.cpu:
        # Weights and state are read and written, gradients read, and once before for their norm.
        stepped = (
            rank_memory.numel(rank_memory.state_shards, trained=True)
            * run.precision.parameters.bytes
        )
        optimizer += (
            stepped * (2 + 2) + 2 * rank_memory.state_bytes(run)
        ) / rates.memory_bytes_per_s
    arithmetic = sum(spent.values()) + recompute + reference
    messages, hidden = _collective_seconds(run, rank, arithmetic)
    beside = host.stepping if rank_memory.streams_weights else HIDDEN_SHARE * arithmetic - hidden
    copies = max(0.0, host.copies - beside) + host.activations
    rounds = rank_memory.num_pipeline_micro_batches * len(rank_memory.stages)
    bubble = (arithmetic + sum(messages.values())) * (rank_memory.pipeline_ranks - 1) / rounds
    return StepTime(
        spent[OpWork.matmul] + spent[OpWork.matmul_fp8],
        spent[OpWork.attention],
        spent[OpWork.pointwise],
        recompute,
        optimizer,
        messages,
        hidden,
        bubble,
        _loader_seconds(run),
        copies,
        reference,
    )


def _rank_parts(op_graphs: ModelOpGraphs, rank_memory: RankMemory) -> list[tuple[OpGraph, int]]:
    """Returns what a rank runs in a pass, and how often."""
    ends = [
        graph
        for graph in (op_graphs.head, op_graphs.loss)
        if graph is not None and rank_memory.has_head
    ]
    return [(op_graphs.block, rank_memory.num_layers), *((end, 1) for end in ends)]


def _reference_seconds(rank_memory: RankMemory, run: RunConfig, rates: DeviceRates) -> float:
    """Returns the seconds of a pass forward through the model without its adapter."""
    op_graphs = model_op_graphs(run.model, replace(rank_memory.forward_spec, adapted_layers=()))
    return sum(
        count * _forward_seconds(graph, operator, rates)
        for graph, count in _rank_parts(op_graphs, rank_memory)
        for operator in graph.operators
    )


def _loader_seconds(run: RunConfig) -> float:
    """Returns the seconds in which a rank's loader makes its rows of a step."""
    rate = run.hardware.loader_tokens_per_s
    return run.tokens_per_step / run.parallelism.data_parallel_size / rate if rate else 0.0


def _forward_backward_seconds(graph: OpGraph, operator: Op, rates: DeviceRates) -> float:
    written = graph.count_moved_bytes(operator.gradients) + sum(operator.weight_gradient_bytes)
    back = (
        _moved_bytes(graph, operator) + written
        if operator.gradients or operator.weight_gradient_bytes[0]
        else 0
    )
    casts = rates.op_seconds(OpWork.pointwise, 0.0, operator.cast_bytes[1])
    backward = rates.op_seconds(operator.work, operator.backward_flops, back) + casts
    return _forward_seconds(graph, operator, rates) + backward


def _forward_seconds(graph: OpGraph, operator: Op, rates: DeviceRates) -> float:
    casts = rates.op_seconds(OpWork.pointwise, 0.0, operator.cast_bytes[0])
    return rates.op_seconds(operator.work, operator.flops, _moved_bytes(graph, operator)) + casts


def _moved_bytes(graph: OpGraph, operator: Op) -> int:
    return graph.count_moved_bytes((*operator.reads, *operator.writes))


def recompute_seconds(run: RunConfig, rates: DeviceRates) -> float:
    """Returns the seconds that the model's blocks compute again in one pass."""
    block = model_op_graphs(run.model, run.parallelism.rank_memory(run, 0).forward_spec).block
    return _part_recompute_seconds(block, run.memory.count_by_recompute(run.model.layers), rates)


def _part_recompute_seconds(
    graph: OpGraph, blocks: Counter[Recompute], rates: DeviceRates
) -> float:
    return sum(
        count * _forward_seconds(graph, operator, rates)
        for recompute, count in blocks.items()
        for operator in _recomputed_ops(graph, recompute)
    )


def _recomputed_ops(graph: OpGraph, recompute: Recompute) -> Iterator[Op]:
    if recompute is Recompute.nothing:
        return
    kept = selective_ops(graph) if recompute is Recompute.selective else frozenset()
    yield from (op for op in graph.operators if op.writes[0] not in kept)


def _collective_seconds(
    run: RunConfig, rank: int, compute_seconds: float
) -> tuple[dict[str, float], float]:
    """Returns the seconds of messages that nothing hides, by axes, and of those hidden.

    Weights and gradients travel while blocks are at work; activations are waited for.
    """
    exposed: dict[str, float] = {}
    hideable: dict[str, float] = {}
    for message in run.parallelism.collectives(run, rank):
        seconds = message.count * _message_seconds(run, message)
        every = set(message.axes) == set(AXES)
        cut = [
            axis for axis in message.axes if run.parallelism.describe_group((axis,), None)[0] > 1
        ]
        name = "the whole mesh" if every else " and ".join(cut or message.axes)
        kind = hideable if message.overlaps else exposed
        kind[name] = kind.get(name, 0.0) + seconds
    room = HIDDEN_SHARE * compute_seconds
    hidden = 0.0
    for name, seconds in hideable.items():
        under = min(seconds, room)
        room, hidden = room - under, hidden + under
        exposed[name] = exposed.get(name, 0.0) + seconds - under
    return {name: seconds for name, seconds in exposed.items() if seconds}, hidden


def _message_seconds(run: RunConfig, collective: Collective) -> float:
    """Returns the seconds of one message over the slowest link that it crosses."""
    size, crosses = run.parallelism.describe_group(collective.axes, run.hardware.devices_per_node)
    if size == 1 and collective.kind is not CollectiveKind.send:
        return 0.0
    return slowest_link(run.hardware, crosses_nodes=crosses).seconds(
        collective.kind, size, collective.bytes
    )


def slowest_link(hardware: Hardware, *, crosses_nodes: bool) -> RingLink:
    """Returns the link within a node, or between nodes; endless where the profile has none."""
    bandwidth, latency = hardware.link_gb_per_s, hardware.link_latency_us
    if crosses_nodes:
        bandwidth = hardware.node_link_gb_per_s or bandwidth
        latency = hardware.node_link_latency_us or latency
    return RingLink((latency or 0.0) * MICRO, (bandwidth or float("inf")) * GIGA)
