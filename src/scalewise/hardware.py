"""Hardware profiles (memory, peak FLOP rates, bandwidths) and detection of this machine."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from scalewise.errors import ConfigIssue
from scalewise.processor import BUILT_IN_CPU_FIGURES, CORE_GB_PER_S, processor_tflops
from scalewise.registry import register_option
from scalewise.units import GIB, MIB, TERA

CPU_RANKS_PER_CORE = 4
"""Maximum number of CPU ranks per core; more ranks only wait for each other."""
BUILT_IN = "built-in figures of a processor with these cores and this clock"
"""Value of ``Hardware.read_off`` for a CPU that was not measured."""
UNKNOWN_GPU = "NVIDIA GPU"
DEVICE_FILES = Path("/dev")


class DeviceKind(StrEnum):
    """Device type. ``auto``: CUDA if a device is present, else the CPU."""

    auto = "auto"
    """CUDA if a device is present, else the CPU."""
    cpu = "cpu"
    """The processor of this machine."""
    cuda = "cuda"
    """NVIDIA GPUs."""


@register_option("hardware", "device")
@dataclass(frozen=True)
class Hardware:
    """One device type and its node. null: unknown; of a CPU, from its cores, clock and flags."""

    device: DeviceKind = DeviceKind.auto
    """Device type."""
    match: str = ""
    """Part of the device name that the driver reports, such as ``H100``."""
    memory_gib: float | None = None
    """Memory of one device, in GiB."""
    fp32_tflops: float | None = None
    """Peak fp32 rate without tensor cores, in TFLOP/s."""
    tf32_tflops: float | None = None
    """Peak dense TF32 rate, in TFLOP/s."""
    bf16_tflops: float | None = None
    """Peak dense bf16 rate, in TFLOP/s; 0 if the device has none."""
    fp16_tflops: float | None = None
    """Peak dense fp16 rate, in TFLOP/s."""
    fp8_tflops: float | None = None
    """Peak dense fp8 rate, in TFLOP/s; 0 if the device has none."""
    memory_gb_per_s: float | None = None
    """Memory bandwidth of one device, in GB/s."""
    link_gb_per_s: float | None = None
    """Bandwidth between two devices of a node in one direction, in GB/s."""
    link_latency_us: float | None = None
    """Latency of an empty message between two devices of a node, in microseconds."""
    devices_per_node: int | None = None
    """Number of devices per node; null: those of this machine."""
    nodes: int = 1
    """Number of nodes."""
    node_link_gb_per_s: float | None = None
    """Bandwidth from one device to another node in one direction, in GB/s; null: as
    within a node."""
    node_link_latency_us: float | None = None
    """Latency of an empty message between two nodes, in microseconds; null: as within a node."""
    host_memory_gib: float | None = None
    """Main memory of one node, in GiB; null: not checked. ``auto`` takes that of this machine."""
    host_link_gb_per_s: float | None = None
    """Bandwidth between a device and its host in one direction, in GB/s."""
    host_memory_gb_per_s: float | None = None
    """Main memory bandwidth of one node, in GB/s."""
    context_gib: float = 0.0
    """Device memory that the driver and the communication library take, in GiB."""
    matmul_workspace_mib: float = 0.0
    """Workspaces of cuBLAS and cuBLASLt on a CUDA device, in MiB, kept from the first matmuls
    on; 0: unknown."""
    product_share: float = 0.8
    """Fraction of the peak rate that large matmuls reach."""
    fp32_reached_tflops: float | None = None
    """Measured rate of large fp32 matmuls, in TFLOP/s; null: from ``product_share``."""
    tf32_reached_tflops: float | None = None
    """Measured rate of large TF32 matmuls, in TFLOP/s; null: from ``product_share``."""
    bf16_reached_tflops: float | None = None
    """Measured rate of large bf16 matmuls, in TFLOP/s; null: from ``product_share``."""
    fp16_reached_tflops: float | None = None
    """Measured rate of large fp16 matmuls, in TFLOP/s; null: from ``product_share``."""
    fp8_reached_tflops: float | None = None
    """Measured rate of large fp8 matmuls, in TFLOP/s; null: from ``product_share``."""
    attention_share: float = 0.45
    """Fraction of the peak rate that fused attention reaches."""
    bandwidth_share: float = 0.85
    """Fraction of the memory bandwidth that pointwise operators reach."""
    launch_us: float = 0.0
    """Time to launch one operator, in microseconds; no operator takes less."""
    loader_tokens_per_s: float | None = None
    """Throughput of one rank's data loader, in tokens/s; null: loading takes no time."""
    disk_gb_per_s: float | None = None
    """Write bandwidth for checkpoints, in GB/s."""
    step_scale: float = 1.0
    """Measured step time divided by the prediction of the other figures, as learned from runs."""
    step_shortest: float = 0.8
    """Shortest step time, relative to the prediction; a guess until runs are measured."""
    step_longest: float = 1.4
    """Longest step time, relative to the prediction; a guess until runs are measured."""
    dollars_per_hour: float | None = None
    """Price of one device, in US dollars per hour."""
    watts: float | None = None
    """Power of one device under load with its share of the node, in watts."""
    read_off: str = ""
    """Source of the figures that ``auto`` uses for a CUDA device, or a CPU that was not measured;
    empty for every other profile."""

    @property
    def total_devices(self) -> int | None:
        """Devices of all nodes; None: the devices of this machine."""
        return None if self.devices_per_node is None else self.nodes * self.devices_per_node

    def peak_flops(self, precision: str) -> float | None:
        """Peak rate of fp32, tf32, bf16, fp16 or fp8, in FLOP/s; None: unknown."""
        tflops = getattr(self, f"{precision}_tflops")
        return tflops * TERA if tflops else None

    @property
    def matmul_workspace_bytes(self) -> int:
        """Size of the workspaces of cuBLAS and cuBLASLt, in bytes; 0 except on CUDA."""
        return int(self.matmul_workspace_mib * MIB) if self.device is DeviceKind.cuda else 0

    @property
    def emulates_bf16(self) -> bool:
        """Whether bf16 matmuls are slower than fp32, as on processors without bf16 instructions."""
        bf16, fp32 = self.peak_flops("bf16"), self.peak_flops("fp32")
        return bf16 is not None and fp32 is not None and bf16 < fp32

    def matmul_flops(self, precision: str) -> float | None:
        """Rate that large matmuls reach, in FLOP/s; None: unknown."""
        measured, peak = getattr(self, f"{precision}_reached_tflops"), self.peak_flops(precision)
        if measured:
            return float(measured) * TERA
        return peak * self.product_share if peak else None

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues for figures out of range."""
        for key in _POSITIVE:
            value = getattr(self, key)
            if value is not None and value <= 0:
                yield ConfigIssue(f"hardware.{key}", value, "must be positive")
        for key in _NOT_NEGATIVE:
            if (value := getattr(self, key)) is not None and value < 0:
                yield ConfigIssue(f"hardware.{key}", value, "must be 0 or more")
        for key in ("product_share", "attention_share", "bandwidth_share"):
            if (share := getattr(self, key)) > 1:
                yield ConfigIssue(f"hardware.{key}", share, "must be at most 1")


_NOT_NEGATIVE = (
    "tf32_tflops",
    "bf16_tflops",
    "fp16_tflops",
    "fp8_tflops",
    "context_gib",
    "matmul_workspace_mib",
    "launch_us",
)
_POSITIVE = (
    "memory_gib",
    "fp32_tflops",
    "memory_gb_per_s",
    "link_gb_per_s",
    "link_latency_us",
    "devices_per_node",
    "nodes",
    "node_link_gb_per_s",
    "node_link_latency_us",
    "host_memory_gib",
    "host_link_gb_per_s",
    "host_memory_gb_per_s",
    "product_share",
    "fp32_reached_tflops",
    "tf32_reached_tflops",
    "bf16_reached_tflops",
    "fp16_reached_tflops",
    "fp8_reached_tflops",
    "loader_tokens_per_s",
    "disk_gb_per_s",
    "step_scale",
    "step_shortest",
    "step_longest",
    "attention_share",
    "bandwidth_share",
    "dollars_per_hour",
    "watts",
)


@dataclass(frozen=True)
class Machine:
    """Devices, processor and memory of this machine, detected without torch."""

    gpus: tuple[str, ...]
    """Names of the CUDA devices that this process may use."""
    processor: str
    """Name of the processor."""
    cores: int
    """Logical cores that this process may use."""
    memory_bytes: int
    """Main memory, in bytes, or the memory limit of the control group if it is smaller."""
    cpu_info: Mapping[str, str] = field(default_factory=dict)
    """Entries of one processor in /proc/cpuinfo, such as its clock and flags; empty: unknown."""

    @property
    def device(self) -> DeviceKind:
        """Device type that ``auto`` resolves to."""
        return DeviceKind.cuda if self.gpus else DeviceKind.cpu

    @property
    def max_cpu_ranks(self) -> int:
        """Maximum number of CPU ranks."""
        return CPU_RANKS_PER_CORE * self.cores


RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Environment variables that torchrun sets for each rank; an incomplete set is ignored."""


