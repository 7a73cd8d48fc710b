"""Memory entries of one device: model states, gradients, activations and temporary tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from scalewise.callback_config import AVERAGE_BYTES_PER_ELEMENT
from scalewise.models.base import StageSlice
from scalewise.models.op_graph import Recompute
from scalewise.planner.activation_liveness import PartLiveness
from scalewise.planner.liveness_cache import (
    EMPTY,
    block_liveness,
    ends_liveness,
    first_block_liveness,
    model_op_graphs,
)
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryEntry, StepPhase
from scalewise.planner.phases import (
    AFTER_HEAD,
    BACKWARD,
    FORWARD_BACKWARD,
    REDUCTION_PHASES,
    ROPE_PHASES,
    blocks_by_phase,
    constant_entry,
)
from scalewise.planner.pipeline_peaks import PipelinePeakPoint, iter_waiting_parts
from scalewise.planner.rank_memory import FSDPMemory, RankMemory, shard_bytes, shard_elements
from scalewise.precision import FloatFormat

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

SAVED_TEXT = {
    Recompute.nothing: "all tensors that backward reads",
    Recompute.selective: "matmul and attention outputs; the rest is recomputed",
    Recompute.full: "input of each block; the rest is recomputed",
}
"""Meaning of the block activations, by recomputation."""


class DeviceMemory:
    """Memory entries of one rank at one point of a step.

    Args:
        run: Run that trains.
        rank_memory: Partition of the rank.
        peak_point: Point of the pipeline schedule.
    """

    def __init__(
        self, run: RunConfig, rank_memory: RankMemory, peak_point: PipelinePeakPoint
    ) -> None:
        self.run, self.rank_memory, self.peak_point = run, rank_memory, peak_point
        fsdp = rank_memory.fsdp
        accumulates = run.accumulation > 1 or peak_point.finished_backwards > 0
        if fsdp is not None and peak_point.finished_backwards:
            # FSDP2 reduces gradients only in the last pipeline micro-batch.
            keeps_unsharded = fsdp.keeps_unsharded or peak_point.is_draining
            fsdp = replace(fsdp, keeps_unsharded=keeps_unsharded, has_unsharded_gradients=True)
        self.fsdp = fsdp
        # Before the last micro-batch nothing is reduced, and parameters stay unsharded.
        self.has_next_micro_batch = (
            fsdp is not None
            and rank_memory.num_pipeline_micro_batches > 1
            and not peak_point.finished_backwards
        )
        has_unsharded_gradients = fsdp is not None and fsdp.has_unsharded_gradients
        self.gradients_persist = (
            accumulates and not has_unsharded_gradients
        ) or rank_memory.has_persistent_buckets
        adds_in_place = (
            has_unsharded_gradients
            and fsdp is not None
            and fsdp.reduced_element_bytes == rank_memory.forward_spec.gradient_element_bytes
        )
        fresh_gradients = not adds_in_place if fsdp is not None else not self.gradients_persist
        self.has_tied_weights = (
            rank_memory.has_embedding and rank_memory.has_head and bool(run.model.tied_weights)
        )
        self.blocks_by_phase = blocks_by_phase(rank_memory.num_layers)
        self.op_graphs = model_op_graphs(run.model, rank_memory.forward_spec)
        self.fresh_gradients, self.step_scratch_ratio = (
            fresh_gradients,
            self._compute_step_scratch_ratio(),
        )
        self.block_liveness = block_liveness(
            run.model, rank_memory.forward_spec, Recompute.nothing, fresh_gradients
        )
        self.liveness_by_block = self._simulate_blocks(rank_memory.stages)
        saved_bytes = (each.saved_bytes for each in self.liveness_by_block)
        self.cumulative_saved_bytes = tuple(accumulate(saved_bytes, initial=0))
        embedding, head, loss = ends_liveness(
            run.model, rank_memory.forward_spec, fresh_gradients, self.step_scratch_ratio
        )
        self.embedding_liveness = embedding if rank_memory.has_embedding else EMPTY
        self.head_liveness, self.loss_liveness = (
            (head, loss) if rank_memory.has_head else (EMPTY, EMPTY)
        )

    def _simulate_blocks(self, stages: Sequence[StageSlice]) -> list[PartLiveness]:
        """Simulate the blocks of ``stages``, in order."""
        run, forward_spec = self.run, self.rank_memory.forward_spec
        liveness: list[PartLiveness] = []
        for stage in stages:
            for index, recompute in enumerate(run.memory.recompute_per_layer((stage,))):
                simulate = first_block_liveness if stage.is_first and not index else block_liveness
                liveness.append(
                    simulate(
                        run.model,
                        forward_spec,
                        recompute,
                        self.fresh_gradients,
                        run.memory.offload,
                        self.step_scratch_ratio,
                    )
                )
        return liveness

    def _compute_step_scratch_ratio(self) -> float:
        """Return the temporary bytes of an optimizer step in backward per byte of gradient, or -1.

        -1: the optimizer steps after backward, or steps shards, which are separate entries.
        """
        if not self.run.optimizer.in_backward or self.fsdp is not None:
            return -1.0
        optimizer, element_bytes = self.run.optimizer, self.gradient_element_bytes
        weights = [
            w
            for w in (*self.rank_memory.block_weights, *self.rank_memory.other_weights)
            if w.trainable
        ]
        largest = max(weights, key=lambda weight: weight.numel)
        return optimizer.scratch_bytes(largest, 1, element_bytes) / (largest.numel * element_bytes)

    @property
    def head_numel(self) -> int:
        """Trained parameter elements after the blocks."""
        head_weights = [
            w for w in self.rank_memory.other_weights if w.role not in ("embedding", "position")
        ]
        return shard_elements(head_weights, trained=True)

    @property
    def gradient_element_bytes(self) -> int:
        """Bytes per element of a gradient that waits for the optimizer step."""
        return self.run.precision.parameters.bytes

    def iter_entries(self) -> Iterator[MemoryEntry]:
        """Yield the entries of model states, gradients, activations and temporary tensors."""
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
        if self.fsdp is not None:
            yield from self._fsdp_entries(self.fsdp)
        yield from self._activation_entries()
        yield from self._workspace_entries()
        if self.rank_memory.num_pipeline_micro_batches > 1:
            yield from self._pipeline_entries()

    def _persistent_entries(self) -> Iterator[MemoryEntry]:
        run, rank_memory = self.run, self.rank_memory
        if not rank_memory.parameters_on_host:
            yield self._parameter_entry(run.precision.parameters)
        yield constant_entry(
            "buffers",
            getattr(run.model, "buffer_bytes", 0)
            * len(rank_memory.stages)
            * rank_memory.forward_spec.rope_element_bytes
            // 4,
            ALL_PHASES,
            "2 x context x head width",
            "RoPE tables of all positions, unsharded on every rank",
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
        if self.has_next_micro_batch:
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
        """Tied weight: both gradients are alive until autograd sums them."""
        (name,) = self.run.model.tied_weights
        (weight,) = (weight for weight in self.rank_memory.other_weights if weight.name == name)
        size = (
            weight.numel * self.rank_memory.forward_spec.gradient_element_bytes * weight.trainable
        )
        waiting_bytes = size * (self.head_liveness.gradient_bytes == 0)
        phases = dict.fromkeys(AFTER_HEAD[:-2], waiting_bytes)
        phases |= {StepPhase.backward_embedding: waiting_bytes + size}
        return MemoryEntry(
            "gradient of the tied head",
            phases,
            f"{weight.numel:,}",
            "waits for the second gradient",
        )

    def _fsdp_entries(self, fsdp: FSDPMemory) -> Iterator[MemoryEntry]:
        """FSDP: parameters gathered around the running block, and gradients being reduced."""
        rank_memory, shards = self.rank_memory, fsdp.num_shards
        block = shard_bytes(rank_memory.block_weights, fsdp.gathered_element_bytes, shards) * shards
        rest_bytes = (
            shard_bytes(rank_memory.other_weights, fsdp.gathered_element_bytes, shards) * shards
        )
        layers, keeps_unsharded = rank_memory.num_layers, fsdp.keeps_unsharded
        if shards > 1 or fsdp.has_replicas:
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
                StepPhase.backward_next: (
                    max(kept_blocks - 1, 0) or 1 + min(prefetched, layers - 2)
                )
                * block_bytes,
                StepPhase.backward_second: (2 * keeps_unsharded or 1 + min(prefetched, 1))
                * block_bytes,
                StepPhase.backward_first: block_bytes,
                StepPhase.reduce_block: 0,
            }
            if self.has_next_micro_batch and not keeps_unsharded:
                bytes_by_phase |= {
                    phase: min(layers, done + 1 + prefetched) * block_bytes
                    for phase, (_, done) in self.blocks_by_phase.items()
                    if phase in AFTER_HEAD
                }
            yield MemoryEntry(
                "gathered weights of blocks",
                bytes_by_phase,
                f"{block:,} B per block",
                "kept after forward"
                if keeps_unsharded
                else "the running block and prefetched blocks",
            )
        if self.has_next_micro_batch:
            yield self._unsharded_gradient_entry(fsdp.reduced_element_bytes)
            return
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

    def _unsharded_gradient_entry(self, element_bytes: int) -> MemoryEntry:
        """Unsharded gradients of the first pipeline micro-batch, in the reduction format."""
        block = shard_elements(self.rank_memory.block_weights, trained=True) * element_bytes
        bytes_by_phase = {
            phase: done * block + self.head_numel * element_bytes * self.rank_memory.has_head
            for phase, (_, done) in self.blocks_by_phase.items()
            if phase in AFTER_HEAD
        }
        reason = "kept until the reduction in the last micro-batch"
        return MemoryEntry("whole gradients", bytes_by_phase, f"{block:,} B per block", reason)

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

    def _activation_entries(self) -> Iterator[MemoryEntry]:
        saved_bytes = {
            phase: self.cumulative_saved_bytes[waiting]
            for phase, (waiting, _) in self.blocks_by_phase.items()
        }
        sizes = Counter(item.saved_bytes for item in self.liveness_by_block)
        formula = " + ".join(f"{count} x {size:,} B" for size, count in sizes.items())
        recomputations = dict.fromkeys(self.run.memory.recompute_per_layer(self.rank_memory.stages))
        reason = "; ".join(SAVED_TEXT[item] for item in recomputations)
        if self.run.memory.offload:
            offloaded_bytes = sum(item.offloaded_bytes for item in self.liveness_by_block)
            reason, formula = (
                "the rest is offloaded",
                f"{formula}, and {offloaded_bytes:,} B offloaded",
            )
        yield MemoryEntry("activations of blocks", saved_bytes, formula, reason)
        embedding_phases = FORWARD_BACKWARD[: FORWARD_BACKWARD.index(StepPhase.backward_embedding)]
        yield constant_entry(
            "activations of the embedding",
            self.embedding_liveness.saved_bytes,
            embedding_phases,
            "",
            "dropout mask",
        )
        name, formula = "rotations", "2 x tokens x head width"
        if self.run.data.packing:
            name, formula = "rotations and mask", f"sequences x ({formula} + tokens x tokens)"
        yield constant_entry(
            name, self.op_graphs.shared_bytes, ROPE_PHASES, formula, "positions of this micro-batch"
        )
        head_bytes = {
            StepPhase.loss: self.head_liveness.saved_bytes,
            StepPhase.backward_loss: self.head_liveness.saved_bytes,
        }
        yield MemoryEntry(
            "activations of the head", head_bytes, "", "saved by the final norm and the head"
        )

    def _workspace_entries(self) -> Iterator[MemoryEntry]:
        head, loss, embedding = self.head_liveness, self.loss_liveness, self.embedding_liveness
        blocks = self.liveness_by_block
        cumulative_bytes = self.cumulative_saved_bytes
        forward_peak = max(
            saved_bytes + block.forward_peak
            for saved_bytes, block in zip(cumulative_bytes, blocks, strict=False)
        )
        bytes_by_phase = {
            StepPhase.forward: forward_peak - cumulative_bytes[-2],
            StepPhase.loss: max(head.forward_peak - head.saved_bytes, loss.forward_peak),
            StepPhase.backward_loss: loss.backward_peak,
            StepPhase.backward_head: head.backward_peak,
            StepPhase.backward_last: blocks[-1].backward_peak,
            StepPhase.backward_next: blocks[-2:][0].backward_peak
            * (self.rank_memory.num_layers > 2),
            StepPhase.backward_second: blocks[:2][-1].backward_peak
            * (self.rank_memory.num_layers > 2),
            StepPhase.backward_first: blocks[0].backward_peak,
            StepPhase.backward_embedding: embedding.backward_peak,
        }
        yield MemoryEntry("at work", bytes_by_phase, "", "temporary tensors of the running part")

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
        waiting_blocks = self._simulate_blocks(tuple(iter_waiting_parts(rank_memory, peak_point)))
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
        buffer_bytes = rank_memory.num_pipeline_micro_batches * (input_bytes + returned_bytes)
        # The gradient that was sent last is still alive.
        sent_gradient_bytes = input_bytes // num_stages * (peak_point.finished_backwards > 0)
        buffers = dict.fromkeys(
            ALL_PHASES, buffer_bytes + sent_gradient_bytes - input_bytes * (not offload)
        )
        buffers[StepPhase.backward_last] -= returned_bytes // num_stages
        buffers[StepPhase.optimizer] = buffer_bytes
        formula = f"{rank_memory.num_pipeline_micro_batches} x {input_bytes + returned_bytes:,} B"
        reason = "per micro-batch, one for activations and one for their gradients"
        yield MemoryEntry("buffers between stages", buffers, formula, reason)
