"""Memory entries of one device with DeepSpeed ZeRO.

Follows ``deepspeed/runtime/zero/stage_1_and_2.py`` and ``stage3.py`` of DeepSpeed 0.18.
"""

from __future__ import annotations

from collections.abc import Iterator

from scalewise.planner.memory_breakdown import (
    AFTER_HEAD,
    ALL_PHASES,
    BACKWARD,
    FORWARD_BACKWARD,
    MemoryEntry,
    StepPhase,
    constant_entry,
)
from scalewise.planner.model_state_memory import ModelStateMemory, PersistentStates
from scalewise.planner.rank_states import ZeroMemory
from scalewise.planner.weight_sizes import shard_elements
from scalewise.precision import FloatFormat


class ZeroPersistentStates(PersistentStates):
    """Entries of compute weights, master weights and optimizer state with ZeRO."""

    @property
    def zero(self) -> ZeroMemory:
        """Partition by ZeRO."""
        assert self.states.zero is not None
        return self.states.zero

    def _parameter_entry(self, dtype: FloatFormat) -> MemoryEntry:
        return super()._parameter_entry(self.configs.precision.compute)

    def iter_entries(self) -> Iterator[MemoryEntry]:
        """Yield the entries."""
        configs, states, zero = self.configs, self.states, self.zero
        yield from super().iter_entries()
        if not states.states_on_host:
            count = states.numel(states.state_shards, trained=True)
            formula = f"{count:,} x {zero.master_element_bytes} B"
            reason = f"{configs.precision.parameters} copy that the optimizer updates"
            yield constant_entry(
                "masters", count * zero.master_element_bytes, ALL_PHASES, formula, reason
            )
        if zero.persistence_threshold:
            small_elements = sum(
                weight.numel
                for weight in states.all_weights
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


class ZeroStateMemory(ModelStateMemory):
    """Entries of gradient partitions, gradient buckets and gathered parameters with ZeRO."""

    @property
    def zero(self) -> ZeroMemory:
        """Partition by ZeRO."""
        assert self.states.zero is not None
        return self.states.zero

    def _gradient_entries(self) -> Iterator[MemoryEntry]:
        states, zero, configs = self.states, self.zero, self.configs
        partition_elements = states.numel(states.state_shards, trained=True)
        formula = f"{partition_elements:,} x {zero.gradient_element_bytes} B"
        if zero.stage == 1:
            yield from self._stage1_gradient_entries()
        elif not states.states_on_host:
            reason = "partition of this rank"
            yield constant_entry(
                "gradients",
                partition_elements * zero.gradient_element_bytes,
                self._gradient_shard_phases,
                formula,
                reason,
            )
        accumulates = configs.accumulation > 1 and zero.stage == 2
        if (
            accumulates
            and zero.gradient_element_bytes
            == zero.weight_element_bytes
            == zero.master_element_bytes
            and not states.states_on_host
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
        states, zero = self.states, self.zero
        trained, element_bytes = states.numel(1, trained=True), zero.gradient_element_bytes
        embedding_weights = tuple(
            w for w in states.other_weights if w.role in ("embedding", "position")
        )
        if self.gradients_persist or zero.num_buckets == 1 or zero.bucket_elements >= trained:
            yield from super()._gradient_entries()
        else:
            weights = tuple(w for w in states.all_weights if w not in embedding_weights)
            large_elements = shard_elements(
                tuple(w for w in weights if w.numel > zero.bucket_elements), trained=True
            )
            stored_elements = states.numel(states.state_shards, trained=True) + large_elements
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
        if self.zero.stage == 3 or self.configs.accumulation > 1:
            return ALL_PHASES
        running = shard_elements(self.states.block_weights, trained=True)
        blocks = self.states.cumulative_trained_elements(shards=1)
        computed_elements = {
            phase: self.head_numel + blocks[finished] + running
            for phase, (_, finished) in self.gradients.blocks_by_phase.items()
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
        takes_all = self.zero.bucket_elements >= self.states.numel(1, trained=True)
        return (StepPhase.reduce_rest,) if takes_all else self._bucket_phases

    def _bucket_entries(self) -> Iterator[MemoryEntry]:
        """Gradient buckets and their reduction buffers."""
        zero, ranks, trained = (
            self.zero,
            self.states.state_shards,
            self.states.numel(1, trained=True),
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
        weights = (*self.states.block_weights, *self.states.other_weights)
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
        zero, states = self.zero, self.states
        sharded_elements = sum(
            weight.numel
            for weight in states.all_weights
            if weight.numel >= zero.persistence_threshold
        )
        live_elements = min(
            sharded_elements, max(zero.max_live_elements, shard_elements(states.block_weights))
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
