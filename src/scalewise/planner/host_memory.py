"""Main memory of a node, transfers between device, host and disk, and checkpoint size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.hardware import DeviceKind
from scalewise.planner.activation_liveness import offloaded_bytes
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryBreakdown, MemoryEntry
from scalewise.planner.peak_memory import peak_of
from scalewise.planner.rank_memory import RankMemory, rank_memory_of
from scalewise.run_config import RunConfig
from scalewise.units import GIB, GIGA, format_bytes

PROCESS_GIB = {DeviceKind.cpu: 0.4, DeviceKind.cuda: 3.0}
"""Main memory of a rank that trains a tiny model, in GiB.

CPU: measured with torch 2.13. CUDA libraries: an estimate.
"""
LOADER_BATCHES = 2
"""Number of micro-batches of the data loader that are alive at once."""
ID_BYTES = 8


def node_memory(run: RunConfig) -> MemoryBreakdown:
    """Return the main memory of one node, besides device memory."""
    return MemoryBreakdown(tuple(entry for entry in _node_entries(run) if entry.max_bytes))


def ranks_per_node(run: RunConfig) -> int:
    """Return the number of ranks on a node."""
    return min(run.world_size, run.hardware.devices_per_node or run.world_size)


def checkpoint_bytes(run: RunConfig) -> int:
    """Return the size of a checkpoint: parameters and optimizer state, in bytes."""
    census, element_bytes = run.weight_census(), run.precision.parameters.bytes
    trained = [weight for weight in census if weight.trainable]
    state = sum(run.optimizer.state_bytes(weight, 1, element_bytes) for weight in trained)
    return sum(weight.shard_bytes(element_bytes) for weight in census) + state


def _node_entries(run: RunConfig) -> Iterator[MemoryEntry]:
    ranks, rank_memory = ranks_per_node(run), rank_memory_of(run)
    process_bytes = int(PROCESS_GIB[run.hardware.device] * GIB)
    yield _node_entry("processes", ranks, process_bytes, "Python, PyTorch and its libraries")
    element_bytes, zero = run.precision.parameters.bytes, rank_memory.zero
    master_bytes = element_bytes * rank_memory.numel(rank_memory.state_shards, trained=True)
    if rank_memory.states_on_host and not rank_memory.states_on_disk:
        size = rank_memory.state_bytes(run)
        yield _node_entry("offloaded optimizer state", ranks, size, "updated on the host")
        if zero is not None:
            yield _node_entry(
                "offloaded masters", ranks, master_bytes, "weights that the host updates"
            )
        if rank_memory.streams_weights:
            size = 4 * element_bytes * rank_memory.largest_numel
            reason = "parameter being updated, and the next one"
            yield _node_entry("weights and gradients", ranks, size, reason)
        else:
            size = element_bytes * rank_memory.numel(rank_memory.gradient_shards, trained=True)
            yield _node_entry(
                "offloaded gradients", ranks, size, "read by the optimizer on the host"
            )
    if rank_memory.states_paged:
        reason = "when the device memory is full"
        yield _node_entry("paged optimizer state", ranks, rank_memory.state_bytes(run), reason)
    if rank_memory.parameters_on_host and not rank_memory.parameters_on_disk:
        size = rank_memory.weight_bytes(
            zero.weight_element_bytes if zero else element_bytes, rank_memory.parameter_shards
        )
        yield _node_entry("offloaded parameters", ranks, size, "gathered block by block")
    if rank_memory.average_on_host:
        reason = "moving average of the weights"
        yield _node_entry("offloaded average", ranks, rank_memory.ema_bytes(run), reason)
    if run.hardware.device is DeviceKind.cuda and (size := offloaded_bytes(run, rank_memory)):
        waiting_passes = -(-rank_memory.in_flight // len(rank_memory.stages))
        yield _node_entry(
            "offloaded activations", ranks, waiting_passes * size, "until backward reads them"
        )
    if run.checkpoint.background:
        size = rank_memory.weight_bytes(
            element_bytes, rank_memory.parameter_shards
        ) + rank_memory.state_bytes(run)
        yield _node_entry("checkpoint on its way", ranks, size, "copy that a thread writes")
    sample_bytes = (run.data.sequence + 1) * ID_BYTES + 3 * run.data.image_size**2
    loader_bytes = run.sequences_per_forward * sample_bytes * LOADER_BATCHES
    reason = "token IDs of prefetched batches" + ", and pixels" * (run.data.image_size > 0)
    yield _node_entry("rows", ranks, loader_bytes, reason)


def _node_entry(name: str, ranks: int, bytes_per_rank: int, reason: str) -> MemoryEntry:
    formula = f"{ranks} x {format_bytes(bytes_per_rank)}"
    return MemoryEntry(name, dict.fromkeys(ALL_PHASES, ranks * bytes_per_rank), formula, reason)


@dataclass(frozen=True)
class HostTraffic:
    """Traffic of one rank in one step, in bytes."""

    link: int = 0
    """Copies between the device and the host."""
    host: int = 0
    """Reads and writes of the optimizer on the host."""
    disk: int = 0
    """Copies between the host and the disk."""
    activations: int = 0
    """Offloaded activations, to the host and back; on the CPU, to the disk and back."""
    paged: int = 0
    """Optimizer state that the driver pages in and out, between device and host."""


@dataclass(frozen=True)
class HostTransferTime:
    """Time of the transfers in a step, in seconds."""

    copies: float
    """Copies that can overlap with compute."""
    stepping: float
    """Optimizer step on the host, and its transfers."""
    activations: float
    """Offloaded activations; half of it in forward, half in backward."""


def rank_traffic(run: RunConfig, rank_memory: RankMemory) -> HostTraffic:
    """Return the bytes that a rank moves between device, host and disk in one step.

    Parameters are copied to the device before each forward and, if they were resharded, before each
    backward. Gradient partitions are copied to the host once per micro-batch, or once per step if
    they are reduced only in the last one. The optimizer steps where its state is stored. FSDP2's
    ``CPUOffloadPolicy`` and ZeRO-Offload (Ren et al., 2021) have the same traffic; with the latter,
    parameters that stay on the device are copied back once per step. AdamW with ``offload`` stores
    parameters on the device only, so they are copied to the host and back.
    """
    zero, state_bytes = rank_memory.zero, rank_memory.state_bytes(run)
    master_element_bytes = run.precision.parameters.bytes
    # DeepSpeed's master weights stay on the host.
    copied_element_bytes = zero.weight_element_bytes if zero else master_element_bytes
    partition_elements = rank_memory.numel(rank_memory.state_shards, trained=True)
    parameter_bytes, stepped_bytes = (
        rank_memory.weight_bytes(copied_element_bytes, rank_memory.parameter_shards),
        master_element_bytes * partition_elements,
    )
    passes = run.accumulation * rank_memory.num_pipeline_micro_batches
    link = host = disk = 0
    fsdp = rank_memory.fsdp
    if rank_memory.parameters_on_host:
        copies_per_pass = 1 if fsdp and fsdp.keeps_unsharded else 2 + run.extra_forward_passes
        link += parameter_bytes * passes * copies_per_pass
    if rank_memory.states_on_host:
        once_per_step = rank_memory.streams_weights or (
            fsdp is not None and fsdp.has_unsharded_gradients
        )
        link += (
            copied_element_bytes
            * rank_memory.numel(rank_memory.gradient_shards, trained=True)
            * (1 if once_per_step else passes)
        )
        link += (
            (2 if rank_memory.streams_weights else not rank_memory.parameters_on_host)
            * copied_element_bytes
            * partition_elements
        )
        # Read and write weights and state, read gradients.
        host = stepped_bytes * (2 + 1) + 2 * state_bytes
    if rank_memory.parameters_on_disk:
        disk += parameter_bytes * passes * 2 + copied_element_bytes * partition_elements
    if rank_memory.states_on_disk:
        disk += 2 * (state_bytes + stepped_bytes * (zero is not None))
    paged = (
        2 * state_bytes
        if rank_memory.states_paged and not _paged_state_fits(run, rank_memory, state_bytes)
        else 0
    )
    return HostTraffic(link, host, disk, 2 * passes * offloaded_bytes(run, rank_memory), paged)


def _paged_state_fits(run: RunConfig, rank_memory: RankMemory, state_bytes: int) -> bool:
    """Whether paged optimizer state fits in the device memory next to all other memory.

    Otherwise each step reads all of it in the same order, so that a least-recently-used policy
    evicts each page before its next use.
    """
    hardware = run.hardware
    if hardware.memory_gib is None:
        return True
    return (
        state_bytes + peak_of(run, rank_memory)
        <= (hardware.memory_gib - hardware.context_gib) * GIB
    )


def transfer_seconds(run: RunConfig, rank_memory: RankMemory) -> HostTransferTime:
    """Return the transfer time of a rank; transfers without a rate in the profile take none.

    Ranks on a node share its main memory and its disk. On the CPU, the device is the host.
    """
    hardware, traffic = run.hardware, rank_traffic(run, rank_memory)
    ranks = ranks_per_node(run)
    if hardware.device is DeviceKind.cpu:
        return HostTransferTime(
            0.0, 0.0, _seconds_over(ranks * traffic.activations, hardware.disk_gb_per_s)
        )
    copies = _seconds_over(traffic.link, hardware.host_link_gb_per_s)
    stepping = _seconds_over(
        ranks * traffic.host, hardware.host_memory_gb_per_s, hardware.bandwidth_share
    )
    stepping += _seconds_over(ranks * traffic.disk, hardware.disk_gb_per_s)
    stepping += _seconds_over(traffic.paged, hardware.host_link_gb_per_s)
    return HostTransferTime(
        copies, stepping, _seconds_over(traffic.activations, hardware.host_link_gb_per_s)
    )


def missing_rates(run: RunConfig) -> tuple[str, ...]:
    """Return the rates that the profile lacks for the transfers of the run."""
    traffic, hardware = rank_traffic(run, rank_memory_of(run)), run.hardware
    rates = {
        "host_link_gb_per_s": traffic.link + traffic.activations + traffic.paged,
        "host_memory_gb_per_s": traffic.host,
        "disk_gb_per_s": traffic.disk,
    }
    if hardware.device is DeviceKind.cpu:
        rates = {"disk_gb_per_s": traffic.activations}
    return tuple(
        name for name, num_bytes in rates.items() if num_bytes and not getattr(hardware, name)
    )


def _seconds_over(moved_bytes: int, gb_per_s: float | None, efficiency: float = 1.0) -> float:
    return moved_bytes / (gb_per_s * efficiency * GIGA) if gb_per_s else 0.0
