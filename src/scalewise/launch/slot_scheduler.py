"""Slot scheduler of packed sweeps: resource demands of jobs and the order in which they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalewise.hardware import DeviceKind, Machine
from scalewise.planner import host_memory, worst_rank
from scalewise.run_config import RunConfig
from scalewise.units import GIB, format_bytes

SUPERVISOR_BYTES = int(0.5 * GIB)
"""Main memory of a supervisor and its forkserver, in bytes; measured with torch 2.13."""
CORES_PER_SLOT = 2
"""Cores per slot on the CPU if the number of slots is not set."""


@dataclass(frozen=True)
class JobDemand:
    """Resources that a job requires."""

    slots: int
    """Number of slots."""
    memory: int
    """Main memory, in bytes."""


@dataclass(frozen=True)
class SlotCapacity:
    """Total or free resources of a machine."""

    slots: tuple[int, ...]
    """Indices of the slots."""
    memory: int
    """Main memory, in bytes."""

    def can_fit(self, demand: JobDemand) -> bool:
        """Whether the resources suffice for a job."""
        return demand.slots <= len(self.slots) and demand.memory <= self.memory


def next_to_start(demands: Sequence[JobDemand], free_capacity: SlotCapacity) -> int | None:
    """Index of the first job that fits in the free resources; None without one.

    Smaller jobs may start before a job that does not fit yet.
    """
    return next(
        (index for index, demand in enumerate(demands) if free_capacity.can_fit(demand)), None
    )


def makespan(jobs: Sequence[tuple[JobDemand, float]], slot_capacity: SlotCapacity) -> float:
    """Time until the last job ends, in seconds, for jobs with given durations.

    Jobs start in the order of ``next_to_start``; jobs that never fit are ignored.
    """
    queue = [job for job in jobs if slot_capacity.can_fit(job[0])]
    running_jobs: list[tuple[float, JobDemand]] = []
    time, slots, memory = 0.0, len(slot_capacity.slots), slot_capacity.memory
    while queue or running_jobs:
        free_capacity = SlotCapacity(slot_capacity.slots[:slots], memory)
        index = next_to_start([demand for demand, _ in queue], free_capacity)
        if index is None:
            finished_job = min(running_jobs, key=lambda job: job[0])
            running_jobs.remove(finished_job)
            time, slots, memory = (
                finished_job[0],
                slots + finished_job[1].slots,
                memory + finished_job[1].memory,
            )
            continue
        demand, seconds = queue.pop(index)
        running_jobs.append((time + seconds, demand))
        slots, memory = slots - demand.slots, memory - demand.memory
    return time


def machine_slots(machine: Machine, slots: int | None, *, on_cuda: bool) -> SlotCapacity:
    """Slots of the machine: its GPUs, or groups of its cores."""
    default_slots = len(machine.gpus) if on_cuda else max(1, machine.cores // CORES_PER_SLOT)
    return SlotCapacity(tuple(range(slots or default_slots)), machine.memory_bytes)


def job_demand(run: RunConfig, slot_capacity: SlotCapacity) -> JobDemand:
    """Demand of a run: one slot per rank, limited on the CPU to the number of slots."""
    if run.objective.trace_only:  # its memory is not predicted
        return JobDemand(min(run.world_size, len(slot_capacity.slots)), SUPERVISOR_BYTES)
    node_bytes = host_memory.node_memory(run).peak + SUPERVISOR_BYTES
    if run.hardware.device is DeviceKind.cuda:
        return JobDemand(run.world_size, node_bytes)
    rank_bytes = worst_rank.worst_rank_breakdown(run).peak
    if (limit := run.launch.memory_limit_gib) is not None:
        rank_bytes = min(rank_bytes, int(limit * GIB))
    return JobDemand(
        min(run.world_size, len(slot_capacity.slots)), run.world_size * rank_bytes + node_bytes
    )


def rejection_reason(run: RunConfig, demand: JobDemand, slot_capacity: SlotCapacity) -> str:
    """Reason why a job can never start; empty if it can."""
    if demand.slots > len(slot_capacity.slots):
        return f"requires {demand.slots} slots; {len(slot_capacity.slots)} are available"
    if demand.memory > slot_capacity.memory:
        required_text = format_bytes(demand.memory)
        available_text = format_bytes(slot_capacity.memory)
        return f"requires {required_text} of main memory; this machine has {available_text}"
    capacity = run.hardware.memory_gib
    is_predicted = not run.objective.trace_only
    if is_predicted and run.hardware.device is DeviceKind.cuda and capacity is not None:
        peak = worst_rank.worst_rank_breakdown(run).peak + int(run.hardware.context_gib * GIB)
        if peak > capacity * GIB:
            return (
                f"requires {format_bytes(peak)} of device memory; the device has {capacity:g} GiB"
            )
    return ""


def slot_cores(cores: Sequence[int], slots: Sequence[int], count: int) -> frozenset[int]:
    """Cores of some of ``count`` slots; slots share cores if there are fewer cores than slots."""
    selected_cores: set[int] = set()
    for slot in slots:
        first, last = slot * len(cores) // count, (slot + 1) * len(cores) // count
        selected_cores.update(cores[first:last] or [cores[first]])
    return frozenset(selected_cores)
