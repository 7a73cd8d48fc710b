"""Memory breakdown of a rank's device at its peak."""

from __future__ import annotations

from dataclasses import replace

from scalewise.planner.deepspeed_memory import DeepSpeedDeviceMemory
from scalewise.planner.device_memory import DeviceMemory
from scalewise.planner.memory_breakdown import MemoryBreakdown
from scalewise.planner.rank_memory import RankMemory, build_rank_memory
from scalewise.planner.rank_partition import list_distinct_ranks
from scalewise.planner.rank_step import iter_peak_points
from scalewise.run_config import RunConfig


def device_breakdown(run: RunConfig, rank: int = 0) -> MemoryBreakdown:
    """Return the memory breakdown of one rank at the last micro-batch of a step."""
    return breakdown_of(run, build_rank_memory(run.parallelism, run, rank))


def breakdown_of(run: RunConfig, rank_memory: RankMemory) -> MemoryBreakdown:
    """Return the memory breakdown of a rank with this partition, at its highest peak."""
    kind = DeviceMemory if rank_memory.zero is None else DeepSpeedDeviceMemory
    devices = [kind(run, rank_memory, point) for point in iter_peak_points(rank_memory)]
    breakdowns = [
        MemoryBreakdown(tuple(entry for entry in device.iter_entries() if entry.max_bytes))
        for device in devices
    ]
    return max(breakdowns, key=lambda breakdown: breakdown.peak)


def unbalanced_peak(run: RunConfig, load: float) -> int:
    """Return the peak of a rank whose experts receive ``load`` times the mean load, in bytes."""
    ranks = list_distinct_ranks(run.parallelism, run)
    partitions = [build_rank_memory(run.parallelism, run, rank) for rank in ranks]
    return max(
        breakdown_of(run, replace(it, forward_spec=replace(it.forward_spec, expert_load=load))).peak
        for it in partitions
    )


def worst_rank_breakdown(run: RunConfig) -> MemoryBreakdown:
    """Return the memory breakdown of the rank with the highest peak."""
    ranks = list_distinct_ranks(run.parallelism, run)
    return max((device_breakdown(run, rank) for rank in ranks), key=lambda it: it.peak)
