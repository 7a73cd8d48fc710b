"""Device of a rank: selection, memory limit, threads and NUMA node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scalewise.hardware import DeviceKind, launched_world_size
from scalewise.run_config import RunConfig
from scalewise.units import GIB


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process."""

    rank: int
    """Global rank."""
    local_rank: int
    """Rank within the node."""
    local_world_size: int
    """Number of ranks on the node."""


def set_device(run: RunConfig, rank_info: RankInfo) -> None:
    """Select the device of this process, its memory limit and its number of CPU threads."""
    torch.set_float32_matmul_precision(run.precision.matmul_precision)
    on_cuda = run.hardware.device is DeviceKind.cuda
    if on_cuda:
        torch.cuda.set_device(rank_info.local_rank)
        if (limit := run.launch.memory_limit_gib) is not None:
            total_bytes = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit * GIB / total_bytes))
        if launched_world_size() is not None:  # this process is only a rank
            _bind_to_numa_node(rank_info.local_rank)
    if run.world_size > 1 and not (on_cuda and "OMP_NUM_THREADS" in os.environ):
        torch.set_num_threads(max(1, torch.get_num_threads() // rank_info.local_world_size))


def _bind_to_numa_node(device: int) -> None:
    """Run this process on the cores next to a CUDA device, if some of its cores are."""
    cores = os.sched_getaffinity(0) & device_cores(device)
    if cores:
        os.sched_setaffinity(0, cores)


def device_cores(device: int, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Cores of the NUMA node of a CUDA device; empty if they are unknown."""
    properties: Any = torch.cuda.get_device_properties(device)  # untyped
    address = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        f":{properties.pci_device_id:02x}.0"
    )
    try:
        text = (devices / address / "local_cpulist").read_text(encoding="utf-8")
    except OSError:
        return set()
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
