"""Comparison of predicted memory with the memory of the hardware, for a run and changes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.op_graph import Recompute
from scalewise.planner import host_memory, peak_memory
from scalewise.planner.memory_breakdown import MemoryBreakdown
from scalewise.planner.rank_memory import rank_memory_of
from scalewise.run_config import RunConfig
from scalewise.units import GIB, format_bytes
from scalewise.validation.run_issues import iter_issues

RESERVED_FACTORS = (1.0, 1.03, 1.1)
"""Reserved over allocated memory of the CUDA caching allocator: lowest, typical, highest.

With expandable segments, which runs of scalewise use, 11 configurations on one H100 reserve 1.000
to 1.033 (experiments/records/h100/gpu.json). The highest is a margin for several devices, where
nothing is measured.
"""


class FitStatus(StrEnum):
    """Predicted memory of a run compared with its hardware."""

    fits = "fits"
    """The highest prediction fits."""
    borderline = "borderline"
    """The lowest prediction fits and the highest does not."""
    out_of_memory = "out_of_memory"
    """The lowest prediction exceeds the device memory."""
    host_out_of_memory = "host_out_of_memory"
    """The prediction exceeds the main memory of a node."""
    unknown = "unknown"
    """The hardware profile has no device memory."""

    @property
    def is_acceptable(self) -> bool:
        """Whether the run fits, or nothing is known against it."""
        return self in (FitStatus.fits, FitStatus.unknown)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the run is certain to run out of memory."""
        return self in (FitStatus.out_of_memory, FitStatus.host_out_of_memory)


NUM_LISTED_ENTRIES = 3
"""Number of entries in the error message of a run that does not fit."""
UNBALANCED_LOAD = 2.0
"""Load of the busiest expert-parallel rank in the highest prediction, relative to the mean."""
PROCESS_BYTES = int(0.4 * GIB)
"""Memory of a CPU process besides tensors: thread stacks, buffers and code."""
FRAGMENTATION_SHARE = 0.1
"""Share of the tensor peak that the CPU allocator may lose to fragmentation."""


@dataclass(frozen=True)
class FitReport:
    """Predicted memory of a device compared with its capacity, in bytes."""

    breakdown: MemoryBreakdown
    """Memory breakdown of the rank with the highest peak."""
    capacity: int | None
    """Memory of the device; None if the profile has none."""
    context_bytes: int
    """Memory of the CUDA context."""
    on_cpu: bool
    """Whether the device is the CPU."""
    process_overhead: int = 0
    """Upper bound of process memory besides tensors that counts towards a limit."""
    host_breakdown: MemoryBreakdown | None = None
    """Main memory of a node; None if the profile has none."""
    host_capacity: int = 0
    """Main memory of a node that the profile has."""
    traced_peak: int | None = None
    """Peak of a trace; replaces the peak of the breakdown."""
    unbalanced_peak: int = 0
    """Peak of a rank whose experts receive ``UNBALANCED_LOAD`` times the mean load; 0 without
    expert parallelism, and with a capacity of experts."""

    @cached_property
    def peak(self) -> int:
        """Peak allocated memory, in bytes."""
        return self.breakdown.peak if self.traced_peak is None else self.traced_peak

    @cached_property
    def reserved(self) -> tuple[int, int, int]:
        """Reserved memory: lowest, typical, highest, in bytes."""
        low, mean, high = (1.0, 1.0, 1.0) if self.on_cpu else RESERVED_FACTORS
        factors = (low, mean, high)
        peaks = (self.peak, self.peak, max(self.peak, self.unbalanced_peak))
        lowest, typical, highest = (
            int(peak * factor) + self.context_bytes
            for peak, factor in zip(peaks, factors, strict=True)
        )
        return lowest, typical, highest + self.process_overhead

    @cached_property
    def status(self) -> FitStatus:
        """Fit status: ``fits`` if the highest prediction fits."""
        lowest, _, highest = self.reserved
        if self.capacity is not None and lowest > self.capacity:
            return FitStatus.out_of_memory
        if self.host_breakdown is not None and self.host_breakdown.peak > self.host_capacity:
            return FitStatus.host_out_of_memory
        if self.capacity is None:
            return FitStatus.unknown
        return FitStatus.fits if highest <= self.capacity else FitStatus.borderline

    @property
    def margin(self) -> int | None:
        """Free memory at the typical prediction, in bytes; negative if memory is missing."""
        return None if self.capacity is None else self.capacity - self.reserved[1]


