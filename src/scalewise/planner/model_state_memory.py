"""Memory entries of parameters, optimizer state and gradients on one device."""

from __future__ import annotations

from collections.abc import Iterator

from scalewise.callback_config import AVERAGE_BYTES_PER_ELEMENT
from scalewise.planner.memory_breakdown import (
    AFTER_HEAD,
    ALL_PHASES,
    FORWARD_BACKWARD,
    REDUCTION_PHASES,
    MemoryEntry,
    StepPhase,
    constant_entry,
)
from scalewise.planner.rank_memory import FSDPMemory, shard_bytes, shard_elements
from scalewise.planner.rank_step import RankStep
from scalewise.precision import FloatFormat


class ModelStateMemory(RankStep):
    """Entries of model states, which a strategy may override."""

    def iter_state_entries(self) -> Iterator[MemoryEntry]:
        """Yield the entries of parameters, optimizer state and gradients."""
        yield from self._persistent_entries()
        yield from self._gradient_entries()
        if self.has_tied_weights:
            yield self._tied_gradient_entry()
            if self.step_scratch_ratio > 0:
                size = (
                    shard_elements(self.rank_memory.other_weights, trained=True)
                    * self.gradient_element_bytes
                )
                reason = "tied weight, when both its gradients are summed"
                yield constant_entry(
                    "step",
                    round(size * (1 + self.step_scratch_ratio)),
                    (StepPhase.reduce_rest,),
                    "",
                    reason,
                )
        if self.fsdp is not None and self.reduces_after_schedule:
            yield from self._pipeline_fsdp_entries(self.fsdp)
        elif self.fsdp is not None:
            yield from self._fsdp_entries(self.fsdp)

    def _persistent_entries(self) -> Iterator[MemoryEntry]:
        run, rank_memory = self.run, self.rank_memory
        if not rank_memory.parameters_on_host:
            yield self._parameter_entry(run.precision.parameters)
        num_stages = len(rank_memory.stages)
        element_bytes = rank_memory.forward_spec.rope_element_bytes
        formula = f"2 x model.context x head size x {element_bytes} B"
        yield constant_entry(
            "buffers",
            getattr(run.model, "buffer_bytes", 0) * num_stages * element_bytes // 4,
            ALL_PHASES,
            f"{num_stages} stages x {formula}" if num_stages > 1 else formula,
            "RoPE tables of all positions, unsharded on every rank",
        )
        yield constant_entry(
            "workspaces",
            run.hardware.matmul_workspace_bytes,
            ALL_PHASES,
            f"{run.hardware.matmul_workspace_mib:g} MiB",
            "allocated at the first matmuls and kept",
        )
        trained, state = (
            rank_memory.numel(rank_memory.state_shards, trained=True),
            rank_memory.state_bytes(run),
        )
        if state and not (rank_memory.states_on_host or rank_memory.states_paged):
            yield constant_entry(
                "optimizer state",
                state,
                ALL_PHASES,
                f"{trained:,} x {state / trained:.4g} B",
                "for each trained parameter element",
            )
        if not rank_memory.parameters_on_host:
            averaged = rank_memory.numel(rank_memory.parameter_shards, trained=True)
            formula = f"{averaged:,} x {AVERAGE_BYTES_PER_ELEMENT} B"
            reason = "moving average of the weights, sharded like them"
            yield constant_entry("average", rank_memory.ema_bytes(run), ALL_PHASES, formula, reason)
        if rank_memory.forward_spec.on_cpu and self.step_scratch_ratio < 0:
            scratch = rank_memory.scratch_bytes(run)
            when = REDUCTION_PHASES if run.optimizer.in_backward else (StepPhase.optimizer,)
            yield constant_entry("step", scratch, when, "", "update of the largest parameter")

    def _parameter_entry(self, dtype: FloatFormat) -> MemoryEntry:
        shards = self.rank_memory.parameter_shards
        size, count = (
            self.rank_memory.weight_bytes(dtype.bytes, shards),
            self.rank_memory.numel(shards),
        )
        shared = f", 1 of {shards} shards" if shards > 1 else ""
        packed = (count * dtype.bytes - size) // (dtype.bytes - 1)
        formula, reason = f"{count:,} x {dtype.bytes} B{shared}", f"stored in {dtype}"
        if packed:
            formula = f"{packed:,} B + {count - packed:,} x {dtype.bytes} B{shared}"
            reason = f"packed matrices; the rest is stored in {dtype}"
        return constant_entry("parameters", size, ALL_PHASES, formula, reason)

    def _gradient_entries(self) -> Iterator[MemoryEntry]:
        if self.run.optimizer.in_backward:
            return
        rank_memory, element_bytes = self.rank_memory, self.gradient_element_bytes
        count = rank_memory.numel(rank_memory.gradient_shards, trained=True)
        gradient_bytes = count * element_bytes
        if rank_memory.bucket_copy_bytes:
            yield constant_entry(
                "buckets",
                rank_memory.bucket_copy_bytes,
                ALL_PHASES,
                f"{count:,} x {element_bytes} B",
                "copies for the all-reduce",
            )
        reason = "computed during the backward pass"
        if self.gradients_persist:
            reason = "accumulated over micro-batches"
            if rank_memory.has_persistent_buckets:
                reason = "in buckets that persist between steps"
            yield constant_entry(
                "gradients", gradient_bytes, ALL_PHASES, f"{count:,} x {element_bytes} B", reason
            )
            if rank_memory.has_persistent_buckets and self.run.accumulation > 1:
                yield self._earlier_gradient_entry(
                    element_bytes, "each is copied into its bucket once complete"
                )
            return
        if self.reduces_after_schedule:
            sizes = {StepPhase.optimizer: gradient_bytes}
            reason = "shards, reduced after the last backward"
            yield MemoryEntry("gradients", sizes, f"{count:,} x {element_bytes} B", reason)
            return
        block_bytes, head_bytes = (
            self.block_liveness.gradient_bytes,
            self.head_liveness.gradient_bytes,
        )
        if rank_memory.fsdp is not None:
            block_bytes = (
                shard_elements(rank_memory.block_weights, rank_memory.gradient_shards, trained=True)
                * element_bytes
            )
            head_bytes = 0
        bytes_by_phase = {
            phase: done * block_bytes + head_bytes
            for phase, (_, done) in self.blocks_by_phase.items()
            if phase in AFTER_HEAD
        }
        bytes_by_phase |= {StepPhase.optimizer: gradient_bytes}
        yield MemoryEntry("gradients", bytes_by_phase, f"{count:,} x {element_bytes} B", reason)

    def _tied_gradient_entry(self) -> MemoryEntry:
        """Tied weight: both gradients are alive until autograd sums them, out of place.

        With tensor parallelism, the unsharded gradient of the embedding, which its backward counts,
        is larger than the sum and freed before it.
        """
        forward_spec = self.rank_memory.forward_spec
        (name,) = self.run.model.tied_weights
        (weight,) = (weight for weight in self.rank_memory.other_weights if weight.name == name)
        size = weight.numel * forward_spec.gradient_element_bytes * weight.trainable
        is_waiting = self.head_liveness.gradient_bytes == 0
        copies = is_waiting + (forward_spec.tensor_ranks == 1)
        phases = dict.fromkeys(AFTER_HEAD[:-2], size * is_waiting)
        phases |= {StepPhase.backward_embedding: size * copies}
        return MemoryEntry(
            "gradient of the tied head",
            phases,
            f"{copies} x {weight.numel:,} x {forward_spec.gradient_element_bytes} B",
            "of the head, and its sum with the embedding's gradient"
            if is_waiting
            else "sum of the head's gradient and the embedding's",
        )

    @property
    def gathered_block_bytes(self) -> int:
        """Size of the gathered parameters of a block with FSDP, in bytes."""
        fsdp, weights = self.fsdp, self.rank_memory.block_weights
        if fsdp is None:
            return 0
        return shard_bytes(weights, fsdp.gathered_element_bytes, fsdp.num_shards) * fsdp.num_shards

    @property
    def gathers_in_schedule(self) -> bool:
        """Whether backward gathers parameters in a pipeline, which keeps them unsharded."""
        fsdp = self.rank_memory.fsdp
        gathers = fsdp is not None and not fsdp.keeps_unsharded and self.peak_point.follows_forward
        return self.reduces_after_schedule and gathers

    def _fsdp_entries(self, fsdp: FSDPMemory) -> Iterator[MemoryEntry]:
        """FSDP: parameters gathered around the running block, and gradients being reduced."""
        rank_memory, shards = self.rank_memory, fsdp.num_shards
        block = self.gathered_block_bytes
        rest_bytes = (
            shard_bytes(rank_memory.other_weights, fsdp.gathered_element_bytes, shards) * shards
        )
        layers, keeps_unsharded = rank_memory.num_layers, fsdp.keeps_unsharded
        yield constant_entry(
            "gathered weights outside of blocks",
            rest_bytes,
            FORWARD_BACKWARD[:-1],
            f"{rest_bytes // fsdp.gathered_element_bytes:,} x {fsdp.gathered_element_bytes} B",
            "gathered for the whole forward and backward pass",
        )
        # FSDP2 keeps the all-gather buffer for one block, and the last buffer until the forward
        # of the module ends; a chunked loss is computed after that.
        block_bytes, kept_blocks = block, layers * keeps_unsharded
        last_gather_bytes = block_bytes * (rank_memory.forward_spec.loss_chunk > 0)
        prefetched = min(fsdp.prefetch, layers - 1)
        bytes_by_phase = {
            StepPhase.forward: max(kept_blocks, 1) * block_bytes + block_bytes,
            StepPhase.loss: kept_blocks * block_bytes + last_gather_bytes,
            StepPhase.backward_loss: kept_blocks * block_bytes,
            StepPhase.backward_head: (kept_blocks or prefetched) * block_bytes,
            StepPhase.backward_last: (kept_blocks or 1 + prefetched) * block_bytes,
            StepPhase.reduce_last: (max(kept_blocks - 1, 0) or prefetched) * block_bytes,
            StepPhase.backward_next: (max(kept_blocks - 1, 0) or 1 + min(prefetched, layers - 2))
            * block_bytes,
            StepPhase.backward_second: (2 * keeps_unsharded or 1 + min(prefetched, 1))
            * block_bytes,
            StepPhase.backward_first: block_bytes,
            StepPhase.reduce_block: 0,
        }
        yield MemoryEntry(
            "gathered weights of blocks",
            bytes_by_phase,
            f"{block:,} B per block",
            "kept after forward" if keeps_unsharded else "the running block and prefetched blocks",
        )
        if fsdp.has_unsharded_gradients:
            yield self._earlier_gradient_entry(
                fsdp.reduced_element_bytes, "kept until the reduction in the last micro-batch"
            )
        if fsdp.has_replicas and (self.gradients_persist or self.run.optimizer.in_backward):
            yield self._replica_gradient_entry(fsdp)
        block_elements = shard_elements(rank_memory.block_weights, shards, trained=True) * shards
        other_elements = shard_elements(rank_memory.other_weights, shards, trained=True) * shards
        reduced_bytes = block_elements * fsdp.reduced_element_bytes
        block_gradient_bytes, root_gradient_bytes = (
            self.block_liveness.gradient_bytes,
            self.head_liveness.gradient_bytes + self.embedding_liveness.gradient_bytes,
        )
        tied_gradient_bytes = (
            self.head_liveness.gradient_bytes if self.run.model.tied_weights else 0
        )
        reducing_bytes = self.head_liveness.gradient_bytes + (layers > 1) * reduced_bytes
        yield MemoryEntry(
            "gradients on their way to shards",
            {
                StepPhase.backward_last: self.head_liveness.gradient_bytes,
                StepPhase.reduce_last: self.head_liveness.gradient_bytes
                + block_gradient_bytes
                + reduced_bytes,
                StepPhase.backward_next: reducing_bytes,
                StepPhase.backward_second: reducing_bytes,
                StepPhase.backward_first: reducing_bytes,
                StepPhase.reduce_block: self.head_liveness.gradient_bytes
                + block_gradient_bytes
                + reduced_bytes,
                StepPhase.backward_embedding: self.head_liveness.gradient_bytes + reduced_bytes,
                StepPhase.reduce_rest: root_gradient_bytes
                - tied_gradient_bytes
                + other_elements * fsdp.reduced_element_bytes,
            },
            f"{block_elements:,} x {fsdp.reduced_element_bytes} B per block",
            "unsharded gradients and the buffer of one reduction",
        )

    def _pipeline_fsdp_entries(self, fsdp: FSDPMemory) -> Iterator[MemoryEntry]:
        """FSDP in a pipeline: backward neither reshards parameters nor reduces gradients.

        The forward after a backward gathers nothing, and reshards each block. After the schedule,
        the weights outside of blocks are reduced first.
        """
        rank_memory, point, shards = self.rank_memory, self.peak_point, fsdp.num_shards
        layers, gradient_bytes = rank_memory.num_layers, fsdp.reduced_element_bytes
        block = self.gathered_block_bytes
        rest = shard_bytes(rank_memory.other_weights, fsdp.gathered_element_bytes, shards) * shards
        yield constant_entry(
            "gathered weights outside of blocks",
            rest,
            FORWARD_BACKWARD[:-1],
            f"{rest // fsdp.gathered_element_bytes:,} x {fsdp.gathered_element_bytes} B",
            "gathered for the whole forward and backward pass",
        )
        kept = layers * fsdp.keeps_unsharded
        # Blocks of the rank's other stages, whose forward does not follow their backward.
        others = (layers - layers // len(rank_memory.stages)) * (point.finished_backwards > 0)
        gathers = not point.finished_backwards and not (kept and point.waiting_passes)
        prefetched = min(fsdp.prefetch, layers - 1)
        blocks = {
            StepPhase.forward: (kept or others + 1) + gathers,
            StepPhase.loss: (kept or others)
            + (gathers and rank_memory.forward_spec.loss_chunk > 0),
            StepPhase.backward_loss: kept or others,
            StepPhase.backward_head: kept or others + 1,
        }
        blocks |= {
            phase: kept or min(layers, others + done + 1 + prefetched)
            for phase, (_, done) in self.blocks_by_phase.items()
            if phase in AFTER_HEAD
        }
        yield MemoryEntry(
            "gathered weights of blocks",
            {phase: count * block for phase, count in blocks.items()},
            f"{block:,} B per block",
            "kept until the next forward",
        )
        block_gradient = shard_elements(rank_memory.block_weights, trained=True) * gradient_bytes
        rest_gradient = shard_elements(rank_memory.other_weights, trained=True) * gradient_bytes
        if point.finished_backwards:
            sizes = dict.fromkeys(FORWARD_BACKWARD, layers * block_gradient + rest_gradient)
        else:
            head = self.head_numel * gradient_bytes * rank_memory.has_head
            sizes = {
                phase: done * block_gradient + head
                for phase, (_, done) in self.blocks_by_phase.items()
                if phase in AFTER_HEAD
            }
        yield MemoryEntry(
            "whole gradients",
            sizes,
            f"{block_gradient:,} B per block, and {rest_gradient:,} B",
            "kept until the reduction after the last backward",
        )
        padded = shard_elements(rank_memory.other_weights, shards, trained=True)
        yield constant_entry(
            "gradients on their way to shards",
            padded * (shards + 1) * gradient_bytes,
            (StepPhase.reduce_rest,),
            f"{padded:,} x {shards + 1} x {gradient_bytes} B",
            "buffers of one reduction",
        )

    def _earlier_gradient_entry(self, element_bytes: int, reason: str) -> MemoryEntry:
        """Unsharded gradients of earlier micro-batches that are not yet in their bucket."""
        block = shard_elements(self.rank_memory.block_weights, trained=True) * element_bytes
        rest = shard_elements(self.rank_memory.other_weights, trained=True) * element_bytes
        moves_to_bucket = self.rank_memory.fsdp is None and not self.has_tied_weights
        remaining_bytes = rest - self.head_numel * element_bytes * moves_to_bucket
        layers = self.rank_memory.num_layers
        phases = {
            phase: (layers - done) * block + (remaining_bytes if phase in AFTER_HEAD else rest)
            for phase, (_, done) in self.blocks_by_phase.items()
        }
        formula = f"{layers} blocks x {block:,} B + {rest:,} B"
        return MemoryEntry("gradients of earlier micro batches", phases, formula, reason)

    def _replica_gradient_entry(self, fsdp: FSDPMemory) -> MemoryEntry:
        """All-reduced gradient shards, which FSDP2 keeps until backward ends."""
        block = (
            shard_elements(self.rank_memory.block_weights, fsdp.num_shards, trained=True)
            * fsdp.reduced_element_bytes
        )
        phases = {phase: done * block for phase, (_, done) in self.blocks_by_phase.items()}
        return MemoryEntry(
            "sums over replicas", phases, f"{block:,} B per block", "kept until backward ends"
        )
