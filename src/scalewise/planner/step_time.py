"""Predicted step time: operators at the rates of the device, collectives over its links.

A roofline model (Williams et al., 2009): a matmul takes its FLOPs over the sustained matmul rate, a
pointwise operator its bytes over the memory bandwidth. Without ``hardware.launch_us``, narrow
models run slower than predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from scalewise.hardware import DeviceKind, Hardware
from scalewise.models.base import StageSlice
from scalewise.models.op_graph import OpWork
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.collective import Collective, CollectiveKind, RingLink
from scalewise.parallelism.mesh import AXES, MeshConfig
from scalewise.planner import host_memory
from scalewise.planner.communication import list_collectives
from scalewise.planner.operator_time import (
    DeviceRates,
    GraphSeconds,
    ModelSeconds,
    model_seconds,
)
from scalewise.planner.pipeline_bubble import StageSeconds, bubble_seconds
from scalewise.planner.rank_memory import RankMemory, rank_memory_of
from scalewise.planner.rank_partition import list_distinct_ranks
from scalewise.planner.step_parts import StepTime
from scalewise.run_config import RunConfig
from scalewise.units import GIGA, MICRO

OVERLAP_SHARE = 0.8
"""Share of the compute time that can overlap with collectives; the rest waits for the first."""
OVERLAP_SLOWDOWN = 0.189
"""Mean slowdown of compute during collectives, which use multiprocessors and memory bandwidth too
(Lee et al., 2025, arXiv 2507.03114, abstract: A100, H100, MI210 and MI250)."""

ROUNDING = 1e-9
"""Largest relative rounding error of a step time."""


def device_rates(run: RunConfig) -> DeviceRates | None:
    """Return the rates of a rank in the precision of the run; None if the profile lacks one."""
    hardware, kind = run.hardware, run.precision.peak_kind
    peak, matmul = hardware.peak_flops(kind), hardware.matmul_flops(kind)
    if not peak or not matmul or not hardware.memory_gb_per_s:
        return None
    ranks = (
        run.world_size if hardware.device is DeviceKind.cpu else 1
    )  # CPU ranks share a processor
    return DeviceRates(
        matmul / ranks,
        (hardware.matmul_flops("fp8") or matmul)  # emulated without an fp8 rate
        * run.precision.fp8_rate_share
        / ranks,
        peak * hardware.attention_share / ranks,
        hardware.memory_gb_per_s * GIGA * hardware.bandwidth_share / ranks,
        hardware.launch_us * MICRO,
    )


def predict_step_time(run: RunConfig) -> StepTime | None:
    """Return the step time of the slowest rank; None if the profile lacks a rate."""
    rates = device_rates(run)
    if rates is None:
        return None
    _, slowest = _slowest_rank(run, rates)
    return slowest.scale(run.hardware.step_scale)


def least_step_seconds(run: RunConfig) -> float:
    """Return a lower bound of the step time, in seconds: rank 0 without collectives.

    It is 0 if the profile lacks a rate.
    """
    rates = device_rates(run)
    if rates is None:
        return 0.0
    step = _rank_step_time(run, 0, rates, has_collectives=False)
    return step.scale(run.hardware.step_scale).seconds * (1 - ROUNDING)


def predict_collective_seconds(run: RunConfig) -> dict[str, float]:
    """Return the time of each kind of collective of the slowest rank in a step, in seconds.

    Keys name the kind and the group, such as ``all-gather over shards``. Collectives that overlap
    with compute count in full. Empty if the profile lacks a rate.
    """
    rates = device_rates(run)
    if rates is None:
        return {}
    rank, _ = _slowest_rank(run, rates)
    by_name: dict[str, float] = {}
    for group, collective, seconds in _list_collective_seconds(run, rank):
        name = f"{collective.kind.value.replace('_', '-')} over {group}"
        by_name[name] = by_name.get(name, 0.0) + seconds * run.hardware.step_scale
    return dict(sorted(by_name.items(), key=lambda item: -item[1]))


def _slowest_rank(run: RunConfig, rates: DeviceRates) -> tuple[int, StepTime]:
    """Return the rank with the longest step, and the parts of its step."""
    ranks = list_distinct_ranks(run.parallelism, run)
    steps = ((rank, _rank_step_time(run, rank, rates)) for rank in ranks)
    return max(steps, key=lambda it: it[1].seconds)


def _rank_step_time(
    run: RunConfig, rank: int, rates: DeviceRates, *, has_collectives: bool = True
) -> StepTime:
    """Return the step time of a rank.

    ``has_collectives``: False leaves out collectives, so that no part takes longer.
    """
    rank_memory = rank_memory_of(run, rank)
    graphs = model_seconds(run.model, rank_memory.forward_spec, rates)
    micro_batches = run.accumulation * rank_memory.num_pipeline_micro_batches
    parts = _rank_parts(graphs, rank_memory)
    compute_by_work = {
        work: micro_batches * sum(count * part.by_work[work] for part, count in parts)
        for work in OpWork
    }
    recompute = micro_batches * graphs.recompute_seconds(run.memory, rank_memory.stages)
    reference = (
        micro_batches * run.extra_forward_passes * _reference_seconds(rank_memory, run, rates)
    )
    host = host_memory.transfer_seconds(run, rank_memory)
    optimizer = host.stepping
    if not rank_memory.states_on_host or run.hardware.device is DeviceKind.cpu:
        # Weights and state are read and written; gradients are read twice, once for their norm.
        elements = rank_memory.numel(rank_memory.state_shards, trained=True)
        parameter_bytes = elements * run.precision.parameters.bytes
        update_bytes = parameter_bytes * (2 + 1) + 2 * rank_memory.state_bytes(run)
        if run.precision.stochastic_rounding:
            update_bytes = run.optimizer.rounding_traffic_bytes(elements)
        optimizer += (parameter_bytes + update_bytes) / rates.memory_bytes_per_s
    compute = sum(compute_by_work.values()) + recompute + reference
    exposed, overlapped = dict[str, float](), 0.0
    if has_collectives:
        exposed, overlapped = _collective_seconds(run, rank, compute)
    on_cuda = run.hardware.device is DeviceKind.cuda
    overlap_seconds = (
        host.stepping if rank_memory.streams_weights else OVERLAP_SHARE * compute - overlapped
    )
    copies = max(0.0, host.copies - overlap_seconds) + host.activations
    if on_cuda:  # activations are copied while blocks run
        blocks = graphs.count_blocks(rank_memory.stages)
        forward, both = (
            micro_batches * sum(count * seconds for seconds, count in counts)
            for counts in (
                [(block.forward, count) for block, count in blocks],
                [(sum(block.by_work.values()), count) for block, count in blocks],
            )
        )
        for busy in (forward, both - forward + recompute):
            copies -= min(busy, host.activations / 2)
    bubble = 0.0
    if isinstance(run.parallelism, MeshConfig) and rank_memory.pipeline_ranks > 1:
        stage = _stage_seconds(
            parts,
            len(rank_memory.stages),
            *(seconds / micro_batches for seconds in (compute, reference, sum(exposed.values()))),
        )
        bubble = run.accumulation * bubble_seconds(
            run.parallelism.pipeline_schedule,
            stage,
            rank_memory.pipeline_ranks,
            rank_memory.num_pipeline_micro_batches,
        )
    return StepTime(
        compute_by_work[OpWork.matmul] + compute_by_work[OpWork.matmul_fp8],
        compute_by_work[OpWork.attention],
        compute_by_work[OpWork.pointwise],
        recompute,
        optimizer,
        exposed,
        overlapped,
        bubble,
        _loader_seconds(run),
        copies,
        reference,
        overlapped * (1 - 1 / (1 + OVERLAP_SLOWDOWN)) * on_cuda,
    )


def _stage_seconds(
    parts: Sequence[tuple[GraphSeconds, int]],
    num_stages: int,
    compute: float,
    reference: float,
    communication: float,
) -> StageSeconds:
    """Return the mean times of a stage of a rank in one micro-batch.

    Args:
        parts: Times of the operator graphs of the rank, with their number of runs.
        num_stages: Number of stages of the rank.
        compute: Time of all passes of the rank; recomputation precedes its input gradients.
        reference: Time of its forward-only passes.
        communication: Time for which both forward and backward wait, half each.
    """
    forward = reference + sum(count * part.forward for part, count in parts)
    weights = sum(count * part.weight_gradients for part, count in parts)
    inputs = compute - forward - weights
    return StageSeconds(
        (forward + communication / 2) / num_stages,
        (inputs + communication / 2) / num_stages,
        weights / num_stages,
    )


def _rank_parts(graphs: ModelSeconds, rank_memory: RankMemory) -> list[tuple[GraphSeconds, int]]:
    """Return the times of the graphs that a rank runs in a forward pass, with their counts."""
    ends = graphs.ends if rank_memory.has_head else ()
    return [*graphs.count_blocks(rank_memory.stages), *((part, 1) for part in ends)]


def _reference_seconds(rank_memory: RankMemory, run: RunConfig, rates: DeviceRates) -> float:
    """Return the time of a forward pass of the model without its adapter, in seconds."""
    if not run.extra_forward_passes:
        return 0.0
    base_spec = replace(rank_memory.forward_spec, adapted_layers=())
    graphs = model_seconds(run.model, base_spec, rates)
    return sum(count * part.forward for part, count in _rank_parts(graphs, rank_memory))


def _loader_seconds(run: RunConfig) -> float:
    """Return the data loading time of a rank per step, in seconds."""
    rate = run.hardware.loader_tokens_per_s
    return run.tokens_per_step / run.parallelism.data_parallel_size / rate if rate else 0.0


def recompute_seconds(run: RunConfig, rates: DeviceRates) -> float:
    """Return the recomputation time of all blocks in one micro-batch, in seconds."""
    forward_spec = rank_memory_of(run).forward_spec
    seconds = model_seconds(run.model, forward_spec, rates)
    return seconds.recompute_seconds(run.memory, (StageSlice(range(run.model.layers)),))


def _collective_seconds(
    run: RunConfig, rank: int, compute_seconds: float
) -> tuple[dict[str, float], float]:
    """Return the time of collectives that do not overlap, by mesh axes, and of those that do.

    Collectives of parameters and gradients overlap with compute; those of activations do not.
    """
    exposed: dict[str, float] = {}
    overlappable: dict[str, float] = {}
    for group, collective, seconds in _list_collective_seconds(run, rank):
        seconds_by_axes = overlappable if collective.overlaps else exposed
        seconds_by_axes[group] = seconds_by_axes.get(group, 0.0) + seconds
    remaining = OVERLAP_SHARE * compute_seconds
    overlapped = 0.0
    for name, seconds in overlappable.items():
        overlap = min(seconds, remaining)
        remaining, overlapped = remaining - overlap, overlapped + overlap
        exposed[name] = exposed.get(name, 0.0) + seconds - overlap
    return {name: seconds for name, seconds in exposed.items() if seconds}, overlapped


def _list_collective_seconds(run: RunConfig, rank: int) -> Iterator[tuple[str, Collective, float]]:
    """Yield the collectives of a rank in a step, each with the name of its group and its time."""
    groups: dict[tuple[str, ...], tuple[str, int, int]] = {}
    for collective in list_collectives(run.parallelism, run, rank):
        axes = collective.axes
        if axes not in groups:
            size = run.parallelism.describe_group(axes, run.hardware.devices_per_node)
            groups[axes] = (_group_name(run.parallelism, axes), *size)
        name, ranks, ranks_per_node = groups[axes]
        seconds = _seconds_per_collective(run.hardware, collective, ranks, ranks_per_node)
        yield name, collective, collective.count * seconds


def _group_name(parallelism: ParallelismConfig, axes: tuple[str, ...]) -> str:
    """Return the name of the group along ``axes``: those with several ranks."""
    if set(axes) == set(AXES):
        return "the whole mesh"
    used_axes = [axis for axis in axes if parallelism.describe_group((axis,), None)[0] > 1]
    return " and ".join(used_axes or axes)


def _seconds_per_collective(
    hardware: Hardware, collective: Collective, ranks: int, ranks_per_node: int
) -> float:
    """Return the time of one collective over the links of its group, in seconds."""
    if ranks == 1 and collective.kind is not CollectiveKind.send:
        return 0.0
    link = ring_link(hardware, collective.kind, ranks, ranks_per_node)
    return link.seconds(collective.kind, ranks, collective.bytes)


@lru_cache(maxsize=4096)
def ring_link(
    hardware: Hardware, kind: CollectiveKind, ranks: int, ranks_per_node: int
) -> RingLink:
    """Return equal links that take as long as those of a group, which may span several nodes.

    Each device has a link to other nodes of its own. NCCL runs as many rings as there are ranks of
    the group in a node, and each ring leaves the node by another device; so a ring has one hop per
    node between nodes. An all-to-all has one round per other rank, over the link to that rank.
    Links that the profile lacks are infinitely fast.

    Args:
        hardware: Hardware profile.
        kind: Kind of the collective.
        ranks: Size of the group.
        ranks_per_node: Number of its ranks in one node.
    """
    latency, bandwidth = hardware.link_latency_us or 0.0, hardware.link_gb_per_s or float("inf")
    if ranks_per_node < ranks:
        node_latency = hardware.node_link_latency_us or latency
        node_bandwidth = hardware.node_link_gb_per_s or bandwidth
        hops = ranks - 1
        if kind is CollectiveKind.send:
            latency, bandwidth = node_latency, node_bandwidth
        elif kind is CollectiveKind.all_to_all:
            outside = (ranks - ranks_per_node) / hops
            latency += outside * (node_latency - latency)
            seconds_per_gb = (1 - outside) / bandwidth + outside / node_bandwidth
            bandwidth = 1 / seconds_per_gb if seconds_per_gb else bandwidth
        else:
            outside = min(ceil(ranks / ranks_per_node), hops) / hops
            latency += outside * (node_latency - latency)
            bandwidth = min(bandwidth, node_bandwidth * ranks_per_node)
    return RingLink(latency * MICRO, bandwidth * GIGA)
