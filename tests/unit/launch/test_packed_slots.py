"""The scheduler of packed sweeps: job order, slots and rejections."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scalewise.errors import ConfigError
from scalewise.hardware import Machine
from scalewise.launch import executor, packed_executor
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import JobSpec
from scalewise.launch.packed_executor import (
    JobDemand,
    SlotCapacity,
    job_demand,
    machine_slots,
    makespan,
    next_to_start,
    rejection_reason,
    slot_cores,
)
from scalewise.planner import peak_memory
from scalewise.run_config import RunConfig
from scalewise.units import GIB

Compose = Callable[..., RunConfig]
GPUS = Machine(("NVIDIA H100",) * 8, "a processor", 64, 512 * GIB)
CORES = Machine((), "a processor", 8, 32 * GIB)


@pytest.mark.parametrize(
    ("demands", "slots", "free", "expected"),
    [
        ([], 2, 8, None),
        ([(1, 4), (1, 4)], 2, 8, 0),
        ([(1, 9), (1, 4)], 2, 8, 1),
        ([(3, 1), (2, 1)], 2, 8, 1),
        ([(1, 9), (3, 1)], 2, 8, None),
        ([(1, 8)], 1, 8, 0),
        ([(1, 1)], 0, 8, None),
    ],
)
def test_scheduler_starts_the_first_job_that_fits(
    demands: list[tuple[int, int]], slots: int, free: int, expected: int | None
) -> None:
    capacity = SlotCapacity(tuple(range(slots)), free)
    assert next_to_start([JobDemand(*demand) for demand in demands], capacity) == expected


@pytest.mark.parametrize(
    ("jobs", "slots", "memory", "seconds"),
    [
        ([], 2, 8, 0),
        ([(1, 1, 5)], 2, 8, 5),
        ([(1, 1, 5), (1, 1, 3), (1, 1, 2)], 2, 8, 5),
        ([(1, 1, 5), (1, 1, 3), (1, 1, 2)], 1, 8, 10),
        ([(1, 5, 5), (1, 5, 3), (1, 1, 2)], 2, 8, 8),
        ([(2, 1, 4), (1, 1, 3), (1, 1, 3)], 2, 8, 7),
        ([(3, 1, 4), (1, 9, 3), (1, 1, 1)], 2, 8, 1),
    ],
)
def test_scheduler_estimates_the_sweep_time(
    jobs: list[tuple[int, int, float]], slots: int, memory: int, seconds: float
) -> None:
    capacity = SlotCapacity(tuple(range(slots)), memory)
    assert makespan([(JobDemand(s, m), time) for s, m, time in jobs], capacity) == seconds


def test_slots_are_devices_or_core_pairs() -> None:
    assert len(machine_slots(GPUS, None, on_cuda=True).slots) == 8
    assert len(machine_slots(GPUS, 3, on_cuda=True).slots) == 3
    assert machine_slots(CORES, None, on_cuda=False) == SlotCapacity((0, 1, 2, 3), 32 * GIB)
    assert len(machine_slots(Machine((), "", 1, GIB), None, on_cuda=False).slots) == 1


@pytest.mark.parametrize(("cores", "count"), [(8, 4), (7, 3), (2, 2), (1, 1)])
def test_slots_divide_the_cores(cores: int, count: int) -> None:
    cores_by_slot = [slot_cores(range(cores), [slot], count) for slot in range(count)]
    assert sorted(itertools.chain(*cores_by_slot)) == list(range(cores))
    assert slot_cores(range(cores), range(count), count) == set(range(cores))


def test_slots_beyond_cores_share_cores() -> None:
    assert {len(slot_cores([4, 5], [slot], 6)) for slot in range(6)} == {1}
    assert set().union(*(slot_cores([4, 5], [slot], 6) for slot in range(6))) == {4, 5}


class TestDemand:
    CAPACITY = SlotCapacity((0, 1), 32 * GIB)

    def test_job_demand_on_cpu_is_the_memory_of_all_ranks(self, compose: Compose) -> None:
        single_run = compose("model=llama_160m", "hardware=cpu")
        ddp_run = compose("model=llama_160m", "hardware=cpu", "parallelism=ddp")
        assert job_demand(single_run, self.CAPACITY).slots == 1
        assert job_demand(ddp_run, self.CAPACITY).slots == 2
        overhead_bytes = [
            job_demand(r, self.CAPACITY).memory - r.world_size * self.peak(r)
            for r in (single_run, ddp_run)
        ]
        assert overhead_bytes[0] == pytest.approx(0.9 * GIB, rel=0.01)
        assert overhead_bytes[1] == pytest.approx(1.3 * GIB, rel=0.01)

    def peak(self, run: RunConfig) -> int:
        return peak_memory.worst_rank_breakdown(run).peak

    def test_job_demand_is_bounded_by_the_memory_limit(self, compose: Compose) -> None:
        unlimited_run = compose("model=llama_160m", "hardware=cpu")
        limited_run = compose("model=llama_160m", "hardware=cpu", "launch.memory_limit_gib=1")
        saved_bytes = (
            job_demand(unlimited_run, self.CAPACITY).memory
            - job_demand(limited_run, self.CAPACITY).memory
        )
        assert saved_bytes == self.peak(unlimited_run) - GIB > 0

    def test_job_demand_on_gpu_counts_host_processes(self, compose: Compose) -> None:
        run = compose("model=llama_160m", "hardware=h100", "parallelism=ddp", check_machine=False)
        demand = job_demand(run, self.CAPACITY)
        assert demand.slots == run.world_size
        assert demand.memory < (3.2 * run.world_size + 0.6) * GIB

    def test_job_demand_that_never_fits_is_explained(self, compose: Compose) -> None:
        fits = compose("hardware=cpu")
        assert rejection_reason(fits, job_demand(fits, self.CAPACITY), self.CAPACITY) == ""
        large_run = compose("model=llama3_8b", "hardware=cpu")
        reason = rejection_reason(large_run, job_demand(large_run, self.CAPACITY), self.CAPACITY)
        assert "of main memory; this machine has 32.00 GiB" in reason
        wide_run = compose(
            "hardware=h100", "parallelism=ddp", "parallelism.replicas=4", check_machine=False
        )
        assert (
            rejection_reason(wide_run, job_demand(wide_run, self.CAPACITY), self.CAPACITY)
            == "requires 4 slots; 2 are available"
        )
        heavy_run = compose("model=llama3_70b", "hardware=h100", check_machine=False)
        assert "of device memory; the device has 80 GiB" in rejection_reason(
            heavy_run, JobDemand(1, 1), self.CAPACITY
        )


def test_job_that_never_fits_is_rejected_before_any_start(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_executor, "this_machine", lambda: Machine((), "", 2, GIB))
    task = SweepTask(3, JobSpec(compose("hardware=cpu")), tmp_path / "3")
    ((rejected_task, result),) = executor.build_executor({"engine": "packed"}).iter_results(
        [task], lambda _: None
    )
    assert rejected_task == task
    assert (result.status, result.exit_code) == ("refused", 2)
    assert "this machine has 1.00 GiB" in result.reason
    assert not task.folder.exists()


@pytest.mark.parametrize("slots", [0, -1, "two", 1.5])
def test_slot_count_is_validated(slots: object) -> None:
    with pytest.raises(ConfigError, match=r"hydra.launcher.slots=.*: must be 1"):
        executor.build_executor({"engine": "packed", "slots": slots})


@pytest.mark.parametrize(("visible_devices", "expected_gpus"), [(None, "1,2"), ("4, 6,7", "6,7")])
def test_slots_use_visible_devices(
    visible_devices: str | None, expected_gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible_devices:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
    affinity = packed_executor._slot_devices([1, 2], 3, on_cuda=True)
    assert affinity.gpus == expected_gpus
    assert affinity.cores == os.sched_getaffinity(0)
