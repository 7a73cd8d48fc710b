"""The lines of one device's ledger: what lasts, what passes keep, what is at work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import Recompute
from scalewise.models.base import StageSlice
from scalewise.parallelism.rank_memory import FSDPMemory, RankMemory, shard_bytes, shard_elements
from scalewise.planner.activation_liveness import PartLiveness
from scalewise.planner.liveness_cache import (
    NOTHING,
    block_liveness,
    ends_liveness,
    first_block_liveness,
    model_op_graphs,
)
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryEntry, StepPhase
from scalewise.planner.phases import (
    AFTER_HEAD,
    BACKWARD,
    PASSES,
    STEPPED_IN_BACKWARD,
    WITH_ROTATIONS,
    blocks_by_phase,
    constant_entry,
)
from scalewise.planner.pipeline_peaks import PipelineMoment, iter_waiting_parts
from scalewise.precision import FloatFormat
from scalewise.training.callbacks.callback_args import AVERAGE_BYTES_PER_ELEMENT

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

KEPT = {
    Recompute.nothing: "all that backward reads",
    Recompute.selective: "products and attention; the rest is made again",
    Recompute.full: "the input of a block; the rest is made again",
}
"""What is kept of a block."""


class DeviceMemory:
    """Works a ledger out, purpose by purpose."""

    def __init__(self, run: RunConfig, rank_memory: RankMemory, moment: PipelineMoment) -> None:
        self.run, self.rank_memory, self.moment = run, rank_memory, moment
        gathering = rank_memory.fsdp
        several = run.accumulation > 1 or moment.finished_backwards > 0
        if (
            gathering is not None and moment.finished_backwards
        ):  # torch reduces nothing before the last piece
            keeps = gathering.keeps_unsharded or moment.is_draining
            gathering = replace(gathering, keeps_unsharded=keeps, has_unsharded_gradients=True)
        self.fsdp = gathering
        # Of a piece that others follow nothing is reduced, and its weights stay gathered.
        self.has_next_micro_batch = (
            gathering is not None
            and rank_memory.num_pipeline_micro_batches > 1
            and not moment.finished_backwards
        )
        whole = gathering is not None and gathering.has_unsharded_gradients
        self.gradients_persist = (several and not whole) or rank_memory.has_persistent_buckets
        adds = (
            whole
            and gathering is not None
            and gathering.reduced_element_bytes == rank_memory.forward_spec.gradient_element_bytes
        )
        fresh = not adds if gathering is not None else not self.gradients_persist
        self.has_tied_weights = (
            rank_memory.has_embedding and rank_memory.has_head and bool(run.model.tied_weights)
        )
        self.blocks_by_phase = blocks_by_phase(rank_memory.num_layers)
        self.op_graphs = model_op_graphs(run.model, rank_memory.forward_spec)
        self.fresh_gradients, self.step_scratch_ratio = fresh, self._compute_step_scratch_ratio()
        self.block_liveness = block_liveness(
            run.model, rank_memory.forward_spec, Recompute.nothing, fresh
        )
        self.liveness_by_block = self._simulate_blocks(rank_memory.stages)
        kept = (each.saved_bytes for each in self.liveness_by_block)
        self.cumulative_saved_bytes = tuple(accumulate(kept, initial=0))
        start, head, loss = ends_liveness(
            run.model, rank_memory.forward_spec, fresh, self.step_scratch_ratio
        )
        self.embedding_liveness = start if rank_memory.has_embedding else NOTHING
        self.head_liveness, self.loss_liveness = (
            (head, loss) if rank_memory.has_head else (NOTHING, NOTHING)
        )

    def _simulate_blocks(self, stages: Sequence[StageSlice]) -> list[PartLiveness]:
        """Returns what the blocks of some parts do, in order."""
        run, shape = self.run, self.rank_memory.forward_spec
        found: list[PartLiveness] = []
        for part in stages:
            for place, each in enumerate(run.memory.recompute_per_layer((part,))):
                of = first_block_liveness if part.is_first and not place else block_liveness
                found.append(
                    of(
                        run.model,
                        shape,
                        each,
                        self.fresh_gradients,
                        run.memory.offload,
                        self.step_scratch_ratio,
                    )
                )
        return found

    def _compute_step_scratch_ratio(self) -> float:
        """Returns the bytes that a step in backward takes for each of a gradient; else -1.

        Where weights are shards, their steps are not in the pass of whole ones.
        """
        if not self.run.optimizer.in_backward or self.fsdp is not None:
            return -1.0
        each, held = self.run.optimizer, self.gradient_element_bytes
        weights = [
            w
            for w in (*self.rank_memory.block_weights, *self.rank_memory.other_weights)
            if w.trainable
        ]
        largest = max(weights, key=lambda weight: weight.numel)
        return each.scratch_bytes(largest, 1, held) / (largest.numel * held)

    @property
    def head_numel(self) -> int:
        """Returns the numbers of what comes after the blocks."""
        ends = [
            w for w in self.rank_memory.other_weights if w.role not in ("embedding", "position")
        ]
        return shard_elements(ends, trained=True)

    @property
    def gradient_element_bytes(self) -> int:
        """Returns the bytes of a number of a gradient that waits for the step."""
        return self.run.precision.parameters.bytes

    def iter_entries(self) -> Iterator[MemoryEntry]:
        """Yields what lasts, what passes keep, and what is at work."""
        yield from self._persistent_entries()
        yield from self._gradient_entries()
        if self.has_tied_weights:
            yield self._tied_gradient_entry()
            if self.step_scratch_ratio > 0:
                size = (
                    shard_elements(self.rank_memory.other_weights, trained=True)
                    * self.gradient_element_bytes
                )
                reason = "of the tied weight, when both its gradients are one"
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
            "rotations of every place, whole on every rank",
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
                "for each number that is trained",
            )
        if not rank_memory.parameters_on_host:
            averaged = rank_memory.numel(rank_memory.parameter_shards, trained=True)
            formula = f"{averaged:,} x {AVERAGE_BYTES_PER_ELEMENT} B"
            reason = "moving average of the weights, as they are sharded"
            yield constant_entry("average", rank_memory.ema_bytes(run), ALL_PHASES, formula, reason)
        if rank_memory.forward_spec.on_cpu and self.step_scratch_ratio < 0:
            scratch = rank_memory.scratch_bytes(run)
            when = STEPPED_IN_BACKWARD if run.optimizer.in_backward else (StepPhase.optimizer,)
            yield constant_entry("step", scratch, when, "", "what stepping the largest takes")

    def _parameter_entry(self, dtype: FloatFormat) -> MemoryEntry:
        shards = self.rank_memory.parameter_shards
        size, count = (
            self.rank_memory.weight_bytes(dtype.bytes, shards),
            self.rank_memory.numel(shards),
        )
        shared = f", 1 of {shards} shards" if shards > 1 else ""
        packed = (count * dtype.bytes - size) // (dtype.bytes - 1)
        formula, reason = f"{count:,} x {dtype.bytes} B{shared}", f"held in {dtype}"
        if packed:
            formula = f"{packed:,} B + {count - packed:,} x {dtype.bytes} B{shared}"
            reason = f"packed matrices, and the rest held in {dtype}"
        return constant_entry("parameters", size, ALL_PHASES, formula, reason)

    def _gradient_entries(self) -> Iterator[MemoryEntry]:
        if self.run.optimizer.in_backward:
            return
        rank_memory, each = self.rank_memory, self.gradient_element_bytes
        count = rank_memory.numel(rank_memory.gradient_shards, trained=True)
        whole = count * each
        if rank_memory.bucket_copy_bytes:
            yield constant_entry(
                "buckets",
                rank_memory.bucket_copy_bytes,
                ALL_PHASES,
                f"{count:,} x {each} B",
                "as they are sent",
            )
        reason = "made as backward comes to them"
        if self.gradients_persist:
            reason = "summed up over micro batches"
            if rank_memory.has_persistent_buckets:
                reason = "in buckets that outlive the step"
            yield constant_entry("gradients", whole, ALL_PHASES, f"{count:,} x {each} B", reason)
            if rank_memory.has_persistent_buckets and self.run.accumulation > 1:
                yield self._earlier_gradient_entry(
                    each, "each moves into its bucket when it is complete"
                )
            return
        if self.has_next_micro_batch:
            return
        block, rest = self.block_liveness.gradient_bytes, self.head_liveness.gradient_bytes
        if rank_memory.fsdp is not None:
            block = (
                shard_elements(rank_memory.block_weights, rank_memory.gradient_shards, trained=True)
                * each
            )
            rest = 0
        grown = {
            phase: done * block + rest
            for phase, (_, done) in self.blocks_by_phase.items()
            if phase in AFTER_HEAD
        }
        grown |= {StepPhase.optimizer: whole}
        yield MemoryEntry("gradients", grown, f"{count:,} x {each} B", reason)

    def _tied_gradient_entry(self) -> MemoryEntry:
        """A weight with two uses: autograd adds the gradients of both up before it holds either."""
        (name,) = self.run.model.tied_weights
        (weight,) = (weight for weight in self.rank_memory.other_weights if weight.name == name)
        size = (
            weight.numel * self.rank_memory.forward_spec.gradient_element_bytes * weight.trainable
        )
        waiting = size * (self.head_liveness.gradient_bytes == 0)
        phases = dict.fromkeys(AFTER_HEAD[:-2], waiting)
        phases |= {StepPhase.backward_embedding: waiting + size}
        return MemoryEntry(
            "gradient of the tied head", phases, f"{weight.numel:,}", "waits for the other"
        )

    def _fsdp_entries(self, fsdp: FSDPMemory) -> Iterator[MemoryEntry]:
        """FSDP: whole weights around the block at work, and gradients on their way to shards."""
        rank_memory, shards = self.rank_memory, fsdp.num_shards
        block = shard_bytes(rank_memory.block_weights, fsdp.gathered_element_bytes, shards) * shards
        rest = shard_bytes(rank_memory.other_weights, fsdp.gathered_element_bytes, shards) * shards
        layers, keeps = rank_memory.num_layers, fsdp.keeps_unsharded
        if shards > 1 or fsdp.has_replicas:
            yield constant_entry(
                "gathered weights outside of blocks",
                rest,
                PASSES[:-1],
                f"{rest // fsdp.gathered_element_bytes:,} x {fsdp.gathered_element_bytes} B",
                "gathered for the whole pass",
            )
            # The buffer of a gather is as large as what it fills; torch keeps it for one block,
            # and the last until the module's forward ends: with the loss in pieces, after that.
            each, whole = block, layers * keeps
            last = each * (rank_memory.forward_spec.loss_chunk > 0)
            ahead = min(fsdp.prefetch, layers - 1)
            held = {
                StepPhase.forward: max(whole, 1) * each + each,
                StepPhase.loss: whole * each + last,
                StepPhase.backward_loss: whole * each,
                StepPhase.backward_head: (whole or ahead) * each,
                StepPhase.backward_last: (whole or 1 + ahead) * each,
                StepPhase.reduce_last: (max(whole - 1, 0) or ahead) * each,
                StepPhase.backward_next: (max(whole - 1, 0) or 1 + min(ahead, layers - 2)) * each,
                StepPhase.backward_second: (2 * keeps or 1 + min(ahead, 1)) * each,
                StepPhase.backward_first: each,
                StepPhase.reduce_block: 0,
            }
            if self.has_next_micro_batch and not keeps:
                held |= {
                    phase: min(layers, done + 1 + ahead) * each
                    for phase, (_, done) in self.blocks_by_phase.items()
                    if phase in AFTER_HEAD
                }
            yield MemoryEntry(
                "gathered weights of blocks",
                held,
                f"{block:,} B a block",
                "kept after forward" if keeps else "the block at work, and one on its way",
            )
        if self.has_next_micro_batch:
            yield self._unsharded_gradient_entry(fsdp.reduced_element_bytes)
            return
        if fsdp.has_unsharded_gradients:
            yield self._earlier_gradient_entry(
                fsdp.reduced_element_bytes, "kept until the last micro batch reduces"
            )
        if fsdp.has_replicas and (self.gradients_persist or self.run.optimizer.in_backward):
            yield self._replica_gradient_entry(fsdp)
        trained = shard_elements(rank_memory.block_weights, shards, trained=True) * shards
        ends = shard_elements(rank_memory.other_weights, shards, trained=True) * shards
        reduced = trained * fsdp.reduced_element_bytes
        own, root = (
            self.block_liveness.gradient_bytes,
            self.head_liveness.gradient_bytes + self.embedding_liveness.gradient_bytes,
        )
        tied = self.head_liveness.gradient_bytes if self.run.model.tied_weights else 0
        several = self.head_liveness.gradient_bytes + (layers > 1) * reduced
        yield MemoryEntry(
            "gradients on their way to shards",
            {
                StepPhase.backward_last: self.head_liveness.gradient_bytes,
                StepPhase.reduce_last: self.head_liveness.gradient_bytes + own + reduced,
                StepPhase.backward_next: several,
                StepPhase.backward_second: several,
                StepPhase.backward_first: several,
                StepPhase.reduce_block: self.head_liveness.gradient_bytes + own + reduced,
                StepPhase.backward_embedding: self.head_liveness.gradient_bytes + reduced,
                StepPhase.reduce_rest: root - tied + ends * fsdp.reduced_element_bytes,
            },
            f"{trained:,} x {fsdp.reduced_element_bytes} B a block",
            "whole gradients, and the buffer of a reduction until the next",
        )

    def _unsharded_gradient_entry(self, element_bytes: int) -> MemoryEntry:
        """What the first piece of several leaves whole, in the format of a reduction."""
        block = shard_elements(self.rank_memory.block_weights, trained=True) * element_bytes
        grown = {
            phase: done * block + self.head_numel * element_bytes * self.rank_memory.has_head
            for phase, (_, done) in self.blocks_by_phase.items()
            if phase in AFTER_HEAD
        }
        reason = "kept until the last piece reduces"
        return MemoryEntry("whole gradients", grown, f"{block:,} B a block", reason)

    def _earlier_gradient_entry(self, element_bytes: int, reason: str) -> MemoryEntry:
        """What earlier micro batches have left whole and not yet in its place."""
        block = shard_elements(self.rank_memory.block_weights, trained=True) * element_bytes
        rest = shard_elements(self.rank_memory.other_weights, trained=True) * element_bytes
        moves = self.rank_memory.fsdp is None and not self.has_tied_weights
        last = rest - self.head_numel * element_bytes * moves
        layers = self.rank_memory.num_layers
        phases = {
            phase: (layers - done) * block + (last if phase in AFTER_HEAD else rest)
            for phase, (_, done) in self.blocks_by_phase.items()
        }
        formula = f"{layers} blocks x {block:,} B + {rest:,} B"
        return MemoryEntry("gradients of earlier micro batches", phases, formula, reason)

    def _replica_gradient_entry(self, fsdp: FSDPMemory) -> MemoryEntry:
        """Shards of gradients that replicas have summed up; torch holds them until the end."""
        block = (
            shard_elements(self.rank_memory.block_weights, fsdp.num_shards, trained=True)
            * fsdp.reduced_element_bytes
        )
        phases = {phase: done * block for phase, (_, done) in self.blocks_by_phase.items()}
        return MemoryEntry(
            "sums over replicas", phases, f"{block:,} B a block", "held until backward ends"
        )

    def _activation_entries(self) -> Iterator[MemoryEntry]:
        kept = {
            phase: self.cumulative_saved_bytes[waiting]
            for phase, (waiting, _) in self.blocks_by_phase.items()
        }
        sizes = Counter(each.saved_bytes for each in self.liveness_by_block)
        formula = " + ".join(f"{count} x {size:,} B" for size, count in sizes.items())
        ways = dict.fromkeys(self.run.memory.recompute_per_layer(self.rank_memory.stages))
        reason = "; ".join(KEPT[each] for each in ways)
        if self.run.memory.offload:
            gone = sum(each.offloaded_bytes for each in self.liveness_by_block)
            reason, formula = "the rest waits elsewhere", f"{formula}, and {gone:,} B offloaded"
        yield MemoryEntry("activations of blocks", kept, formula, reason)
        until = PASSES[: PASSES.index(StepPhase.backward_embedding)]
        yield constant_entry(
            "activations of the embedding",
            self.embedding_liveness.saved_bytes,
            until,
            "",
            "what dropout drew",
        )
        what, formula = "rotations", "2 x tokens x head width"
        if self.run.data.packing:
            what, formula = "rotations and mask", f"rows x ({formula} + tokens x tokens)"
        yield constant_entry(
            what, self.op_graphs.shared_bytes, WITH_ROTATIONS, formula, "of this row's places"
        )
        before = {
            StepPhase.loss: self.head_liveness.saved_bytes,
            StepPhase.backward_loss: self.head_liveness.saved_bytes,
        }
        yield MemoryEntry("activations of the head", before, "", "what the norm and the head keep")

    def _workspace_entries(self) -> Iterator[MemoryEntry]:
        head, loss, start = self.head_liveness, self.loss_liveness, self.embedding_liveness
        replays = self.liveness_by_block
        before = self.cumulative_saved_bytes
        forward = max(
            kept + block.forward_peak for kept, block in zip(before, replays, strict=False)
        )
        work = {
            StepPhase.forward: forward - before[-2],
            StepPhase.loss: max(head.forward_peak - head.saved_bytes, loss.forward_peak),
            StepPhase.backward_loss: loss.backward_peak,
            StepPhase.backward_head: head.backward_peak,
            StepPhase.backward_last: replays[-1].backward_peak,
            StepPhase.backward_next: replays[-2:][0].backward_peak
            * (self.rank_memory.num_layers > 2),
            StepPhase.backward_second: replays[:2][-1].backward_peak
            * (self.rank_memory.num_layers > 2),
            StepPhase.backward_first: replays[0].backward_peak,
            StepPhase.backward_embedding: start.backward_peak,
        }
        yield MemoryEntry("at work", work, "", "what one part makes while it runs")

    def _pipeline_entries(self) -> Iterator[MemoryEntry]:
        """Stages: other pieces that await their backward, and what is sent on and back."""
        rank_memory, op_graphs, moment, parts = (
            self.rank_memory,
            self.op_graphs,
            self.moment,
            len(self.rank_memory.stages),
        )
        stream = op_graphs.block.sizes[0]
        received = stream * sum(not part.is_first for part in rank_memory.stages)
        returned = stream * sum(not part.is_last for part in rank_memory.stages)
        given = op_graphs.loss.sizes[0] if rank_memory.has_head and op_graphs.loss else stream
        replays = self._simulate_blocks(tuple(iter_waiting_parts(rank_memory, moment)))
        others = sum(each.saved_bytes for each in replays)
        others += moment.waiting_passes * (
            op_graphs.shared_bytes + self.embedding_liveness.saved_bytes
        )
        offload = self.run.memory.offload  # then nothing that was kept is in a buffer
        others -= (
            stream
            * sum(not part.is_first for part in iter_waiting_parts(rank_memory, moment))
            * (not offload)
        )
        if parts == 1:  # of several the last goes backward at once
            others += moment.waiting_passes * (
                self.head_liveness.saved_bytes + self.loss_liveness.saved_bytes + given
            )
        else:
            others += moment.waiting_passes * stream
        yield constant_entry(
            "activations of other pieces",
            others,
            PASSES,
            f"those of {len(replays)} blocks and more",
            f"{rank_memory.in_flight} of {rank_memory.num_pipeline_micro_batches * parts} passes "
            "await their backward at the most",
        )
        held = given + (parts - 1) * stream
        yield constant_entry(
            "output of the stage", held, BACKWARD, "", "held until its backward has ended"
        )
        # Of the piece at work one is counted already: what its first block reads, the gradient
        # that its last is given.
        every = rank_memory.num_pipeline_micro_batches * (received + returned)
        sent = (
            received // parts * (moment.finished_backwards > 0)
        )  # the gradient that went last is still there
        buffers = dict.fromkeys(ALL_PHASES, every + sent - received * (not offload))
        buffers[StepPhase.backward_last] -= returned // parts
        buffers[StepPhase.optimizer] = every
        formula = f"{rank_memory.num_pipeline_micro_batches} x {received + returned:,} B"
        reason = "one a piece for activations, and one for their gradients"
        yield MemoryEntry("buffers between stages", buffers, formula, reason)
