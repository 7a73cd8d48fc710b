"""Memory limit, threads and NUMA node of a rank on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scalewise.hardware import DeviceKind
from scalewise.launch_config import Launch
from scalewise.run_config import RunConfig
from scalewise.training import device_setup
from scalewise.training.device_setup import RankInfo, device_cores, set_device
from scalewise.units import GIB


@pytest.mark.parametrize(("limit", "fractions"), [(80.0, [0.5]), (200.0, [1.0]), (None, [])])
def test_memory_limit_is_passed_to_torch_as_a_fraction(
    limit: float | None,
    fractions: list[float],
    compose: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 160 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fractions.append)
    run = compose("experiment=smoke")
    run = replace(
        run,
        hardware=replace(run.hardware, device=DeviceKind.cuda),
        launch=Launch(memory_limit_gib=limit),
    )
    set_device(run, RankInfo(rank=0, local_rank=0, local_world_size=1))
    assert set_fractions == fractions


@pytest.mark.parametrize(("user_threads", "threads"), [(None, [4]), ("3", [])])
def test_ranks_share_the_cores_of_a_cuda_host(
    user_threads: str | None,
    threads: list[int],
    compose: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_threads: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if user_threads:
        monkeypatch.setenv("OMP_NUM_THREADS", user_threads)
    run = compose("experiment=smoke", "parallelism=ddp")
    run = replace(run, hardware=replace(run.hardware, device=DeviceKind.cuda))
    assert run.world_size == 2
    set_device(run, RankInfo(rank=0, local_rank=0, local_world_size=2))
    assert set_threads == threads


def test_device_cores_are_those_of_its_numa_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_cores(3, tmp_path) == set()
    file = tmp_path / "0000:1b:00.0" / "local_cpulist"
    file.parent.mkdir()
    file.write_text("0-3,8,10-11\n")
    assert device_cores(3, tmp_path) == {0, 1, 2, 3, 8, 10, 11}


def test_rank_runs_on_the_cores_next_to_its_device(
    compose: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(device_setup, "launched_world_size", lambda: 1)
    monkeypatch.setattr(device_setup, "device_cores", lambda device: {2, 3, 4, 5}, raising=True)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: bound.append(cores))
    run = compose("experiment=smoke")
    run = replace(run, hardware=replace(run.hardware, device=DeviceKind.cuda))
    set_device(run, RankInfo(rank=0, local_rank=0, local_world_size=1))
    assert bound == [{2, 3}]
