"""Memory entries of one device with DeepSpeed ZeRO.

Follows ``stage_1_and_2.py``, ``stage3.py`` and ``partitioned_param_coordinator.py`` in
``deepspeed/runtime/zero`` of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from scalewise.models.base import Weight
from scalewise.planner.memory_breakdown import (
    AFTER_HEAD,
    ALL_PHASES,
    FORWARD_BACKWARD,
    REDUCTION_PHASES,
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
            yield from self._gathered_weight_entries()

    def _stage1_gradient_entries(self) -> Iterator[MemoryEntry]:
        """Gradients of stage 1: in place, or copied into buckets as they are computed."""
        states, zero = self.states, self.zero
        trained, element_bytes = states.numel(1, trained=True), zero.gradient_element_bytes
        embedding_weights = self._embedding_weights
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
        computed_elements = self._computed_elements
        bucket_phases = (
            phase
            for phase in AFTER_HEAD[:-1]
            if computed_elements[phase] >= self.zero.bucket_elements
        )
        return (*bucket_phases, StepPhase.reduce_rest, StepPhase.optimizer)

    @property
    def _computed_elements(self) -> dict[StepPhase, int]:
        """Elements of gradients that backward has computed at the end of each phase."""
        running = shard_elements(self.states.block_weights, trained=True)
        blocks = self.states.cumulative_trained_elements(shards=1)
        computed = {
            phase: self.head_numel + blocks[finished] + running
            for phase, (_, finished) in self.gradients.blocks_by_phase.items()
        }
        return computed | {StepPhase.reduce_rest: self.states.numel(1, trained=True)}

    @property
    def _has_contiguous_buffer(self) -> bool:
        """Whether stage 3 has a bucket in the dtype of its reductions, allocated at the start."""
        return self.zero.stage == 3 and self.zero.num_buckets == 1

    @property
    def _reduction_phases(self) -> tuple[StepPhase, ...]:
        """Phases that reduce buckets; a bucket for all gradients is reduced after backward."""
        if self.zero.bucket_elements >= self.states.numel(1, trained=True):
            return (StepPhase.reduce_rest,)
        return REDUCTION_PHASES if self.zero.stage == 3 else AFTER_HEAD

    def _bucket_entries(self) -> Iterator[MemoryEntry]:
        """Gradient buckets and their reduction buffers."""
        zero, ranks, trained = (
            self.zero,
            self.states.state_shards,
            self.states.numel(1, trained=True),
        )
        bucket_elements = min(zero.bucket_elements, trained)
        if zero.stage == 3:
            yield self._stage3_bucket_entry(bucket_elements)
            yield self._reduce_scatter_entry(bucket_elements)
            return
        yield constant_entry(
            "buckets",
            zero.num_buckets * bucket_elements * zero.weight_element_bytes,
            AFTER_HEAD,
            f"{zero.num_buckets} x {bucket_elements:,} x {zero.weight_element_bytes} B",
            "filled with gradients, then reduced",
        )
        weights = (*self.states.block_weights, *self.states.other_weights)
        # A gradient larger than a bucket is reduced separately.
        reduced_elements = max(
            bucket_elements, max((w.numel for w in weights if w.trainable), default=0)
        )
        buffer_elements = reduced_elements - reduced_elements // ranks if zero.stage == 2 else 0
        if zero.master_element_bytes > zero.weight_element_bytes:
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

    def _stage3_bucket_entry(self, bucket_elements: int) -> MemoryEntry:
        """Gradients of stage 3 until their reduction: copied into a buffer, or in place."""
        zero = self.zero
        if self._has_contiguous_buffer:
            element_bytes = zero.master_element_bytes
            sizes = dict.fromkeys(ALL_PHASES, bucket_elements * element_bytes)
        else:
            element_bytes, computed = zero.weight_element_bytes, self._computed_elements
            sizes = {
                phase: min(bucket_elements, computed[phase]) * element_bytes for phase in AFTER_HEAD
            }
        formula = f"{bucket_elements:,} x {element_bytes} B"
        return MemoryEntry("buckets", sizes, formula, "filled with gradients, then reduced")

    def _reduce_scatter_entry(self, bucket_elements: int) -> MemoryEntry:
        """Input of a reduce-scatter of stage 3: a bucket in the order of the ranks.

        A gradient larger than a bucket is reduced separately, in place if it has the dtype of the
        reduction. Without a buffer, the gradients of a bucket are first cast to that dtype.
        """
        others, embeddings = self.states.other_weights, self._embedding_weights
        copies_largest = self.zero.master_element_bytes > self.zero.weight_element_bytes
        weights_by_phase = {
            StepPhase.reduce_head: tuple(it for it in others if it not in embeddings),
            StepPhase.reduce_last: self.states.block_weights,
            StepPhase.reduce_block: self.states.block_weights,
            StepPhase.reduce_rest: embeddings,
        }
        elements = {
            phase: max(
                bucket_elements,
                *(it.numel for it in weights_by_phase[phase] if it.trainable and copies_largest),
                0,
            )
            for phase in self._reduction_phases
        }
        casts_bucket = copies_largest and not self._has_contiguous_buffer
        element_bytes = self.zero.master_element_bytes * (1 + casts_bucket)
        return MemoryEntry(
            "buckets on their way",
            {phase: count * element_bytes for phase, count in elements.items()},
            f"{max(elements.values()):,} x {element_bytes} B",
            "gradients concatenated by rank for their reduction",
        )

    def _gathered_weight_entries(self) -> Iterator[MemoryEntry]:
        """Stage 3: gathered parameters, up to the limit of live elements, and their buffers."""
        zero, states = self.zero, self.states
        blocks = [self._sharded_elements(block) for block in states.list_block_weights()]
        embeddings = self._embedding_weights
        # Weights are freed after their last use: those of a frozen embedding in the forward pass.
        kept = self._sharded_elements(tuple(weight for weight in embeddings if weight.trainable))
        others = self._sharded_elements(states.other_weights)
        if not self.has_tied_weights:
            others += kept - self._sharded_elements(embeddings)
        live_limit = max(zero.max_live_elements, shard_elements(states.block_weights))
        live_elements = {
            phase: min(
                live_limit,
                sum(blocks[: len(blocks) - done]) + (kept if phase in AFTER_HEAD else others),
            )
            for phase, (_, done) in self.gradients.blocks_by_phase.items()
        }
        largest = max(live_elements.values())
        yield MemoryEntry(
            "gathered weights",
            {phase: count * zero.weight_element_bytes for phase, count in live_elements.items()},
            f"{largest:,} x {zero.weight_element_bytes} B",
            "gathered for their next use, up to 1e9 elements",
        )
        buffer_elements = self._gather_buffer_elements()
        yield constant_entry(
            "gather buffer",
            buffer_elements * zero.weight_element_bytes,
            # Weights that all stay gathered are not gathered again in the backward pass.
            FORWARD_BACKWARD if sum(blocks) + others > live_limit else (StepPhase.forward,),
            f"{buffer_elements:,} x {zero.weight_element_bytes} B",
            "weights are copied out of it at their first use, and it is freed after their last",
        )

    @property
    def _embedding_weights(self) -> tuple[Weight, ...]:
        """Weights of token and position embeddings."""
        others = self.states.other_weights
        return tuple(weight for weight in others if weight.role in ("embedding", "position"))

    def _sharded_elements(self, weights: tuple[Weight, ...]) -> int:
        """Elements of the weights that do not stay unsharded."""
        return sum(it.numel for it in weights if it.numel >= self.zero.persistence_threshold)

    def _gather_buffer_elements(self) -> int:
        """Largest group of weights that is gathered together, of at least the prefetch bucket.

        DeepSpeed forms groups in the order of the forward pass. A group of one is gathered in
        place.
        """
        states, embeddings = self.states, self._embedding_weights
        rest = tuple(weight for weight in states.other_weights if weight not in embeddings)
        largest = group_elements = group_size = 0
        for weight in (*embeddings, *chain.from_iterable(states.list_block_weights()), *rest):
            if weight.numel >= self.zero.persistence_threshold:
                group_elements, group_size = group_elements + weight.numel, group_size + 1
                largest = max(largest, group_elements * (group_size > 1))
                if group_elements >= self.zero.prefetch_elements:
                    group_elements = group_size = 0
        return largest
