"""Executor that runs several jobs on one machine: ``hydra/launcher=packed``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

from scalewise.errors import EXIT_CODES, ConfigError
from scalewise.hardware import DeviceKind, this_machine
from scalewise.launch import signals, slot_scheduler
from scalewise.launch.executor import (
    INTERRUPTED,
    StartCallback,
    SweepTask,
    failed_result,
    preload_modules,
)
from scalewise.launch.job import Result
from scalewise.launch.resource_affinity import VISIBLE_DEVICES, ResourceAffinity
from scalewise.launch.slot_scheduler import JobDemand, SlotCapacity
from scalewise.launch.supervisor_pool import SupervisorPool


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
        slot_capacity = slot_scheduler.machine_slots(machine, self._slots, on_cuda=on_cuda)
        if on_cuda and len(slot_capacity.slots) > len(machine.gpus):
            reason = f"exceeds the {len(machine.gpus)} devices of this machine"
            raise ConfigError.for_key("hydra.launcher.slots", self._slots, reason, "remove it")
        queue: list[tuple[SweepTask, JobDemand]] = []
        for task in tasks:
            demand = slot_scheduler.job_demand(task.job_spec.run, slot_capacity)
            if reason := slot_scheduler.rejection_reason(task.job_spec.run, demand, slot_capacity):
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
        index = slot_scheduler.next_to_start([demand for _, demand in queue], free_capacity)
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
        return ResourceAffinity(slot_scheduler.slot_cores(cores, slots, count), None)
    devices = os.environ.get(VISIBLE_DEVICES)
    names = devices.split(",") if devices else [str(number) for number in range(count)]
    return ResourceAffinity(frozenset(cores), ",".join(names[slot].strip() for slot in slots))
