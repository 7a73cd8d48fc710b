"""Memory entries of activations and temporary tensors of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from scalewise.memory_config import ActivationCheckpointing
from scalewise.models.base import ModelConfig, StageSlice
from scalewise.models.op_graph import ForwardSpec, Recompute, SavedOn
from scalewise.planner.activation_liveness import bytes_before_head, model_op_graphs
from scalewise.planner.memory_breakdown import (
    AFTER_HEAD,
    BACKWARD,
    FORWARD_BACKWARD,
    ROPE_PHASES,
    EntryGroup,
    MemoryEntry,
    StepPhase,
    constant_entry,
    group_entries,
)
from scalewise.planner.rank_partition import RankStages, recompute_per_layer
from scalewise.planner.step_liveness import StepLiveness

SAVED_TEXT = {
    Recompute.nothing: "all tensors that backward reads",
    Recompute.selective: "matmul and attention outputs; the rest is recomputed",
    Recompute.full: "input of each block; the rest is recomputed",
}
"""Meaning of the block activations, by recomputation."""


class ActivationMemory:
    """Entries of a rank in its backward pass.

    Args:
        model: Model.
        memory: Activation checkpointing.
        rank: Pipeline stages of the rank.
        forward_spec: Sizes and formats of a forward pass.
        liveness: Liveness of the parts of the rank.
        saved_on: Memory of saved tensors between forward and backward.
        has_waiting_passes: Whether activations are offloaded, and other forward passes wait for
            their backward.
        last_gather_bytes: Size of the last all-gather buffer of a forward pass.
        next_gather_bytes: Size of a block that backward gathers while another one runs.
    """

    def __init__(
        self,
        model: ModelConfig,
        memory: ActivationCheckpointing,
        rank: RankStages,
        forward_spec: ForwardSpec,
        liveness: StepLiveness,
        saved_on: SavedOn,
        *,
        has_waiting_passes: bool,
        last_gather_bytes: int,
        next_gather_bytes: int,
    ) -> None:
        self.model, self.memory, self.rank, self.forward_spec = model, memory, rank, forward_spec
        self.liveness, self.saves_on_host = liveness, saved_on is SavedOn.host
        self.has_waiting_passes = has_waiting_passes
        self.last_gather_bytes, self.next_gather_bytes = last_gather_bytes, next_gather_bytes
        self.embedding, self.head, self.loss = liveness.non_blocks

    def iter_entries(self) -> Iterator[MemoryEntry]:
        """Yield the entries."""
        yield from self._activation_entries()
        yield from self._workspace_entries()

    def _activation_entries(self) -> Iterator[MemoryEntry]:
        saved_bytes, formula = self.liveness.saved_by_phase, self.liveness.saved_formula
        recomputations = recompute_per_layer(self.memory, self.rank.stages)
        reason = "; ".join(SAVED_TEXT[item] for item in dict.fromkeys(recomputations))
        if self.memory.offload:
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
            self.embedding.saved_bytes,
            embedding_phases,
            "",
            "dropout mask",
        )
        element_bytes = self.forward_spec.rope_element_bytes
        formula = f"2 x tokens x head size x {element_bytes} B"
        if self.forward_spec.sequence_packing:
            formula = f"sequences x {formula}"
        yield constant_entry(
            "rotations",
            model_op_graphs(self.model, self.forward_spec).shared_bytes,
            ROPE_PHASES,
            formula,
            "positions of this micro-batch",
        )
        head_bytes = {
            StepPhase.loss: self.head.saved_bytes,
            StepPhase.backward_loss: self.head.saved_bytes,
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
        waits = last * len(self.rank.stages) * self.has_waiting_passes
        buffers = dict.fromkeys(BACKWARD, waits)
        for phase in (StepPhase.loss, *BACKWARD[: BACKWARD.index(StepPhase.backward_last)]):
            buffers[phase] = max(last, waits)
        for phase, (block, _) in self.liveness.blocks_by_phase.items():
            if phase in AFTER_HEAD:
                buffers[phase] += bytes_before[block]
        return buffers

    def _offloaded_bytes_before(self) -> list[int]:
        """Return the bytes that the block before each block offloads to the host."""
        return [0, *(item.offloaded_bytes for item in self.liveness.blocks[:-1])]

    def _workspace_entries(self) -> Iterator[MemoryEntry]:
        head, loss, embedding = self.head, self.loss, self.embedding
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
            StepPhase.reduce_head: bytes_before_head(self.model, self.forward_spec)
            * self.rank.has_head,
            StepPhase.backward_last: blocks[-1].backward_peak,
            StepPhase.backward_next: blocks[
                self.liveness.blocks_by_phase[StepPhase.backward_next][0]
            ].backward_peak
            * (self.rank.num_layers > 2),
            StepPhase.backward_second: blocks[:2][-1].backward_peak * (self.rank.num_layers > 2),
            StepPhase.backward_first: blocks[0].backward_peak,
            StepPhase.backward_embedding: embedding.backward_peak,
        }
        if self.next_gather_bytes:  # the next block is copied from its buffer, after this one
            last = StepPhase.backward_first if len(blocks) > 1 else StepPhase.backward_last
            for phase in BACKWARD[BACKWARD.index(StepPhase.backward_head) : BACKWARD.index(last)]:
                if bytes_by_phase.get(phase) is not None:
                    bytes_by_phase[phase] = max(bytes_by_phase[phase], self.next_gather_bytes)
        yield MemoryEntry(
            "at work", bytes_by_phase, "", "of the module that is running, freed after it"
        )


@lru_cache(maxsize=16384)
def activation_entries(
    model: ModelConfig,
    memory: ActivationCheckpointing,
    stages: tuple[StageSlice, ...],
    forward_spec: ForwardSpec,
    liveness: StepLiveness,
    saved_on: SavedOn,
    has_waiting_passes: bool,
    last_gather_bytes: int,
    next_gather_bytes: int,
) -> EntryGroup:
    """Return the entries of activations and temporary tensors; see ``ActivationMemory``."""
    rank = RankStages(stages)
    return group_entries(
        ActivationMemory(
            model,
            memory,
            rank,
            forward_spec,
            liveness,
            saved_on,
            has_waiting_passes=has_waiting_passes,
            last_gather_bytes=last_gather_bytes,
            next_gather_bytes=next_gather_bytes,
        ).iter_entries()
    )
