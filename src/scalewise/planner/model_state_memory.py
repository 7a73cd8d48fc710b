"""Memory entries of parameters, optimizer state and gradients on one device."""

from __future__ import annotations

from collections.abc import Iterator

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
from scalewise.planner.rank_states import RankStates
from scalewise.planner.rank_step import StateConfigs
from scalewise.planner.weight_sizes import shard_elements
from scalewise.precision import FloatFormat


class PersistentStates:
    """Entries of parameters and optimizer state, the same at all points of a step.

    Args:
        configs: Configs of the run.
        states: Model states of the rank.
    """

    def __init__(self, configs: StateConfigs, states: RankStates) -> None:
        self.configs, self.states = configs, states

    def iter_entries(self) -> Iterator[MemoryEntry]:
        """Yield the entries."""
        configs, states = self.configs, self.states
        if not states.parameters_on_host:
            yield self._parameter_entry(configs.precision.parameters)
        num_stages = len(states.stages)
        element_bytes = configs.rope_element_bytes
        formula = f"2 x model.context x head size x {element_bytes} B"
        yield constant_entry(
            "buffers",
            getattr(configs.model, "buffer_bytes", 0) * num_stages * element_bytes // 4,
            ALL_PHASES,
            f"{num_stages} stages x {formula}" if num_stages > 1 else formula,
            "RoPE tables of all positions, unsharded on every rank",
        )
        yield constant_entry(
            "workspaces",
            configs.hardware.matmul_workspace_bytes,
            ALL_PHASES,
            f"{configs.hardware.matmul_workspace_mib:g} MiB",
            "allocated at the first matmuls and kept",
        )
        trained, state = (
            states.numel(states.state_shards, trained=True),
            states.state_bytes(configs),
        )
        if state and not (states.states_on_host or states.states_paged):
            yield constant_entry(
                "optimizer state",
                state,
                ALL_PHASES,
                f"{trained:,} x {state / trained:.4g} B",
                "for each trained parameter element",
            )
        if not states.average_on_host:
            formula = f"{states.average_elements:,} x {AVERAGE_BYTES_PER_ELEMENT} B"
            averaged = "weights" if states.zero is None else "masters"
            reason = f"moving average of the {averaged}, sharded like them"
            yield constant_entry(
                "average", states.average_bytes * configs.has_average, ALL_PHASES, formula, reason
            )
        steps_after_backward = not configs.optimizer.in_backward or states.fsdp is not None
        # Kernels of CUDA optimizers are fused.
        has_scratch = configs.on_cpu and steps_after_backward
        if configs.precision.stochastic_rounding or has_scratch:
            scratch = states.scratch_bytes(configs)
            when = REDUCTION_PHASES if configs.optimizer.in_backward else (StepPhase.optimizer,)
            yield constant_entry("step", scratch, when, "", "update of the largest parameter")

    def _parameter_entry(self, dtype: FloatFormat) -> MemoryEntry:
        shards = self.states.parameter_shards
        size, count = (
            self.states.weight_bytes(dtype.bytes, shards),
            self.states.numel(shards),
        )
        shared = f", 1 of {shards} shards" if shards > 1 else ""
        packed = (count * dtype.bytes - size) // (dtype.bytes - 1)
        formula, reason = f"{count:,} x {dtype.bytes} B{shared}", f"stored in {dtype}"
        if packed:
            formula = f"{packed:,} B + {count - packed:,} x {dtype.bytes} B{shared}"
            reason = f"packed matrices; the rest is stored in {dtype}"
        return constant_entry("parameters", size, ALL_PHASES, formula, reason)


class ModelStateMemory(FSDPStateMemory):
    """Entries of gradients and of gathered parameters, which a strategy may override."""

    def iter_gradient_entries(self) -> Iterator[MemoryEntry]:
        """Yield the entries of gradients and of gathered parameters."""
        yield from self._gradient_entries()
        if self.has_tied_weights:
            yield self._tied_gradient_entry()
            if self.step_scratch_ratio > 0:
                size = (
                    shard_elements(self.states.other_weights, trained=True)
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

    def _gradient_entries(self) -> Iterator[MemoryEntry]:
        if self.configs.optimizer.in_backward or self.accumulates_unsharded:
            return
        states, element_bytes = self.states, self.gradient_element_bytes
        count = states.numel(states.gradient_shards, trained=True)
        gradient_bytes = count * element_bytes
        if states.bucket_copy_bytes:
            yield constant_entry(
                "buckets",
                states.bucket_copy_bytes,
                ALL_PHASES,
                f"{count:,} x {element_bytes} B",
                "copies for the all-reduce",
            )
        reason = "computed during the backward pass"
        if self.gradients_persist:
            reason = "accumulated over micro-batches"
            if states.has_persistent_buckets:
                reason = "in buckets that persist between steps"
            yield constant_entry(
                "gradients", gradient_bytes, ALL_PHASES, f"{count:,} x {element_bytes} B", reason
            )
            if states.has_persistent_buckets and self.configs.accumulation > 1:
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
            self.gradients.cumulative,
            self.gradients.head,
        )
        if states.fsdp is not None:
            shards = states.gradient_shards
            block_bytes = tuple(
                element_bytes * elements for elements in states.cumulative_trained_elements(shards)
            )
            head_bytes = element_bytes * shard_elements(
                states.fsdp.groups.head, shards, trained=True
            )
        bytes_by_phase = {
            phase: block_bytes[done] + head_bytes
            for phase, (_, done) in self.gradients.blocks_by_phase.items()
            if phase in AFTER_HEAD
        }
        bytes_by_phase |= {StepPhase.optimizer: gradient_bytes}
        yield MemoryEntry("gradients", bytes_by_phase, f"{count:,} x {element_bytes} B", reason)

    def _tied_gradient_entry(self) -> MemoryEntry:
        """Tied weight: both gradients are alive until autograd sums them, out of place.

        With tensor parallelism, the unsharded gradient of the embedding, which its backward counts,
        is larger than the sum and freed before it.
        """
        configs = self.configs
        (name,) = self.configs.model.tied_weights
        (weight,) = (weight for weight in self.states.other_weights if weight.name == name)
        size = weight.numel * configs.gradient_element_bytes * weight.trainable
        is_waiting = self.gradients.head == 0
        copies = is_waiting + (configs.tensor_ranks == 1)
        phases = dict.fromkeys(AFTER_HEAD[:-2], size * is_waiting)
        phases |= {StepPhase.backward_embedding: size * copies}
        return MemoryEntry(
            "gradient of the tied head",
            phases,
            f"{copies} x {weight.numel:,} x {configs.gradient_element_bytes} B",
            "of the head, and its sum with the embedding's gradient"
            if is_waiting
            else "sum of the head's gradient and the embedding's",
        )
