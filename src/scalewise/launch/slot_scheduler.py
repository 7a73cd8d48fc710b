"""What of a machine each job of a sweep takes, and which job may start in what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalewise.hardware import DeviceKind, Machine
from scalewise.planner import host_memory, worst_rank
from scalewise.run_config import RunConfig
from scalewise.units import GIB, format_bytes

SUPERVISOR_BYTES = int(0.5 * GIB)
"""Main memory of a supervisor and its fork server, as measured with torch 2.13."""
CORES_A_SLOT = 2
"""Cores of a slot on the CPU, where the number of slots is not given."""


@dataclass(frozen=True)
class JobDemand:
    """What one job takes."""

    slots: int
    memory: int
    """Main memory, bytes."""


@dataclass(frozen=True)
class SlotCapacity:
    """What is there, or what of it is free."""

    slots: tuple[int, ...]
    memory: int
    """Main memory, bytes."""

    def can_fit(self, demand: JobDemand) -> bool:
        """Returns whether a job may start here."""
        return demand.slots <= len(self.slots) and demand.memory <= self.memory


def next_to_start(waiting: Sequence[JobDemand], free: SlotCapacity) -> int | None:
    """Returns the place of the first job that fits in what is free; None where none does.

    A job that needs more than is free just now is overtaken, and starts when those are done.
    """
    return next((place for place, demand in enumerate(waiting) if free.can_fit(demand)), None)


def makespan(jobs: Sequence[tuple[JobDemand, float]], slot_capacity: SlotCapacity) -> float:
    """Returns the seconds until the last job ends, each given with its own seconds.

    Jobs start as ``next_to_start`` has it; those that never fit are left out.
    """
    waiting = [job for job in jobs if slot_capacity.can_fit(job[0])]
    running: list[tuple[float, JobDemand]] = []
    now, slots, memory = 0.0, len(slot_capacity.slots), slot_capacity.memory
    while waiting or running:
        free = SlotCapacity(slot_capacity.slots[:slots], memory)
        place = next_to_start([demand for demand, _ in waiting], free)
        if place is None:
            ended = min(running, key=lambda job: job[0])
            running.remove(ended)
            now, slots, memory = ended[0], slots + ended[1].slots, memory + ended[1].memory
            continue
        demand, seconds = waiting.pop(place)
        running.append((now + seconds, demand))
        slots, memory = slots - demand.slots, memory - demand.memory
    return now


def machine_slots(machine: Machine, slots: int | None, *, on_cuda: bool) -> SlotCapacity:
    """Returns the whole machine as slots: its GPUs, or shares of its cores."""
    most = len(machine.gpus) if on_cuda else max(1, machine.cores // CORES_A_SLOT)
    return SlotCapacity(tuple(range(slots or most)), machine.memory_bytes)


def job_demand(run: RunConfig, slot_capacity: SlotCapacity) -> JobDemand:
    """Returns what a run takes: a slot for each of its ranks, on the CPU all slots at the most."""
    if run.objective.trace_only:  # what it takes is not known before
        return JobDemand(min(run.world_size, len(slot_capacity.slots)), SUPERVISOR_BYTES)
    besides = host_memory.node_memory(run).peak + SUPERVISOR_BYTES
    if run.hardware.device is DeviceKind.cuda:
        return JobDemand(run.world_size, besides)
    each = worst_rank.worst_rank_breakdown(run).peak
    if (limit := run.launch.memory_limit_gib) is not None:
        each = min(each, int(limit * GIB))
    return JobDemand(min(run.world_size, len(slot_capacity.slots)), run.world_size * each + besides)


def rejection_reason(run: RunConfig, demand: JobDemand, slot_capacity: SlotCapacity) -> str:
    """Returns why a job can never start in a room; empty where it can."""
    if demand.slots > len(slot_capacity.slots):
        return f"needs {demand.slots} devices of {len(slot_capacity.slots)} slots"
    if demand.memory > slot_capacity.memory:
        needed, there = format_bytes(demand.memory), format_bytes(slot_capacity.memory)
        return f"needs {needed} of main memory; this machine has {there}"
    capacity = run.hardware.memory_gib
    known = not run.objective.trace_only
    if known and run.hardware.device is DeviceKind.cuda and capacity is not None:
        peak = worst_rank.worst_rank_breakdown(run).peak + int(run.hardware.context_gib * GIB)
        if peak > capacity * GIB:
            return f"needs {format_bytes(peak)} of a device that has {capacity:g} GiB"
    return ""


def slot_cores(cores: Sequence[int], slots: Sequence[int], count: int) -> frozenset[int]:
    """Returns the cores of some of ``count`` slots: each has its own, unless they are too few."""
    own: set[int] = set()
    for slot in slots:
        first, last = slot * len(cores) // count, (slot + 1) * len(cores) // count
        own.update(cores[first:last] or [cores[first]])
    return frozenset(own)
