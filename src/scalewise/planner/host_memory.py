"""Predicted main memory of a node, and size of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from scalewise.hardware import DeviceKind
from scalewise.planner.liveness_cache import offloaded_bytes
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryBreakdown, MemoryEntry
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.run_config import RunConfig
from scalewise.units import GIB, format_bytes

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
    ranks, rank_memory = ranks_per_node(run), build_rank_memory(run.parallelism, run)
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
    if rank_memory.parameters_on_host:
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
    loader_bytes = run.sequences_per_forward * (run.data.sequence + 1) * ID_BYTES * LOADER_BATCHES
    yield _node_entry("rows", ranks, loader_bytes, "token IDs of prefetched batches")


def _node_entry(name: str, ranks: int, bytes_per_rank: int, reason: str) -> MemoryEntry:
    formula = f"{ranks} x {format_bytes(bytes_per_rank)}"
    return MemoryEntry(name, dict.fromkeys(ALL_PHASES, ranks * bytes_per_rank), formula, reason)
