"""Executor that runs several jobs on one machine: ``hydra/launcher=packed``.

A job starts when enough slots and its predicted main memory are free.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scalewise.errors import EXIT_CODES, ConfigError
from scalewise.hardware import DeviceKind, Machine, this_machine
from scalewise.launch import signals
from scalewise.launch.executor import (
    INTERRUPTED,
    StartCallback,
    SweepTask,
    failed_result,
    preload_modules,
)
from scalewise.launch.job import Result
from scalewise.launch.processes import VISIBLE_DEVICES, ResourceAffinity
from scalewise.launch.supervisor import SupervisorPool
from scalewise.planner import host_memory, peak_memory
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
    rank_bytes = peak_memory.worst_rank_breakdown(run).peak
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
        peak = peak_memory.worst_rank_breakdown(run).peak + int(run.hardware.context_gib * GIB)
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


class PackedExecutor:
    """Runs as many jobs concurrently as fit on the devices and in main memory.

    A slot is a GPU or a set of cores. Each rank of a job has its own slot. A job starts when its
    predicted main memory is free.
    """

    def __init__(self, slots: int | None = None) -> None:
        if slots is not None and (not isinstance(slots, int) or slots < 1):
            raise ConfigError.for_key("hydra.launcher.slots", slots, "must be 1 or more, or null")
        self._slots = slots

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Run the jobs and yield each task with its result as it ends."""
        machine = this_machine()
        on_cuda = any(task.job_spec.run.hardware.device is DeviceKind.cuda for task in tasks)
        slot_capacity = machine_slots(machine, self._slots, on_cuda=on_cuda)
        if on_cuda and len(slot_capacity.slots) > len(machine.gpus):
            reason = f"exceeds the {len(machine.gpus)} devices of this machine"
            raise ConfigError.for_key("hydra.launcher.slots", self._slots, reason, "remove it")
        queue: list[tuple[SweepTask, JobDemand]] = []
        for task in tasks:
            demand = job_demand(task.job_spec.run, slot_capacity)
            if reason := rejection_reason(task.job_spec.run, demand, slot_capacity):
                code = EXIT_CODES["refused"]
                yield task, Result("refused", reason, code, task.folder, {})
            else:
                queue.append((task, demand))
        with SupervisorPool(preload_modules(tasks)) as pool, signals.forward_signals(pool.stop):
            yield from _run_jobs(queue, slot_capacity, on_cuda, pool, on_start)


def _run_jobs(
    queue: list[tuple[SweepTask, JobDemand]],
    slot_capacity: SlotCapacity,
    on_cuda: bool,
    pool: SupervisorPool,
    on_start: StartCallback,
) -> Iterator[tuple[SweepTask, Result]]:
    free_slots, free_memory = list(slot_capacity.slots), slot_capacity.memory
    allocations: dict[int, tuple[list[int], int]] = {}
    is_reported = False
    while pool.is_busy or (queue and not pool.stop_signal):
        free_capacity = SlotCapacity(tuple(free_slots), free_memory)
        index = next_to_start([demand for _, demand in queue], free_capacity)
        if index is not None and not pool.stop_signal:
            task, demand = queue.pop(index)
            job_slots, free_slots = free_slots[: demand.slots], free_slots[demand.slots :]
            free_memory -= demand.memory
            allocations[task.number] = job_slots, demand.memory
            try:
                on_start(task)
                pool.start(task, _slot_devices(job_slots, len(slot_capacity.slots), on_cuda))
            except OSError as error:  # no process, pipe or disk space; other jobs may start
                job_slots, memory = allocations.pop(task.number)
                free_slots, free_memory = sorted([*free_slots, *job_slots]), free_memory + memory
                yield task, failed_result(task, error)
            continue
        for task, result in pool.wait_for_results():
            job_slots, memory = allocations.pop(task.number)
            free_slots, free_memory = sorted([*free_slots, *job_slots]), free_memory + memory
            is_reported |= result.exit_code in INTERRUPTED
            yield task, result
    if queue and not is_reported:
        task, _ = queue[0]
        reason = f"{signal.Signals(pool.stop_signal).name} before the job began"
        yield task, Result("interrupted", reason, 128 + pool.stop_signal, task.folder, {})


def _slot_devices(slots: Sequence[int], count: int, on_cuda: bool) -> ResourceAffinity:
    """Cores and visible devices of some of ``count`` slots, from those of this process."""
    cores = sorted(os.sched_getaffinity(0))
    if not on_cuda:
        return ResourceAffinity(slot_cores(cores, slots, count), None)
    devices = os.environ.get(VISIBLE_DEVICES)
    names = devices.split(",") if devices else [str(number) for number in range(count)]
    return ResourceAffinity(frozenset(cores), ",".join(names[slot].strip() for slot in slots))
