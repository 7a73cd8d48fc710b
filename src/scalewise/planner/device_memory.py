"""Memory entries of one device: model states, activations and temporary tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from scalewise.models.op_graph import Recompute
from scalewise.planner.activation_liveness import bytes_before_head
from scalewise.planner.memory_breakdown import (
    AFTER_HEAD,
    ALL_PHASES,
    BACKWARD,
    FORWARD,
    FORWARD_BACKWARD,
    ROPE_PHASES,
    MemoryBreakdown,
    MemoryEntry,
    StepPhase,
    constant_entry,
)
from scalewise.planner.model_state_memory import ModelStateMemory
from scalewise.planner.rank_partition import recompute_per_layer
from scalewise.planner.rank_step import iter_waiting_parts

SAVED_TEXT = {
    Recompute.nothing: "all tensors that backward reads",
    Recompute.selective: "matmul and attention outputs; the rest is recomputed",
    Recompute.full: "input of each block; the rest is recomputed",
}
"""Meaning of the block activations, by recomputation."""


class DeviceMemory(ModelStateMemory):
    """Memory entries of one rank at one point of a step."""

    @property
    def breakdown(self) -> MemoryBreakdown:
        """Memory breakdown at this point of a step."""
        return MemoryBreakdown(tuple(entry for entry in self._iter_entries() if entry.max_bytes))

    @cached_property
    def peak(self) -> int:
        """Peak of the breakdown, in bytes."""
        sums = dict(self.persistent_sums)
        for entry in self._point_entries:
            for phase, size in entry.bytes.items():
                sums[phase] += size
        if not self.peak_point.follows_forward:
            return max(sums[phase] for phase in ALL_PHASES if phase not in FORWARD)
        return max(sums.values())

    @cached_property
    def persistent_sums(self) -> Mapping[StepPhase, int]:
        """Sum of the persistent entries by phase, in bytes."""
        return MemoryBreakdown(self.persistent_entries).phases

    def share_persistent_entries(self, other: DeviceMemory) -> None:
        """Take the persistent entries of the same rank at another point of a step."""
        self.persistent_entries = other.persistent_entries
        self.persistent_sums = other.persistent_sums

    def _iter_entries(self) -> Iterator[MemoryEntry]:
        """Yield the entries of model states, gradients, activations and temporary tensors."""
        entries = (*self.persistent_entries, *self._point_entries)
        if self.peak_point.follows_forward:
            yield from entries
            return
        for entry in entries:
            sizes = {phase: size for phase, size in entry.bytes.items() if phase not in FORWARD}
            yield MemoryEntry(entry.name, sizes, entry.formula, entry.reason)

    @cached_property
    def _point_entries(self) -> tuple[MemoryEntry, ...]:
        """Entries that depend on the point of the step."""
        return (
            *self.iter_gradient_entries(),
            *self._activation_entries(),
            *self._workspace_entries(),
            *(self._pipeline_entries() if self.rank_memory.num_pipeline_micro_batches > 1 else ()),
        )

    def _activation_entries(self) -> Iterator[MemoryEntry]:
        saved_bytes, formula = self.liveness.saved_by_phase, self.liveness.saved_formula
        recomputations = recompute_per_layer(self.run.memory, self.rank_memory.stages)
        reason = "; ".join(SAVED_TEXT[item] for item in dict.fromkeys(recomputations))
        if self.run.memory.offload:
            offloaded_bytes = sum(item.offloaded_bytes for item in self.liveness.blocks)
            reason, formula = (
                "the rest is offloaded",
                f"{formula}, and {offloaded_bytes:,} B offloaded",
            )
        yield MemoryEntry("activations of blocks", saved_bytes, formula, reason)
        if self.saves_on_host:
            yield MemoryEntry(
                "offload buffers",
                self._offload_buffers(),
                "",
                "of the block before the running one, between device and host",
            )
        embedding_phases = FORWARD_BACKWARD[: FORWARD_BACKWARD.index(StepPhase.backward_embedding)]
        yield constant_entry(
            "activations of the embedding",
            self.embedding_liveness.saved_bytes,
            embedding_phases,
            "",
            "dropout mask",
        )
        element_bytes = self.rank_memory.forward_spec.rope_element_bytes
        formula = f"2 x tokens x head size x {element_bytes} B"
        if self.run.data.packing:
            formula = f"sequences x {formula}"
        yield constant_entry(
            "rotations",
            self.op_graphs.shared_bytes,
            ROPE_PHASES,
            formula,
            "positions of this micro-batch",
        )
        head_bytes = {
            StepPhase.loss: self.head_liveness.saved_bytes,
            StepPhase.backward_loss: self.head_liveness.saved_bytes,
        }
        yield MemoryEntry(
            "activations of the head", head_bytes, "", "saved by the final norm and the head"
        )

    def _offload_buffers(self) -> dict[StepPhase, int]:
        """Return the bytes of offloaded tensors on the device besides those of the running block.

        They are copied to the host while the next block runs forward, and back while it runs
        backward. Those of the last block wait for the next forward pass.
        """
        bytes_before = self._offloaded_bytes_before()
        last = self.liveness.blocks[-1].offloaded_bytes
        waits = last * len(self.rank_memory.stages) * (self.peak_point.waiting_passes > 0)
        buffers = dict.fromkeys(BACKWARD, waits)
        for phase in (StepPhase.loss, *BACKWARD[: BACKWARD.index(StepPhase.backward_last)]):
            buffers[phase] = max(last, waits)
        for phase, (block, _) in self.blocks_by_phase.items():
            if phase in AFTER_HEAD:
                buffers[phase] += bytes_before[block]
        return buffers

    def _offloaded_bytes_before(self) -> list[int]:
        """Return the bytes that the block before each block offloads to the host."""
        return [0, *(item.offloaded_bytes for item in self.liveness.blocks[:-1])]

    def _workspace_entries(self) -> Iterator[MemoryEntry]:
        head, loss, embedding = self.head_liveness, self.loss_liveness, self.embedding_liveness
        blocks, cumulative_bytes = self.liveness.blocks, self.liveness.cumulative_saved_bytes
        forward_peak = self.liveness.forward_peak
        if self.saves_on_host:
            forward_peak = max(
                saved_bytes + offloaded_bytes + block.forward_peak
                for saved_bytes, offloaded_bytes, block in zip(
                    cumulative_bytes, self._offloaded_bytes_before(), blocks, strict=False
                )
            )
        bytes_by_phase = {
            StepPhase.forward: forward_peak - cumulative_bytes[-2],
            StepPhase.loss: max(
                head.forward_peak - head.saved_bytes + self.last_gather_bytes, loss.forward_peak
            ),
            StepPhase.backward_loss: loss.backward_peak,
            StepPhase.backward_head: head.backward_peak,
            StepPhase.reduce_head: bytes_before_head(self.run.model, self.rank_memory.forward_spec)
            * self.rank_memory.has_head,
            StepPhase.backward_last: blocks[-1].backward_peak,
            StepPhase.backward_next: blocks[
                self.blocks_by_phase[StepPhase.backward_next][0]
            ].backward_peak
            * (self.rank_memory.num_layers > 2),
            StepPhase.backward_second: blocks[:2][-1].backward_peak
            * (self.rank_memory.num_layers > 2),
            StepPhase.backward_first: blocks[0].backward_peak,
            StepPhase.backward_embedding: embedding.backward_peak,
        }
        if self.gathers_in_schedule:  # the next block is copied from its buffer, after this one
            last = StepPhase.backward_first if len(blocks) > 1 else StepPhase.backward_last
            for phase in BACKWARD[BACKWARD.index(StepPhase.backward_head) : BACKWARD.index(last)]:
                if bytes_by_phase.get(phase) is not None:
                    bytes_by_phase[phase] = max(bytes_by_phase[phase], self.gathered_block_bytes)
        yield MemoryEntry(
            "at work", bytes_by_phase, "", "of the module that is running, freed after it"
        )

    def _pipeline_entries(self) -> Iterator[MemoryEntry]:
        """Pipeline stages: activations of waiting micro-batches, and communication buffers."""
        rank_memory, op_graphs, peak_point, num_stages = (
            self.rank_memory,
            self.op_graphs,
            self.peak_point,
            len(self.rank_memory.stages),
        )
        residual_bytes = op_graphs.block.sizes[0]
        input_bytes = residual_bytes * sum(not part.is_first for part in rank_memory.stages)
        returned_bytes = residual_bytes * sum(not part.is_last for part in rank_memory.stages)
        output_bytes = (
            op_graphs.loss.sizes[0] if rank_memory.has_head and op_graphs.loss else residual_bytes
        )
        waiting_blocks = self.simulate_blocks(tuple(iter_waiting_parts(rank_memory, peak_point)))
        waiting_bytes = sum(each.saved_bytes for each in waiting_blocks)
        waiting_bytes += peak_point.waiting_passes * (
            op_graphs.shared_bytes + self.embedding_liveness.saved_bytes
        )
        offload = self.run.memory.offload  # then no saved tensor is in a communication buffer
        waiting_bytes -= (
            residual_bytes
            * sum(not part.is_first for part in iter_waiting_parts(rank_memory, peak_point))
            * (not offload)
        )
        if num_stages == 1:  # with several stages the last one runs backward at once
            waiting_bytes += peak_point.waiting_passes * (
                self.head_liveness.saved_bytes + self.loss_liveness.saved_bytes + output_bytes
            )
        else:
            waiting_bytes += peak_point.waiting_passes * residual_bytes
        passes = rank_memory.num_pipeline_micro_batches * num_stages
        yield constant_entry(
            "activations of other pieces",
            waiting_bytes,
            FORWARD_BACKWARD,
            f"activations of {len(waiting_blocks)} blocks and more",
            f"up to {rank_memory.in_flight} of {passes} forward passes wait for their backward",
        )
        stage_output_bytes = output_bytes + (num_stages - 1) * residual_bytes
        yield constant_entry(
            "output of the stage", stage_output_bytes, BACKWARD, "", "kept until its backward ends"
        )
        # Block activations already count one buffer of the running micro-batch: the input of its
        # first block, and the gradient that its last block receives.
        buffer_bytes = (
            rank_memory.num_stage_buffers * input_bytes
            + rank_memory.num_gradient_buffers * returned_bytes
        )
        # The gradient that was sent last is still alive.
        sent_gradient_bytes = input_bytes // num_stages * (peak_point.finished_backwards > 0)
        buffers = dict.fromkeys(
            ALL_PHASES, buffer_bytes + sent_gradient_bytes - input_bytes * (not offload)
        )
        buffers[StepPhase.backward_last] -= returned_bytes // num_stages
        buffers[StepPhase.optimizer] = buffer_bytes
        formula = (
            f"{rank_memory.num_stage_buffers} x {input_bytes:,} B + "
            f"{rank_memory.num_gradient_buffers} x {returned_bytes:,} B"
        )
        reason = "per micro-batch, one for activations and one for their gradients"
        yield MemoryEntry("buffers between stages", buffers, formula, reason)
