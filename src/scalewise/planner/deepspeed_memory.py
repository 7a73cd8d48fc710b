"""Memory entries of one device with DeepSpeed ZeRO.

Follows ``deepspeed/runtime/zero/stage_1_and_2.py`` and ``stage3.py`` of DeepSpeed 0.18.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scalewise.planner.device_memory import DeviceMemory
from scalewise.planner.memory_breakdown import (
    AFTER_HEAD,
    ALL_PHASES,
    BACKWARD,
    FORWARD_BACKWARD,
    MemoryEntry,
    StepPhase,
    constant_entry,
)
from scalewise.planner.rank_memory import RankMemory
from scalewise.planner.rank_step import PeakPoint
from scalewise.planner.weight_sizes import shard_elements
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig


class DeepSpeedDeviceMemory(DeviceMemory):
    """Memory entries of one rank with ZeRO: compute weights, master weights, gradient buckets."""

    def __init__(self, run: RunConfig, rank_memory: RankMemory, peak_point: PeakPoint) -> None:
        assert rank_memory.zero is not None
        self.zero = rank_memory.zero
        # From stage 2 on, a gradient is copied into its bucket as soon as it is computed.
        super().__init__(
            run,
            replace(
                rank_memory,
                has_persistent_buckets=rank_memory.has_persistent_buckets or self.zero.stage > 1,
            ),
            peak_point,
        )

    @property
    def gradient_element_bytes(self) -> int:
        """Bytes per element of a gradient that waits for the optimizer step."""
        return self.zero.gradient_element_bytes

    def _parameter_entry(self, dtype: FloatFormat) -> MemoryEntry:
        return super()._parameter_entry(self.run.precision.compute)

    def _persistent_entries(self) -> Iterator[MemoryEntry]:
        run, rank_memory, zero = self.run, self.rank_memory, self.zero
        yield from super()._persistent_entries()
        if not rank_memory.states_on_host:
            count = rank_memory.numel(rank_memory.state_shards, trained=True)
            formula = f"{count:,} x {zero.master_element_bytes} B"
            reason = f"{run.precision.parameters} copy that the optimizer updates"
            yield constant_entry(
                "masters", count * zero.master_element_bytes, ALL_PHASES, formula, reason
            )
        if zero.persistence_threshold:
            small_elements = sum(
                weight.numel
                for weight in rank_memory.all_weights
                if weight.numel < zero.persistence_threshold
            )
            reason = "smaller than parallelism.keep_whole_below"
            formula = f"{small_elements:,} x {zero.weight_element_bytes} B"
            yield constant_entry(
                "small weights",
                small_elements * zero.weight_element_bytes,
                ALL_PHASES,
                formula,
                reason,
            )

    def _gradient_entries(self) -> Iterator[MemoryEntry]:
        rank_memory, zero, run = self.rank_memory, self.zero, self.run
        partition_elements = rank_memory.numel(rank_memory.state_shards, trained=True)
        formula = f"{partition_elements:,} x {zero.gradient_element_bytes} B"
        if zero.stage == 1:
            yield from self._stage1_gradient_entries()
        elif not rank_memory.states_on_host:
            reason = "partition of this rank"
            yield constant_entry(
                "gradients",
                partition_elements * zero.gradient_element_bytes,
                self._gradient_shard_phases,
                formula,
                reason,
            )
        accumulates = run.accumulation > 1 and zero.stage == 2
        if (
            accumulates
            and zero.gradient_element_bytes
            == zero.weight_element_bytes
            == zero.master_element_bytes
            and not rank_memory.states_on_host
        ):
            reason = "before accumulation"
            yield constant_entry(
                "gradients of this pass",
                partition_elements * zero.gradient_element_bytes,
                self._reduction_phases,
                formula,
                reason,
            )
        yield from self._bucket_entries()
        if zero.max_live_elements:
            yield self._gathered_weights_entry()

    def _stage1_gradient_entries(self) -> Iterator[MemoryEntry]:
        """Gradients of stage 1: in place, or copied into buckets as they are computed."""
        rank_memory, zero = self.rank_memory, self.zero
        trained, element_bytes = rank_memory.numel(1, trained=True), zero.gradient_element_bytes
        embedding_weights = tuple(
            w for w in rank_memory.other_weights if w.role in ("embedding", "position")
        )
        if self.gradients_persist or zero.num_buckets == 1 or zero.bucket_elements >= trained:
            yield from super()._gradient_entries()
        else:
            weights = tuple(w for w in rank_memory.all_weights if w not in embedding_weights)
            large_elements = shard_elements(
                tuple(w for w in weights if w.numel > zero.bucket_elements), trained=True
            )
            stored_elements = (
                rank_memory.numel(rank_memory.state_shards, trained=True) + large_elements
            )
            reason = (
                f"all in the optimizer step; in backward {stored_elements:,}: partition of this "
                "rank, and gradients larger than a bucket"
            )
            phases = dict.fromkeys(AFTER_HEAD, stored_elements * element_bytes) | {
                StepPhase.optimizer: trained * element_bytes
            }
            yield MemoryEntry("gradients", phases, f"{trained:,} x {element_bytes} B", reason)
        embedding_elements = shard_elements(embedding_weights, trained=True)
        name, reason = "gradient of the embedding", "computed last, while buckets are reduced"
        yield constant_entry(
            name,
            embedding_elements * element_bytes,
            (StepPhase.reduce_rest,),
            f"{embedding_elements:,} x {element_bytes} B",
            reason,
        )

    @property
    def _gradient_shard_phases(self) -> tuple[StepPhase, ...]:
        """Phases with the gradient partition; stage 2 allocates it at the first full bucket."""
        if self.zero.stage == 3 or self.run.accumulation > 1:
            return ALL_PHASES
        running = shard_elements(self.rank_memory.block_weights, trained=True)
        blocks = self.rank_memory.cumulative_trained_elements(shards=1)
        computed_elements = {
            phase: self.head_numel + blocks[finished] + running
            for phase, (_, finished) in self.blocks_by_phase.items()
        }
        bucket_phases = (
            phase
            for phase in AFTER_HEAD[:-1]
            if computed_elements[phase] >= self.zero.bucket_elements
        )
        return (*bucket_phases, StepPhase.reduce_rest, StepPhase.optimizer)

    @property
    def _bucket_phases(self) -> tuple[StepPhase, ...]:
        """Phases with buckets; stages 1 and 2 allocate them at the first gradient."""
        return AFTER_HEAD if self.zero.stage < 3 else BACKWARD

    @property
    def _reduction_phases(self) -> tuple[StepPhase, ...]:
        """Phases that reduce buckets; a bucket for all gradients is reduced after backward."""
        takes_all = self.zero.bucket_elements >= self.rank_memory.numel(1, trained=True)
        return (StepPhase.reduce_rest,) if takes_all else self._bucket_phases

    def _bucket_entries(self) -> Iterator[MemoryEntry]:
        """Gradient buckets and their reduction buffers."""
        zero, ranks, trained = (
            self.zero,
            self.rank_memory.state_shards,
            self.rank_memory.numel(1, trained=True),
        )
        bucket_elements = min(zero.bucket_elements, trained)
        formula, reason = (
            f"{zero.num_buckets} x {bucket_elements:,} x {zero.weight_element_bytes} B",
            "filled with gradients, then reduced",
        )
        yield constant_entry(
            "buckets",
            zero.num_buckets * bucket_elements * zero.weight_element_bytes,
            self._bucket_phases,
            formula,
            reason,
        )
        weights = (*self.rank_memory.block_weights, *self.rank_memory.other_weights)
        # A gradient larger than a bucket is reduced separately.
        reduced_elements = max(
            bucket_elements, max((w.numel for w in weights if w.trainable), default=0)
        )
        buffer_elements = reduced_elements - reduced_elements // ranks if zero.stage == 2 else 0
        if zero.stage == 3 and bucket_elements == trained:
            # All gradients are in one buffer; gathered parameters peak at another time.
            buffer_elements = reduced_elements
        if zero.master_element_bytes > zero.weight_element_bytes and zero.stage < 3:
            buffer_elements += reduced_elements
        reason = "output of the reduction of a bucket"
        formula = f"{buffer_elements:,} x {zero.master_element_bytes} B"
        yield constant_entry(
            "buckets on their way",
            buffer_elements * zero.master_element_bytes,
            self._reduction_phases,
            formula,
            reason,
        )

    def _gathered_weights_entry(self) -> MemoryEntry:
        """Stage 3: gathered parameters, up to the limit of live elements."""
        zero, rank_memory = self.zero, self.rank_memory
        sharded_elements = sum(
            weight.numel
            for weight in rank_memory.all_weights
            if weight.numel >= zero.persistence_threshold
        )
        live_elements = min(
            sharded_elements, max(zero.max_live_elements, shard_elements(rank_memory.block_weights))
        )
        reason = "gathered for their next use, up to 1e9 elements"
        formula = f"{live_elements:,} x {zero.weight_element_bytes} B"
        return constant_entry(
            "gathered weights",
            live_elements * zero.weight_element_bytes,
            FORWARD_BACKWARD,
            formula,
            reason,
        )