def launched_world_size() -> int | None:
    """World size set by a launcher such as torchrun; None if this process is not a rank."""
    return int(os.environ["WORLD_SIZE"]) if _is_rank_process() else None


def local_world_size() -> int | None:
    """Number of these ranks on this machine; None if this process is not a rank."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if _is_rank_process() else None


def _is_rank_process() -> bool:
    return all(name in os.environ for name in RANK_VARIABLES)


@cache
def this_machine() -> Machine:
    """Detect the devices, processor and memory of this machine."""
    info = _cpu_info()
    return Machine(
        gpus=_visible_gpus(os.environ),
        processor=info.get("model name", "unknown processor"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        cpu_info=info,
    )


def resolve_for_machine(hardware: Hardware) -> Hardware:
    """Resolve ``auto``, and fill missing CPU figures with those of this machine."""
    machine = this_machine()
    if hardware.device is DeviceKind.auto:
        hardware = replace(hardware, device=machine.device)
    if hardware.device is DeviceKind.cuda:
        return hardware
    rates = processor_tflops(machine.cpu_info, machine.cores)
    missing: dict[str, Any] = {k: v for k, v in rates.items() if getattr(hardware, k) is None}
    if hardware.memory_gib is None:
        missing["memory_gib"] = round(machine.memory_bytes / GIB, 2)
    if rates and hardware.memory_gb_per_s is None:
        missing |= _built_in_figures(hardware, machine.cores)
    return replace(hardware, **missing)


def _built_in_figures(hardware: Hardware, cores: int) -> dict[str, Any]:
    """Figures of a CPU that ``hardware`` leaves at their defaults."""
    figures = {**BUILT_IN_CPU_FIGURES, "memory_gb_per_s": cores * CORE_GB_PER_S}
    defaults: dict[str, Any] = {it.name: it.default for it in fields(Hardware)}
    unset = {key: figures[key] for key in figures if getattr(hardware, key) == defaults[key]}
    return {**unset, "read_off": BUILT_IN}


def remove_built_in_figures(hardware: Hardware) -> Hardware:
    """Hardware without the built-in figures of a CPU, before this machine is measured."""
    if hardware.read_off != BUILT_IN:
        return hardware
    defaults: dict[str, Any] = {it.name: it.default for it in fields(Hardware)}
    built_in = (
        key for key, value in BUILT_IN_CPU_FIGURES.items() if getattr(hardware, key) == value
    )
    keys = ("memory_gb_per_s", "read_off", *built_in)
    return replace(hardware, **{key: defaults[key] for key in keys})


def _cpu_info() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _visible_gpus(
    environment: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus")
) -> tuple[str, ...]:
    """Names of the devices that are visible to CUDA, in its order.

    CUDA ignores ``CUDA_VISIBLE_DEVICES`` from the first invalid entry on. An entry that is a UUID
    or a MIG instance counts as some device.
    """
    present = _present_gpus(driver)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(present)
    visible_names: list[str] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        if entry.isdigit() and int(entry) < len(present):
            visible_names.append(present[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")) and len(visible_names) < len(present):
            visible_names.append(present[len(visible_names)])
        else:
            break
    return tuple(visible_names)


def _present_gpus(driver: Path) -> list[str]:
    """Names of all devices, without starting CUDA: from the driver's files, else from NVML.

    Virtual machines and containers may lack the files, and containers NVML: then the device files
    give the number of devices.
    """
    names = []
    for information in sorted(driver.glob("*/information")):
        fields = dict(
            line.split(":", 1) for line in information.read_text().splitlines() if ":" in line
        )
        names.append(fields.get("Model", UNKNOWN_GPU).strip())
    return names or _nvml_names() or [UNKNOWN_GPU for _ in DEVICE_FILES.glob("nvidia[0-9]*")]


def _nvml_names(library: str = "libnvidia-ml.so.1") -> list[str]:
    """Names of the devices that NVML lists; empty without a driver."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return []
    if nvml.nvmlInit_v2():  # every function returns 0 on success
        return []
    names, count, handle = [], ctypes.c_uint(), ctypes.c_void_p()
    name = ctypes.create_string_buffer(96)  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
    if not nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        for index in range(count.value):
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(
                index, ctypes.byref(handle)
            ) or nvml.nvmlDeviceGetName(handle, name, len(name))
            names.append(UNKNOWN_GPU if failed else name.value.decode())
    nvml.nvmlShutdown()
    return names


def _memory_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
