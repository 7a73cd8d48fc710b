"""Memory breakdown of a rank's device at its peak."""

from __future__ import annotations

from dataclasses import replace

from scalewise.planner.device_memory import DeviceMemory
from scalewise.planner.memory_breakdown import MemoryBreakdown
from scalewise.planner.rank_memory import RankMemory, rank_memory_of
from scalewise.planner.rank_partition import list_distinct_ranks
from scalewise.planner.rank_step import peak_points, state_configs
from scalewise.planner.split_backward_memory import SplitBackwardMemory
from scalewise.run_config import RunConfig


def device_breakdown(run: RunConfig, rank: int = 0) -> MemoryBreakdown:
    """Return the memory breakdown of one rank at the last micro-batch of a step."""
    return breakdown_of(run, rank_memory_of(run, rank))


def breakdown_of(run: RunConfig, rank_memory: RankMemory) -> MemoryBreakdown:
    """Return the memory breakdown of a rank with this partition, at its highest peak."""
    return _device_at_peak(run, rank_memory).breakdown


def peak_of(run: RunConfig, rank_memory: RankMemory) -> int:
    """Return the highest peak of a rank with this partition, in bytes."""
    return _device_at_peak(run, rank_memory).peak


def unbalanced_peak(run: RunConfig, load: float) -> int:
    """Return the peak of a rank whose experts receive ``load`` times the mean load, in bytes."""
    return max(
        peak_of(run, replace(it, forward_spec=replace(it.forward_spec, expert_load=load)))
        for it in _distinct_rank_memories(run)
    )


def worst_rank_breakdown(run: RunConfig) -> MemoryBreakdown:
    """Return the memory breakdown of the rank with the highest peak."""
    devices = (_device_at_peak(run, it) for it in _distinct_rank_memories(run))
    return max(devices, key=lambda it: it.peak).breakdown


def _distinct_rank_memories(run: RunConfig) -> list[RankMemory]:
    ranks = list_distinct_ranks(run.parallelism, run)
    return [rank_memory_of(run, rank) for rank in ranks]


def _device_at_peak(run: RunConfig, rank_memory: RankMemory) -> DeviceMemory | SplitBackwardMemory:
    """Return a rank at the point of a step with its highest peak."""
    configs = state_configs(run, rank_memory.forward_spec)
    if rank_memory.split_schedule is not None:
        return SplitBackwardMemory(run, rank_memory, rank_memory.split_schedule, configs)
    points = peak_points(rank_memory)
    devices = (DeviceMemory(run, rank_memory, configs, point) for point in points)
    return max(devices, key=lambda it: it.peak)
