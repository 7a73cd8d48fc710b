"""What goes between a device, its host and the disk in a step, where weights or state lie there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.hardware import DeviceKind
from scalewise.planner.host_memory import ranks_per_node
from scalewise.planner.liveness_cache import offloaded_bytes
from scalewise.planner.worst_rank import breakdown_of
from scalewise.units import GIB, GIGA

if TYPE_CHECKING:
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class HostTraffic:
    """Bytes of one rank and step.

    ``link``: between the device and its host; ``host``: that the host's optimizer reads and
    writes; ``disk``: between the host and the disk; ``activations``: that blocks hand over and
    take back, along the link or, from the CPU, to the disk; ``paged``: optimizer state that the
    driver brings and takes away, along the link.
    """

    link: int = 0
    host: int = 0
    disk: int = 0
    activations: int = 0
    paged: int = 0


@dataclass(frozen=True)
class HostTransferTime:
    """Seconds of a step: ``copies`` that may hide under arithmetic, and what cannot.

    ``stepping``: of the optimizer; ``activations``: of what blocks keep, which is waited for.
    """

    copies: float
    stepping: float
    activations: float


def rank_traffic(run: RunConfig, rank_memory: RankMemory) -> HostTraffic:
    """Returns the bytes that a rank moves off its device and back.

    Weights come before each forward and, where they were dropped meanwhile, each backward; the
    gradients of the rank's share go once a micro batch, or once where they stay whole until the
    last; the optimizer steps where its state lies. FSDP2's ``CPUOffloadPolicy`` and ZeRO-Offload
    (Ren et al., 2021) do so alike; of the latter, weights that stay on the device come back once.
    AdamW with ``offload`` has the weights on the device alone: they go there and back.
    """
    zero, state = rank_memory.zero, rank_memory.state_bytes(run)
    held = run.precision.parameters.bytes
    moved = (
        zero.weight_element_bytes if zero else held
    )  # DeepSpeed's masters stay where they are stepped
    share = rank_memory.numel(rank_memory.state_shards, trained=True)
    weights, stepped = rank_memory.weight_bytes(moved, rank_memory.parameter_shards), held * share
    passes = run.accumulation * rank_memory.num_pipeline_micro_batches
    link = host = disk = 0
    gathering = rank_memory.fsdp
    if rank_memory.parameters_on_host:
        uses = 1 if gathering and gathering.keeps_unsharded else 2 + run.extra_forward_passes
        link += weights * passes * uses
    if rank_memory.states_on_host:
        late = rank_memory.streams_weights or (
            gathering is not None and gathering.has_unsharded_gradients
        )
        link += (
            moved
            * rank_memory.numel(rank_memory.gradient_shards, trained=True)
            * (1 if late else passes)
        )
        link += (
            (2 if rank_memory.streams_weights else not rank_memory.parameters_on_host)
            * moved
            * share
        )
        host = stepped * (2 + 1) + 2 * state  # weights and state there and back, and gradients
    if rank_memory.parameters_on_disk:
        disk += weights * passes * 2 + moved * share
    if rank_memory.states_on_disk:
        disk += 2 * (state + stepped * (zero is not None))
    paged = (
        2 * state
        if rank_memory.states_paged and not _paged_state_fits(run, rank_memory, state)
        else 0
    )
    return HostTraffic(link, host, disk, 2 * passes * offloaded_bytes(run, rank_memory), paged)


def _paged_state_fits(run: RunConfig, rank_memory: RankMemory, state_bytes: int) -> bool:
    """Returns whether a device holds paged state beside all else; it stays there then.

    Elsewhere each step reads all of it in one order, and what was used longest ago goes first: the
    next that is wanted.
    """
    hardware = run.hardware
    if hardware.memory_gib is None:
        return True
    return (
        state_bytes + breakdown_of(run, rank_memory).peak
        <= (hardware.memory_gib - hardware.context_gib) * GIB
    )


def transfer_seconds(run: RunConfig, rank_memory: RankMemory) -> HostTransferTime:
    """Returns the time of a rank's traffic; a rate that the profile lacks takes none.

    The ranks of a node share its memory and its disk. On the CPU the device is the host.
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
    """Returns the rates that the profile lacks for what the run moves off its devices."""
    traffic, hardware = rank_traffic(run, run.parallelism.rank_memory(run)), run.hardware
    rates = {
        "host_link_gb_per_s": traffic.link + traffic.activations + traffic.paged,
        "host_memory_gb_per_s": traffic.host,
        "disk_gb_per_s": traffic.disk,
    }
    if hardware.device is DeviceKind.cpu:
        rates = {"disk_gb_per_s": traffic.activations}
    return tuple(name for name, moved in rates.items() if moved and not getattr(hardware, name))


def _seconds_over(moved_bytes: int, gb_per_s: float | None, efficiency: float = 1.0) -> float:
    return moved_bytes / (gb_per_s * efficiency * GIGA) if gb_per_s else 0.0
