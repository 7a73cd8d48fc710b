"""Whether a run fits: what it allocates, what that makes an allocator reserve, what there is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind
from scalewise.planner import host_memory, worst_rank
from scalewise.planner.memory_breakdown import MemoryBreakdown
from scalewise.units import GIB, format_bytes

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

RESERVED = (1.0, 1.15, 1.2)
"""What CUDA's caching allocator reserves of what is allocated: least, usually, most.

Published runs of torchtitan (Llama 3 8B, 2024) reserve 1.14 to 1.20 of what a trace allocates.
"""


class FitStatus(StrEnum):
    """What the ledger says of a run on its hardware."""

    fits = "fits"
    borderline = "borderline"
    out_of_memory = "out_of_memory"
    host_out_of_memory = "host_out_of_memory"
    """The device would do; the node's main memory does not."""
    unknown = "unknown"
    """The hardware profile tells of no memory."""

    @property
    def is_acceptable(self) -> bool:
        """Returns whether nothing speaks against the run."""
        return self in (FitStatus.fits, FitStatus.unknown)

    @property
    def is_out_of_memory(self) -> bool:
        """Returns whether the run would surely end for want of memory."""
        return self in (FitStatus.out_of_memory, FitStatus.host_out_of_memory)


SAID = 3
"""So many lines of a ledger are told by a refusal."""
UNCOUNTED = 2.0
"""What a layout of which the ledger leaves something out may take of what it counts, at the most.

Traces of zero-bubble pipelines (Llama 3 8B, 12 layers, 2 stages) hold up to 1.9 times as much.
"""
PROCESS_BYTES = int(0.4 * GIB)
"""What a limited process on the CPU may take besides tensors: stacks of threads, buffers, code."""
SCATTERED = 0.1
"""Share of the tensors' peak that its allocator may hold in gaps between them."""


@dataclass(frozen=True)
class FitReport:
    """A ledger against the memory of a device, bytes."""

    breakdown: MemoryBreakdown
    capacity: int | None
    context_bytes: int
    on_cpu: bool
    process_overhead: int = 0
    """What the process may take of a limit besides tensors, at the most."""
    host_breakdown: MemoryBreakdown | None = None
    """The main memory of a node; None where the profile tells of none."""
    host_capacity: int = 0
    traced_peak: int | None = None
    """The peak of a trace, which goes before the ledger's."""
    unmodeled_memory: str = ""
    """What the ledger leaves out."""

    @property
    def peak(self) -> int:
        """Returns what tensors hold on the device at the most."""
        return self.breakdown.peak if self.traced_peak is None else self.traced_peak

    @property
    def reserved(self) -> tuple[int, int, int]:
        """Returns what the device is asked for: least, usually, most."""
        low, mean, high = (1.0, 1.0, 1.0) if self.on_cpu else RESERVED
        if self.unmodeled_memory and self.traced_peak is None:
            high *= UNCOUNTED
        factors = (low, mean, high)
        least, usual, most = (int(self.peak * factor) + self.context_bytes for factor in factors)
        return least, usual, most + self.process_overhead

    @property
    def status(self) -> FitStatus:
        """Returns ``fits`` if the most does, ``out_of_memory`` if not even the least does."""
        least, _, most = self.reserved
        if self.capacity is not None and least > self.capacity:
            return FitStatus.out_of_memory
        if self.host_breakdown is not None and self.host_breakdown.peak > self.host_capacity:
            return FitStatus.host_out_of_memory
        if self.capacity is None:
            return FitStatus.unknown
        return FitStatus.fits if most <= self.capacity else FitStatus.borderline

    @property
    def margin(self) -> int | None:
        """Returns what is left of the memory, usually; negative: what is missing."""
        return None if self.capacity is None else self.capacity - self.reserved[1]


def check_fit(run: RunConfig) -> FitReport:
    """Returns how ``run`` stands against its hardware, on the rank whose device is fullest."""
    on_cpu, node = run.hardware.device is DeviceKind.cpu, run.hardware.host_memory_gib
    fit = compare_with_hardware(run, worst_rank.worst_rank_breakdown(run))
    limited = on_cpu and run.launch.memory_limit_gib is not None
    beside = _process_overhead(run, fit.peak) if limited else 0
    fit = replace(fit, process_overhead=beside, unmodeled_memory=run.parallelism.unmodeled_memory)
    if node is None or on_cpu:  # there the devices are the node
        return fit
    return replace(fit, host_breakdown=host_memory.node_memory(run), host_capacity=int(node * GIB))


def compare_with_hardware(run: RunConfig, breakdown: MemoryBreakdown) -> FitReport:
    """Returns how a ledger stands against the memory of a run's devices."""
    hardware = run.hardware
    on_cpu = hardware.device is DeviceKind.cpu
    capacity = None if hardware.memory_gib is None else int(hardware.memory_gib * GIB)
    if capacity is not None and on_cpu:  # the ranks share the memory of the machine
        capacity //= run.world_size
    limit = run.launch.memory_limit_gib
    if limit is not None:
        capacity = min(capacity or int(limit * GIB), int(limit * GIB))
    return FitReport(breakdown, capacity, int(hardware.context_gib * GIB), on_cpu)


def reject_unfit(run: RunConfig) -> None:
    """Raises ``ConfigError``, with the ledger's words, for a run that is surely out of memory."""
    fit = check_fit(run)
    if not fit.status.is_out_of_memory:
        return
    breakdown, needed, capacity = fit.breakdown, fit.reserved[0], fit.capacity
    if fit.status is FitStatus.host_out_of_memory and fit.host_breakdown is not None:
        breakdown, needed, capacity = fit.host_breakdown, fit.host_breakdown.peak, fit.host_capacity
    largest = sorted(breakdown.entries, key=lambda line: -line.bytes.get(breakdown.peak_phase, 0))[
        :SAID
    ]
    parts = ", ".join(
        f"{line.name} {format_bytes(line.bytes.get(breakdown.peak_phase, 0))}" for line in largest
    )
    reason = f"{fit.status}: {format_bytes(needed)} of {format_bytes(capacity or 0)} ({parts})"
    raise ConfigError.for_key("launch.refuse_unfit", True, reason, "see `scalewise plan`")


def _process_overhead(run: RunConfig, peak: int) -> int:
    """Returns what a limited rank on the CPU takes besides its tensors at the most.

    A save copies the rank's weights and state once, while gradients may be there still.
    """
    rank_memory, each = run.parallelism.rank_memory(run), run.precision.parameters.bytes
    saved = rank_memory.weight_bytes(each, rank_memory.parameter_shards) + rank_memory.state_bytes(
        run
    )
    checkpoint = run.checkpoint
    saves = checkpoint.every is not None or checkpoint.best or checkpoint.at_end
    return PROCESS_BYTES + int(SCATTERED * peak) + saved * saves
