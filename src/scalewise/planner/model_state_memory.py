"""Memory entries of parameters, optimizer state and gradients on one device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from scalewise.callback_config import AVERAGE_BYTES_PER_ELEMENT
from scalewise.planner.fsdp_memory import FSDPStateMemory
from scalewise.planner.memory_breakdown import (
    AFTER_HEAD,
    ALL_PHASES,
    REDUCTION_PHASES,
    MemoryEntry,
    StepPhase,
    constant_entry,
)
from scalewise.planner.weight_sizes import shard_elements
from scalewise.precision import FloatFormat


class ModelStateMemory(FSDPStateMemory):
    """Entries of model states, which a strategy may override."""

    @cached_property
    def persistent_entries(self) -> tuple[MemoryEntry, ...]:
        """Entries of parameters and optimizer state, the same at all points of a step."""
        return tuple(self._persistent_entries())

    def iter_gradient_entries(self) -> Iterator[MemoryEntry]:
        """Yield the entries of gradients and of gathered parameters."""
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
        yield from self.iter_fsdp_entries()

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
        on_cpu = rank_memory.forward_spec.on_cpu  # kernels of CUDA optimizers are fused
        if run.precision.stochastic_rounding or (on_cpu and self.step_scratch_ratio < 0):
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
        if self.run.optimizer.in_backward or self.accumulates_unsharded:
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
                yield self.earlier_gradient_entry(
                    element_bytes, "each is copied into its bucket once complete"
                )
            return
        if self.reduces_after_schedule:
            sizes = {StepPhase.optimizer: gradient_bytes}
            reason = "shards, reduced after the last backward"
            yield MemoryEntry("gradients", sizes, f"{count:,} x {element_bytes} B", reason)
            return
        block_bytes, head_bytes = (
            self.liveness.cumulative_gradient_bytes,
            self.head_liveness.gradient_bytes,
        )
        if rank_memory.fsdp is not None:
            shards = rank_memory.gradient_shards
            block_bytes = tuple(
                element_bytes * elements
                for elements in rank_memory.cumulative_trained_elements(shards)
            )
            head_bytes = element_bytes * shard_elements(
                rank_memory.fsdp.groups.head, shards, trained=True
            )
        bytes_by_phase = {
            phase: block_bytes[done] + head_bytes
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
