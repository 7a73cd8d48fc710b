"""What a run takes of a node's main memory, and of the disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scalewise.hardware import DeviceKind
from scalewise.planner.liveness_cache import offloaded_bytes
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryBreakdown, MemoryEntry
from scalewise.units import GIB, format_bytes

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

PROCESS_GIB = {DeviceKind.cpu: 0.4, DeviceKind.cuda: 3.0}
"""Main memory of a rank that trains next to nothing, GiB.

On the CPU as measured with torch 2.13; with CUDA's libraries an estimate.
"""
BATCHES_AHEAD = 2
"""Micro batches of the loader that exist at once."""
ID_BYTES = 8


def node_memory(run: RunConfig) -> MemoryBreakdown:
    """Returns what the ranks of one node take of its memory besides their devices'."""
    return MemoryBreakdown(tuple(line for line in _node_entries(run) if line.max_bytes))


def ranks_per_node(run: RunConfig) -> int:
    """Returns how many ranks share a node."""
    return min(run.world_size, run.hardware.devices_per_node or run.world_size)


def checkpoint_bytes(run: RunConfig) -> int:
    """Returns the bytes of one checkpoint: every weight, and the optimizer's state."""
    census, held = run.weight_census(), run.precision.parameters.bytes
    trained = [weight for weight in census if weight.trainable]
    state = sum(run.optimizer.state_bytes(weight, 1, held) for weight in trained)
    return sum(weight.shard_bytes(held) for weight in census) + state


def _node_entries(run: RunConfig) -> Iterator[MemoryEntry]:
    ranks, rank_memory = ranks_per_node(run), run.parallelism.rank_memory(run)
    each = int(PROCESS_GIB[run.hardware.device] * GIB)
    yield _node_entry("processes", ranks, each, "Python, torch and its libraries")
    held, zero = run.precision.parameters.bytes, rank_memory.zero
    states = held * rank_memory.numel(rank_memory.state_shards, trained=True)
    if rank_memory.states_on_host and not rank_memory.states_on_disk:
        size = rank_memory.state_bytes(run)
        yield _node_entry("offloaded optimizer state", ranks, size, "stepped on the host")
        if zero is not None:
            yield _node_entry("offloaded masters", ranks, states, "the weights that the host steps")
        if rank_memory.streams_weights:
            size, reason = (
                4 * held * rank_memory.largest_numel,
                "a weight that is stepped, and the next",
            )
            yield _node_entry("weights and gradients", ranks, size, reason)
        else:
            size = held * rank_memory.numel(rank_memory.gradient_shards, trained=True)
            yield _node_entry("offloaded gradients", ranks, size, "what the host steps by")
    if rank_memory.states_paged:
        reason = "where the device has no room for it"
        yield _node_entry("paged optimizer state", ranks, rank_memory.state_bytes(run), reason)
    if rank_memory.parameters_on_host and not rank_memory.parameters_on_disk:
        size = rank_memory.weight_bytes(
            zero.weight_element_bytes if zero else held, rank_memory.parameter_shards
        )
        yield _node_entry(
            "offloaded parameters", ranks, size, "gathered from there, block by block"
        )
    if rank_memory.parameters_on_host:
        reason = "moving average of the weights"
        yield _node_entry("offloaded average", ranks, rank_memory.ema_bytes(run), reason)
    if run.hardware.device is DeviceKind.cuda and (size := offloaded_bytes(run, rank_memory)):
        passes = -(-rank_memory.in_flight // len(rank_memory.stages))
        yield _node_entry(
            "offloaded activations", ranks, passes * size, "until backward reads them"
        )
    if run.checkpoint.background:
        size = rank_memory.weight_bytes(
            held, rank_memory.parameter_shards
        ) + rank_memory.state_bytes(run)
        yield _node_entry("checkpoint on its way", ranks, size, "a copy that a thread writes")
    rows = run.sequences_per_forward * (run.data.sequence + 1) * ID_BYTES * BATCHES_AHEAD
    yield _node_entry("rows", ranks, rows, "of the loader, as token ids")


def _node_entry(name: str, ranks: int, bytes_per_rank: int, reason: str) -> MemoryEntry:
    formula = f"{ranks} x {format_bytes(bytes_per_rank)}"
    return MemoryEntry(name, dict.fromkeys(ALL_PHASES, ranks * bytes_per_rank), formula, reason)
