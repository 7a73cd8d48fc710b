"""Several jobs of a sweep at once on one machine: ``hydra/launcher=packed``."""

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
    """As many jobs at once as there are devices, and memory, for.

    A slot is a GPU, or a share of the cores; a job has a slot for each rank to itself. A job starts
    only where the main memory that the ledger tells of is left.
    """

    def __init__(self, slots: int | None = None) -> None:
        if slots is not None and (not isinstance(slots, int) or slots < 1):
            raise ConfigError.for_key("hydra.launcher.slots", slots, "must be 1 or more, or null")
        self._slots = slots

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Yields each task with how it ended, as they end."""
        machine = this_machine()
        on_cuda = any(task.job_spec.run.hardware.device is DeviceKind.cuda for task in tasks)
        room = slot_scheduler.machine_slots(machine, self._slots, on_cuda=on_cuda)
        if on_cuda and len(room.slots) > len(machine.gpus):
            reason = f"is more than the {len(machine.gpus)} devices of this machine"
            raise ConfigError.for_key("hydra.launcher.slots", self._slots, reason, "leave it out")
        waiting: list[tuple[SweepTask, JobDemand]] = []
        for task in tasks:
            demand = slot_scheduler.job_demand(task.job_spec.run, room)
            if reason := slot_scheduler.rejection_reason(task.job_spec.run, demand, room):
                code = EXIT_CODES["refused"]
                yield task, Result("refused", reason, code, task.folder, {})
            else:
                waiting.append((task, demand))
        with SupervisorPool(preload_modules(tasks)) as pool, signals.forward_signals(pool.stop):
            yield from _run_job(waiting, room, on_cuda, pool, on_start)


def _run_job(
    waiting: list[tuple[SweepTask, JobDemand]],
    slot_capacity: SlotCapacity,
    on_cuda: bool,
    pool: SupervisorPool,
    on_start: StartCallback,
) -> Iterator[tuple[SweepTask, Result]]:
    slots, left = list(slot_capacity.slots), slot_capacity.memory
    taken: dict[int, tuple[list[int], int]] = {}
    told = False
    while pool.is_busy or (waiting and not pool.stop_signal):
        free = SlotCapacity(tuple(slots), left)
        place = slot_scheduler.next_to_start([demand for _, demand in waiting], free)
        if place is not None and not pool.stop_signal:
            task, demand = waiting.pop(place)
            own, slots = slots[: demand.slots], slots[demand.slots :]
            left -= demand.memory
            taken[task.number] = own, demand.memory
            try:
                on_start(task)
                pool.start(task, _slot_devices(own, len(slot_capacity.slots), on_cuda))
            except OSError as error:  # no process, pipe or disk space for it; others may find some
                own, memory = taken.pop(task.number)
                slots, left = sorted([*slots, *own]), left + memory
                yield task, failed_result(task, error)
            continue
        for task, result in pool.wait_for_results():
            own, memory = taken.pop(task.number)
            slots, left = sorted([*slots, *own]), left + memory
            told |= result.exit_code in INTERRUPTED
            yield task, result
    if waiting and not told:
        task, _ = waiting[0]
        reason = f"{signal.Signals(pool.stop_signal).name} before the job began"
        yield task, Result("interrupted", reason, 128 + pool.stop_signal, task.folder, {})


def _slot_devices(slots: Sequence[int], count: int, on_cuda: bool) -> ResourceAffinity:
    """Returns the devices of some of ``count`` slots, as the environment of this process names."""
    cores = sorted(os.sched_getaffinity(0))
    if not on_cuda:
        return ResourceAffinity(slot_scheduler.slot_cores(cores, slots, count), None)
    given = os.environ.get(VISIBLE_DEVICES)
    names = given.split(",") if given else [str(number) for number in range(count)]
    return ResourceAffinity(frozenset(cores), ",".join(names[slot].strip() for slot in slots))