def check_fit(run: RunConfig) -> FitReport:
    """Compare the rank of ``run`` with the highest peak with the hardware."""
    on_cpu, host_gib = run.hardware.device is DeviceKind.cpu, run.hardware.host_memory_gib
    breakdown = peak_memory.worst_rank_breakdown(run)
    details: dict[str, Any] = {}
    if on_cpu and run.launch.memory_limit_gib is not None:
        details["process_overhead"] = _process_overhead(run, breakdown.peak)
    has_capacity = getattr(run.model, "capacity_factor", None) is not None
    if getattr(run.parallelism, "expert", 1) > 1 and not has_capacity:
        details["unbalanced_peak"] = peak_memory.unbalanced_peak(run, UNBALANCED_LOAD)
    if host_gib is not None and not on_cpu:  # on the CPU, the device memory is the main memory
        details["host_breakdown"] = host_memory.node_memory(run)
        details["host_capacity"] = int(host_gib * GIB)
    return compare_with_hardware(run, breakdown, **details)


def compare_with_hardware(run: RunConfig, breakdown: MemoryBreakdown, **details: Any) -> FitReport:
    """Compare a memory breakdown with the devices of a run.

    ``details``: other fields of the report.
    """
    hardware = run.hardware
    on_cpu = hardware.device is DeviceKind.cpu
    capacity = None if hardware.memory_gib is None else int(hardware.memory_gib * GIB)
    if capacity is not None and on_cpu:  # the ranks share the memory of the machine
        capacity //= run.world_size
    limit = run.launch.memory_limit_gib
    if limit is not None:
        capacity = min(capacity or int(limit * GIB), int(limit * GIB))
    return FitReport(breakdown, capacity, int(hardware.context_gib * GIB), on_cpu, **details)


def reject_unfit(run: RunConfig) -> None:
    """Raise ``ConfigError`` for a run that is certain to run out of memory."""
    fit = check_fit(run)
    if not fit.status.is_out_of_memory:
        return
    breakdown, needed, capacity = fit.breakdown, fit.reserved[0], fit.capacity
    if fit.status is FitStatus.host_out_of_memory and fit.host_breakdown is not None:
        breakdown, needed, capacity = fit.host_breakdown, fit.host_breakdown.peak, fit.host_capacity
    peak_phase = breakdown.peak_phase
    largest = sorted(breakdown.entries, key=lambda entry: -entry.bytes.get(peak_phase, 0))
    parts = ", ".join(
        f"{entry.title} {format_bytes(entry.bytes.get(peak_phase, 0))}"
        for entry in largest[:NUM_LISTED_ENTRIES]
    )
    reason = f"{fit.status}: {format_bytes(needed)} of {format_bytes(capacity or 0)} ({parts})"
    raise ConfigError.for_key("launch.refuse_unfit", True, reason, "see `scalewise plan`")


def _process_overhead(run: RunConfig, peak: int) -> int:
    """Return an upper bound of the memory of a CPU rank besides tensors, in bytes.

    A checkpoint copies weights and optimizer state once, while gradients may be alive.
    """
    rank_memory = rank_memory_of(run)
    element_bytes = run.precision.parameters.bytes
    checkpoint_bytes = rank_memory.weight_bytes(
        element_bytes, rank_memory.parameter_shards
    ) + rank_memory.state_bytes(run)
    checkpoint = run.checkpoint
    has_checkpoints = checkpoint.every is not None or checkpoint.best or checkpoint.at_end
    return PROCESS_BYTES + int(FRAGMENTATION_SHARE * peak) + checkpoint_bytes * has_checkpoints


@dataclass(frozen=True)
class RunVariant:
    """Changed run, and the overrides that turn the requested run into it."""

    run: RunConfig
    """The changed run."""
    overrides: tuple[str, ...] = ()
    """Overrides of all changes."""
    validated: RunConfig | None = None
    """Run without config issues that the changes started from."""

    def change(self, *overrides: str, **groups: Any) -> RunVariant:
        """Variant with more overrides, and with the config groups that they select."""
        run, overrides = replace(self.run, **groups), (*self.overrides, *overrides)
        return RunVariant(run, overrides, self.validated)

    def set_checkpointing(self, memory: FixedCheckpointing) -> RunVariant:
        """Variant with this activation checkpointing."""
        return self.change(*checkpointing_overrides(memory), memory=memory)

    @property
    def is_valid(self) -> bool:
        """Whether the run has no config issues."""
        return not any(iter_issues(self.run, self.validated))

    @cached_property
    def fit(self) -> FitReport:
        """Predicted memory compared with the hardware."""
        return check_fit(self.run)


def checkpointing_overrides(memory: FixedCheckpointing) -> tuple[str, ...]:
    """Overrides that select an activation checkpointing config."""
    if memory.offload:
        return ("memory=offload_activations",)
    if memory.recompute is Recompute.nothing:
        return ("memory=none",)
    overrides = [f"memory=checkpoint_{memory.recompute}"]
    if memory.every > 1 and memory.recompute is Recompute.full:
        overrides = ["memory=checkpoint_every_n"]
    if memory.every > 1:
        overrides.append(f"memory.every={memory.every:g}")
    if memory.otherwise is not Recompute.nothing:
        overrides.append(f"memory.otherwise={memory.otherwise}")
    return tuple(overrides)
