"""Memory entries of FSDP on one device: gathered parameters and gradients in reduction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scalewise.models.base import Weight
from scalewise.planner.memory_breakdown import (
    AFTER_HEAD,
    FORWARD_BACKWARD,
    HEAD_PHASES,
    MemoryEntry,
    StepPhase,
    constant_entry,
)
from scalewise.planner.rank_states import FSDPMemory, RankStates
from scalewise.planner.rank_step import PeakPoint, RankStep, StateConfigs
from scalewise.planner.step_liveness import StepGradients
from scalewise.planner.weight_sizes import shard_elements


class FSDPStateMemory(RankStep):
    """Entries of a rank whose parameters FSDP shards.

    Args:
        configs: Configs of the run.
        states: Model states of the rank.
        peak_point: Point of the pipeline schedule.
        gradients: Gradients of the parts of the rank.
    """

    def __init__(
        self,
        configs: StateConfigs,
        states: RankStates,
        peak_point: PeakPoint,
        gradients: StepGradients,
    ) -> None:
        super().__init__(configs, states, peak_point)
        self.gradients = gradients

    def iter_fsdp_entries(self) -> Iterator[MemoryEntry]:
        """Yield the entries of gathered parameters and of gradients before they are shards."""
        if self.fsdp is None:
            return
        if self.reduces_after_schedule:
            yield from self._pipeline_fsdp_entries(self.fsdp)
        else:
            yield from self._fsdp_entries(self.fsdp)

    def _fsdp_entries(self, fsdp: FSDPMemory) -> Iterator[MemoryEntry]:
        """FSDP: parameters gathered around the running block, and gradients being reduced."""
        states = self.states
        block = self.gathered_block_bytes
        layers, keeps_unsharded = states.num_layers, fsdp.keeps_unsharded
        yield self._gathered_outside_entry(fsdp)
        blocks = [*map(fsdp.gathered_bytes, states.list_block_weights())]
        prefetched_blocks = [*map(fsdp.all_gather_bytes, states.list_block_weights())]
        kept = sum(blocks) * keeps_unsharded
        next_block = self.gradients.blocks_by_phase[StepPhase.backward_next][0]

        def gathered(end: int, running: int = 1) -> int:
            """Gathered blocks before ``end``: the running ones and prefetched ones, or all."""
            start = 0 if keeps_unsharded else max(0, end - running)
            prefetched = prefetched_blocks[max(0, start - fsdp.prefetch) : start]
            return sum(blocks[start:end]) + sum(prefetched)

        # FSDP2 keeps the all-gather buffer for one block.
        gather_buffer = self.gather_buffer_bytes * (not fsdp.keeps_between_passes)
        bytes_by_phase = {
            StepPhase.forward: (kept or block) + gather_buffer,
            StepPhase.loss: kept,
            StepPhase.backward_loss: kept,
            StepPhase.backward_head: min(gathered(layers, 0), kept or sum(blocks[1:])),
            StepPhase.reduce_head: min(gathered(layers, 0), kept or sum(blocks[1:])),
            StepPhase.backward_last: gathered(layers),
            StepPhase.reduce_last: gathered(layers - 1, 0),
            StepPhase.backward_next: gathered(next_block + 1) * (layers > 1),
            StepPhase.backward_second: gathered(2),
            StepPhase.backward_first: blocks[0],
            StepPhase.reduce_block: 0,
        }
        if self.peak_point.keeps_unsharded:
            bytes_by_phase = dict.fromkeys(FORWARD_BACKWARD, sum(blocks))
        yield MemoryEntry(
            "gathered weights of blocks",
            bytes_by_phase,
            f"{block:,} B per block",
            "kept after forward" if keeps_unsharded else "the running block and prefetched blocks",
        )
        if fsdp.has_unsharded_gradients:
            yield self.earlier_gradient_entry(
                fsdp.reduced_element_bytes, "kept until the reduction in the last micro-batch"
            )
        if fsdp.has_replicas and (self.gradients_persist or self.configs.optimizer.in_backward):
            yield self._replica_gradient_entry(fsdp)
        yield self._reduction_entry(fsdp)

    def _gathered_outside_entry(self, fsdp: FSDPMemory) -> MemoryEntry:
        """Gathered parameters of the root, of the embedding and of the head."""
        groups = fsdp.groups
        embedding, head, root = map(
            fsdp.gathered_bytes, (groups.embedding, groups.head, groups.root)
        )
        bytes_by_phase = dict.fromkeys(
            FORWARD_BACKWARD[:-1], root + embedding * fsdp.keeps_unsharded
        )
        # In a pipeline, the head stays unsharded until the schedule has ended.
        keeps_head = self.reduces_after_schedule or self.peak_point.keeps_unsharded
        for phase in FORWARD_BACKWARD if keeps_head else HEAD_PHASES:
            bytes_by_phase[phase] = bytes_by_phase.get(phase, 0) + head
        return MemoryEntry(
            "gathered weights outside of blocks",
            bytes_by_phase,
            f"{root:,} B, {head:,} B of the head",
            "the rest for the whole pass, the head for its forward and backward",
        )

    def _reduction_entry(self, fsdp: FSDPMemory) -> MemoryEntry:
        """Unsharded gradients outside of blocks, and the buffer of the reduction that runs."""
        groups, block = fsdp.groups, self.states.block_weights
        if self.accumulates_unsharded:
            fsdp = replace(fsdp, reduced_element_bytes=0)
        (block_buffer, block_shard), (head_buffer, head_shard) = (
            fsdp.reduced_bytes(weights) for weights in (block, groups.head)
        )
        embedding_buffers, root_buffers = (
            sum(fsdp.reduced_bytes(weights)) for weights in (groups.embedding, groups.root)
        )
        head_bytes, embedding_bytes = (
            self._fresh_gradient_bytes(weights) for weights in (groups.head, groups.embedding)
        )
        # Gradients of the root: before the backward pass of the blocks, and after it.
        early_bytes = self.gradients.head - head_bytes
        tied_bytes = self.gradients.head if self.configs.model.tied_weights else 0
        root_bytes = early_bytes - tied_bytes + self.gradients.embedding
        block_bytes = self.gradients.block
        if fsdp.has_unsharded_gradients:  # they are added to those of earlier micro-batches before
            head_bytes = block_bytes = 0
        # Gradients of a block are freed before the output of the reduction is allocated.
        copied_bytes = fsdp.copied_gradient_elements(block) * fsdp.gathered_element_bytes
        reduced_block_bytes = block_buffer + max(block_bytes, block_shard) + copied_bytes
        is_single = self.states.num_layers == 1
        running_bytes = early_bytes + (head_buffer if is_single else block_buffer)
        return MemoryEntry(
            "gradients on their way to shards",
            {
                StepPhase.reduce_head: head_bytes + head_buffer + head_shard,
                StepPhase.backward_last: early_bytes + head_buffer,
                StepPhase.reduce_last: early_bytes + reduced_block_bytes,
                StepPhase.backward_next: running_bytes,
                StepPhase.backward_second: running_bytes,
                StepPhase.backward_first: running_bytes,
                StepPhase.reduce_block: early_bytes + reduced_block_bytes,
                StepPhase.backward_embedding: early_bytes + block_buffer,
                # The root comes first.
                StepPhase.reduce_rest: max(
                    root_bytes + root_buffers, embedding_bytes + embedding_buffers
                ),
            },
            f"{block_buffer:,} B per block",
            "unsharded gradients and the buffer of one reduction",
        )

    def _fresh_gradient_bytes(self, weights: tuple[Weight, ...]) -> int:
        """Unsharded gradients that backward allocates."""
        element_bytes = self.configs.gradient_element_bytes
        return shard_elements(weights, trained=True) * element_bytes * self.fresh_gradients

    def _pipeline_fsdp_entries(self, fsdp: FSDPMemory) -> Iterator[MemoryEntry]:
        """FSDP in a pipeline: backward neither reshards parameters nor reduces gradients.

        The forward after a backward gathers nothing, and reshards each block. After the schedule,
        the root is reduced first, then the embedding and the blocks.
        """
        states, point = self.states, self.peak_point
        layers, gradient_bytes = states.num_layers, fsdp.reduced_element_bytes
        block = self.gathered_block_bytes
        yield self._gathered_outside_entry(fsdp)
        kept = layers * fsdp.keeps_unsharded
        # Blocks of the rank's other stages, whose forward does not follow their backward.
        others = (layers - layers // len(states.stages)) * (point.finished_backwards > 0)
        prefetched, prefetched_block = min(fsdp.prefetch, layers - 1), self.gather_buffer_bytes
        before_backward = (kept or others) * block
        before_blocks = before_backward + min(1, fsdp.prefetch) * prefetched_block * (not kept)
        blocks = {
            StepPhase.forward: (kept or others + 1) * block
            + prefetched_block * self.gathers_in_forward,
            StepPhase.loss: before_backward,
            StepPhase.backward_loss: before_backward,
            StepPhase.backward_head: before_blocks,
            StepPhase.reduce_head: before_blocks,
        }
        for phase, (_, done) in self.gradients.blocks_by_phase.items():
            if phase in AFTER_HEAD:
                used = kept or min(layers, others + done + 1)
                blocks[phase] = used * block + min(layers - used, prefetched) * prefetched_block
        yield MemoryEntry(
            "gathered weights of blocks",
            blocks,
            f"{block:,} B per block",
            "kept until the next forward",
        )
        block_gradient = shard_elements(states.block_weights, trained=True) * gradient_bytes
        rest_gradient = shard_elements(states.other_weights, trained=True) * gradient_bytes
        if point.finished_backwards:
            sizes = dict.fromkeys(FORWARD_BACKWARD, layers * block_gradient + rest_gradient)
        else:
            head = self.head_numel * gradient_bytes * states.has_head
            sizes = {
                phase: done * block_gradient + head
                for phase, (_, done) in self.gradients.blocks_by_phase.items()
                if phase in AFTER_HEAD
            }
        yield MemoryEntry(
            "whole gradients",
            sizes,
            f"{block_gradient:,} B per block, and {rest_gradient:,} B",
            "kept until the reduction after the last backward",
        )
        if self.peak_point.ends_schedule:
            yield self._schedule_reduction_entry(fsdp)

    def _schedule_reduction_entry(self, fsdp: FSDPMemory) -> MemoryEntry:
        """FSDP in a pipeline: buffers of the largest reduction after the schedule.

        Each group is first resharded; its whole gradients are freed after their reduction.
        """
        groups, blocks = fsdp.groups, self.states.block_weights
        outer = [(weights, False) for weights in (groups.root, groups.embedding)]
        gathered = [(blocks, True)] * self.states.num_layers
        sizes, freed_bytes = [0], 0
        for weights, is_gathered in (*outer, *gathered, (groups.head, True)):
            source, shard = fsdp.reduced_bytes(weights)
            freed_bytes += fsdp.gathered_bytes(weights) * is_gathered
            copied = fsdp.copied_gradient_elements(weights) * fsdp.reduced_element_bytes
            sizes.append(source + shard + copied - freed_bytes)
            gradients = shard_elements(weights, trained=True) * fsdp.reduced_element_bytes
            freed_bytes += gradients - shard
        return constant_entry(
            "gradients on their way to shards",
            max(sizes),
            (StepPhase.reduce_rest,),
            "",
            "buffers of one reduction",
        )

    def earlier_gradient_entry(self, element_bytes: int, reason: str) -> MemoryEntry:
        """Unsharded gradients of earlier micro-batches that are not yet in their bucket."""
        blocks = self.states.cumulative_trained_elements(shards=1)
        rest = shard_elements(self.states.other_weights, trained=True) * element_bytes
        moves_to_bucket = self.states.fsdp is None and not self.has_tied_weights
        remaining_bytes = rest - self.head_numel * element_bytes * moves_to_bucket
        if self.states.fsdp is not None:
            head = self.states.fsdp.groups.head
            remaining_bytes -= shard_elements(head, trained=True) * element_bytes
        phases = {
            phase: (blocks[-1] - blocks[done]) * element_bytes
            + (remaining_bytes if phase in AFTER_HEAD else rest)
            for phase, (_, done) in self.gradients.blocks_by_phase.items()
        }
        if self.accumulates_unsharded:
            phases = dict.fromkeys(FORWARD_BACKWARD, blocks[-1] * element_bytes + rest)
        formula = f"{blocks[-1] * element_bytes:,} B of blocks + {rest:,} B"
        if self.configs.model.has_equal_blocks:
            layers = self.states.num_layers
            formula = f"{layers} blocks x {blocks[1] * element_bytes:,} B + {rest:,} B"
        return MemoryEntry("gradients of earlier micro batches", phases, formula, reason)

    def _replica_gradient_entry(self, fsdp: FSDPMemory) -> MemoryEntry:
        """All-reduced gradient shards, which FSDP2 keeps until backward ends."""
        _, head = fsdp.reduced_bytes(fsdp.groups.head)
        _, block = fsdp.reduced_bytes(self.states.block_weights)
        blocks = self.states.cumulative_trained_elements(fsdp.num_shards)
        phases = {
            phase: blocks[done] * fsdp.reduced_element_bytes + head * (phase in AFTER_HEAD)
            for phase, (_, done) in self.gradients.blocks_by_phase.items()
        }
        return MemoryEntry(
            "sums over replicas", phases, f"{block:,} B per block", "kept until backward ends"
        )
