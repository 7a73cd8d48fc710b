"""The ledger of one device: what each rank holds, joined with what its passes keep and make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalewise.planner.deepspeed_memory import DeepSpeedDeviceMemory
from scalewise.planner.device_memory import DeviceMemory
from scalewise.planner.memory_breakdown import MemoryBreakdown
from scalewise.planner.pipeline_peaks import iter_peak_moments

if TYPE_CHECKING:
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig


def device_breakdown(run: RunConfig, rank: int = 0) -> MemoryBreakdown:
    """Returns the ledger of one rank's device at the last micro batch of a step."""
    return breakdown_of(run, run.parallelism.rank_memory(run, rank))


def breakdown_of(run: RunConfig, rank_memory: RankMemory) -> MemoryBreakdown:
    """Returns the same of a rank that holds this."""
    kind = DeviceMemory if rank_memory.zero is None else DeepSpeedDeviceMemory
    devices = [kind(run, rank_memory, moment) for moment in iter_peak_moments(rank_memory)]
    ledgers = [
        MemoryBreakdown(tuple(line for line in device.iter_entries() if line.max_bytes))
        for device in devices
    ]
    return max(ledgers, key=lambda ledger: ledger.peak)


def worst_rank_breakdown(run: RunConfig) -> MemoryBreakdown:
    """Returns the ledger of the rank whose device is fullest."""
    ranks = run.parallelism.distinct_ranks(run)
    return max((device_breakdown(run, rank) for rank in ranks), key=lambda ledger: ledger.peak)
