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
from scalewise.training.callbacks.callback_args import AVERAGED_BYTES

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

    def __init__(self, run: RunConfig, holds: RankMemory, moment: PipelineMoment) -> None:
        self.run, self.holds, self.moment = run, holds, moment
        gathering = holds.gathering
        several = run.accumulation > 1 or moment.done > 0
        if gathering is not None and moment.done:  # torch reduces nothing before the last piece
            keeps = gathering.keeps or moment.drains
            gathering = replace(gathering, keeps=keeps, whole_gradients=True)
        self.gathering = gathering
        # Of a piece that others follow nothing is reduced, and its weights stay gathered.
        self.followed = gathering is not None and holds.pieces > 1 and not moment.done
        whole = gathering is not None and gathering.whole_gradients
        self.stays = (several and not whole) or holds.buckets
        adds = whole and gathering is not None and gathering.reduced == holds.shape.held
        fresh = not adds if gathering is not None else not self.stays
        self.tied = holds.first and holds.last and bool(run.model.tied_weights)
        self.blocks = blocks_by_phase(holds.layers)
        self.tapes = model_op_graphs(run.model, holds.shape)
        self.fresh, self.stepped = fresh, self._stepped()
        self.block = block_liveness(run.model, holds.shape, Recompute.nothing, fresh)
        self.replays = self._replays(holds.parts)
        kept = (each.kept for each in self.replays)
        self.kept_by_first = tuple(accumulate(kept, initial=0))
        start, head, loss = ends_liveness(run.model, holds.shape, fresh, self.stepped)
        self.start = start if holds.first else NOTHING
        self.head, self.loss = (head, loss) if holds.last else (NOTHING, NOTHING)

    def _replays(self, parts: Sequence[StageSlice]) -> list[PartLiveness]:
        """Returns what the blocks of some parts do, in order."""
        run, shape = self.run, self.holds.shape
        found: list[PartLiveness] = []
        for part in parts:
            for place, each in enumerate(run.memory.of_parts((part,))):
                of = first_block_liveness if part.first and not place else block_liveness
                found.append(
                    of(run.model, shape, each, self.fresh, run.memory.offload, self.stepped)
                )
        return found

    def _stepped(self) -> float:
        """Returns the bytes that a step in backward takes for each of a gradient; else -1.

        Where weights are shards, their steps are not in the pass of whole ones.
        """
        if not self.run.optimizer.in_backward or self.gathering is not None:
            return -1.0
        each, held = self.run.optimizer, self.gradient_bytes
        weights = [w for w in (*self.holds.block, *self.holds.rest) if w.trainable]
        largest = max(weights, key=lambda weight: weight.count)
        return each.scratch_bytes(largest, 1, held) / (largest.count * held)

    @property
    def head_weights(self) -> int:
        """Returns the numbers of what comes after the blocks."""
        ends = [w for w in self.holds.rest if w.role not in ("embedding", "position")]
        return shard_elements(ends, trained=True)

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of a number of a gradient that waits for the step."""
        return self.run.precision.parameters.bytes

    def lines(self) -> Iterator[MemoryEntry]:
        """Yields what lasts, what passes keep, and what is at work."""
        yield from self._lasting()
        yield from self._gradients()
        if self.tied:
            yield self._of_tied()
            if self.stepped > 0:
                size = shard_elements(self.holds.rest, trained=True) * self.gradient_bytes
                reason = "of the tied weight, when both its gradients are one"
                yield constant_entry(
                    "step", round(size * (1 + self.stepped)), (StepPhase.reduce_rest,), "", reason
                )
        if self.gathering is not None:
            yield from self._gathered(self.gathering)
        yield from self._kept()
        yield from self._at_work()
        if self.holds.pieces > 1:
            yield from self._pipeline()

    def _lasting(self) -> Iterator[MemoryEntry]:
        run, holds = self.run, self.holds
        if not holds.parameters_on_host:
            yield self._of_parameters(run.precision.parameters)
        yield constant_entry(
            "buffers",
            getattr(run.model, "buffer_bytes", 0) * len(holds.parts) * holds.shape.table // 4,
            ALL_PHASES,
            "2 x context x head width",
            "rotations of every place, whole on every rank",
        )
        trained, state = holds.numbers(holds.states, trained=True), holds.state_bytes(run)
        if state and not (holds.states_on_host or holds.states_paged):
            yield constant_entry(
                "optimizer state",
                state,
                ALL_PHASES,
                f"{trained:,} x {state / trained:.4g} B",
                "for each number that is trained",
            )
        if not holds.parameters_on_host:
            formula = f"{holds.numbers(holds.parameters, trained=True):,} x {AVERAGED_BYTES} B"
            reason = "moving average of the weights, as they are sharded"
            yield constant_entry("average", holds.average_bytes(run), ALL_PHASES, formula, reason)
        if holds.shape.on_cpu and self.stepped < 0:
            scratch = holds.scratch_bytes(run)
            when = STEPPED_IN_BACKWARD if run.optimizer.in_backward else (StepPhase.optimizer,)
            yield constant_entry("step", scratch, when, "", "what stepping the largest takes")

    def _of_parameters(self, number: FloatFormat) -> MemoryEntry:
        shards = self.holds.parameters
        size, count = self.holds.weight_bytes(number.bytes, shards), self.holds.numbers(shards)
        shared = f", 1 of {shards} shards" if shards > 1 else ""
        packed = (count * number.bytes - size) // (number.bytes - 1)
        formula, reason = f"{count:,} x {number.bytes} B{shared}", f"held in {number}"
        if packed:
            formula = f"{packed:,} B + {count - packed:,} x {number.bytes} B{shared}"
            reason = f"packed matrices, and the rest held in {number}"
        return constant_entry("parameters", size, ALL_PHASES, formula, reason)

    def _gradients(self) -> Iterator[MemoryEntry]:
        if self.run.optimizer.in_backward:
            return
        holds, each = self.holds, self.gradient_bytes
        count = holds.numbers(holds.gradients, trained=True)
        whole = count * each
        if holds.copies:
            yield constant_entry(
                "buckets", holds.copies, ALL_PHASES, f"{count:,} x {each} B", "as they are sent"
            )
        reason = "made as backward comes to them"
        if self.stays:
            reason = "summed up over micro batches"
            if holds.buckets:
                reason = "in buckets that outlive the step"
            yield constant_entry("gradients", whole, ALL_PHASES, f"{count:,} x {each} B", reason)
            if holds.buckets and self.run.accumulation > 1:
                yield self._of_earlier(each, "each moves into its bucket when it is complete")
            return
        if self.followed:
            return
        block, rest = self.block.gradients, self.head.gradients
        if holds.gathering is not None:
            block = shard_elements(holds.block, holds.gradients, trained=True) * each
            rest = 0
        grown = {
            phase: done * block + rest
            for phase, (_, done) in self.blocks.items()
            if phase in AFTER_HEAD
        }
        grown |= {StepPhase.optimizer: whole}
        yield MemoryEntry("gradients", grown, f"{count:,} x {each} B", reason)

    def _of_tied(self) -> MemoryEntry:
        """A weight with two uses: autograd adds the gradients of both up before it holds either."""
        (name,) = self.run.model.tied_weights
        (weight,) = (weight for weight in self.holds.rest if weight.name == name)
        size = weight.count * self.holds.shape.held * weight.trainable
        waiting = size * (self.head.gradients == 0)
        phases = dict.fromkeys(AFTER_HEAD[:-2], waiting)
        phases |= {StepPhase.backward_embedding: waiting + size}
        return MemoryEntry(
            "gradient of the tied head", phases, f"{weight.count:,}", "waits for the other"
        )

    def _gathered(self, gathering: FSDPMemory) -> Iterator[MemoryEntry]:
        """FSDP: whole weights around the block at work, and gradients on their way to shards."""
        holds, shards = self.holds, gathering.shards
        block = shard_bytes(holds.block, gathering.whole, shards) * shards
        rest = shard_bytes(holds.rest, gathering.whole, shards) * shards
        layers, keeps = holds.layers, gathering.keeps
        if shards > 1 or gathering.replicas:
            yield constant_entry(
                "gathered weights outside of blocks",
                rest,
                PASSES[:-1],
                f"{rest // gathering.whole:,} x {gathering.whole} B",
                "gathered for the whole pass",
            )
            # The buffer of a gather is as large as what it fills; torch keeps it for one block,
            # and the last until the module's forward ends: with the loss in pieces, after that.
            each, whole = block, layers * keeps
            last = each * (holds.shape.loss_chunk > 0)
            ahead = min(gathering.ahead, layers - 1)
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
            if self.followed and not keeps:
                held |= {
                    phase: min(layers, done + 1 + ahead) * each
                    for phase, (_, done) in self.blocks.items()
                    if phase in AFTER_HEAD
                }
            yield MemoryEntry(
                "gathered weights of blocks",
                held,
                f"{block:,} B a block",
                "kept after forward" if keeps else "the block at work, and one on its way",
            )
        if self.followed:
            yield self._of_this_piece(gathering.reduced)
            return
        if gathering.whole_gradients:
            yield self._of_earlier(gathering.reduced, "kept until the last micro batch reduces")
        if gathering.replicas and (self.stays or self.run.optimizer.in_backward):
            yield self._of_replicas(gathering)
        trained = shard_elements(holds.block, shards, trained=True) * shards
        ends = shard_elements(holds.rest, shards, trained=True) * shards
        reduced = trained * gathering.reduced
        own, root = self.block.gradients, self.head.gradients + self.start.gradients
        tied = self.head.gradients if self.run.model.tied_weights else 0
        several = self.head.gradients + (layers > 1) * reduced
        yield MemoryEntry(
            "gradients on their way to shards",
            {
                StepPhase.backward_last: self.head.gradients,
                StepPhase.reduce_last: self.head.gradients + own + reduced,
                StepPhase.backward_next: several,
                StepPhase.backward_second: several,
                StepPhase.backward_first: several,
                StepPhase.reduce_block: self.head.gradients + own + reduced,
                StepPhase.backward_embedding: self.head.gradients + reduced,
                StepPhase.reduce_rest: root - tied + ends * gathering.reduced,
            },
            f"{trained:,} x {gathering.reduced} B a block",
            "whole gradients, and the buffer of a reduction until the next",
        )

    def _of_this_piece(self, each: int) -> MemoryEntry:
        """What the first piece of several leaves whole, in the format of a reduction."""
        block = shard_elements(self.holds.block, trained=True) * each
        grown = {
            phase: done * block + self.head_weights * each * self.holds.last
            for phase, (_, done) in self.blocks.items()
            if phase in AFTER_HEAD
        }
        reason = "kept until the last piece reduces"
        return MemoryEntry("whole gradients", grown, f"{block:,} B a block", reason)

    def _of_earlier(self, each: int, reason: str) -> MemoryEntry:
        """What earlier micro batches have left whole and not yet in its place."""
        block = shard_elements(self.holds.block, trained=True) * each
        rest = shard_elements(self.holds.rest, trained=True) * each
        moves = self.holds.gathering is None and not self.tied
        last = rest - self.head_weights * each * moves
        layers = self.holds.layers
        phases = {
            phase: (layers - done) * block + (last if phase in AFTER_HEAD else rest)
            for phase, (_, done) in self.blocks.items()
        }
        formula = f"{layers} blocks x {block:,} B + {rest:,} B"
        return MemoryEntry("gradients of earlier micro batches", phases, formula, reason)

    def _of_replicas(self, gathering: FSDPMemory) -> MemoryEntry:
        """Shards of gradients that replicas have summed up; torch holds them until the end."""
        block = shard_elements(self.holds.block, gathering.shards, trained=True) * gathering.reduced
        phases = {phase: done * block for phase, (_, done) in self.blocks.items()}
        return MemoryEntry(
            "sums over replicas", phases, f"{block:,} B a block", "held until backward ends"
        )

    def _kept(self) -> Iterator[MemoryEntry]:
        kept = {phase: self.kept_by_first[waiting] for phase, (waiting, _) in self.blocks.items()}
        sizes = Counter(each.kept for each in self.replays)
        formula = " + ".join(f"{count} x {size:,} B" for size, count in sizes.items())
        ways = dict.fromkeys(self.run.memory.of_parts(self.holds.parts))
        reason = "; ".join(KEPT[each] for each in ways)
        if self.run.memory.offload:
            gone = sum(each.away for each in self.replays)
            reason, formula = "the rest waits elsewhere", f"{formula}, and {gone:,} B offloaded"
        yield MemoryEntry("activations of blocks", kept, formula, reason)
        until = PASSES[: PASSES.index(StepPhase.backward_embedding)]
        yield constant_entry(
            "activations of the embedding", self.start.kept, until, "", "what dropout drew"
        )
        what, formula = "rotations", "2 x tokens x head width"
        if self.run.data.packing:
            what, formula = "rotations and mask", f"rows x ({formula} + tokens x tokens)"
        yield constant_entry(
            what, self.tapes.shared, WITH_ROTATIONS, formula, "of this row's places"
        )
        before = {
            StepPhase.loss: self.head.kept,
            StepPhase.backward_loss: self.head.kept,
        }
        yield MemoryEntry("activations of the head", before, "", "what the norm and the head keep")

    def _at_work(self) -> Iterator[MemoryEntry]:
        head, loss, start = self.head, self.loss, self.start
        replays = self.replays
        before = self.kept_by_first
        forward = max(
            kept + block.forward_peak for kept, block in zip(before, replays, strict=False)
        )
        work = {
            StepPhase.forward: forward - before[-2],
            StepPhase.loss: max(head.forward_peak - head.kept, loss.forward_peak),
            StepPhase.backward_loss: loss.backward_peak,
            StepPhase.backward_head: head.backward_peak,
            StepPhase.backward_last: replays[-1].backward_peak,
            StepPhase.backward_next: replays[-2:][0].backward_peak * (self.holds.layers > 2),
            StepPhase.backward_second: replays[:2][-1].backward_peak * (self.holds.layers > 2),
            StepPhase.backward_first: replays[0].backward_peak,
            StepPhase.backward_embedding: start.backward_peak,
        }
        yield MemoryEntry("at work", work, "", "what one part makes while it runs")

    def _pipeline(self) -> Iterator[MemoryEntry]:
        """Stages: other pieces that await their backward, and what is sent on and back."""
        holds, tapes, moment, parts = self.holds, self.tapes, self.moment, len(self.holds.parts)
        stream = tapes.block.sizes[0]
        received = stream * sum(not part.first for part in holds.parts)
        returned = stream * sum(not part.last for part in holds.parts)
        given = tapes.loss.sizes[0] if holds.last and tapes.loss else stream
        replays = self._replays(tuple(iter_waiting_parts(holds, moment)))
        others = sum(each.kept for each in replays)
        others += moment.others * (tapes.shared + self.start.kept)
        offload = self.run.memory.offload  # then nothing that was kept is in a buffer
        others -= (
            stream
            * sum(not part.first for part in iter_waiting_parts(holds, moment))
            * (not offload)
        )
        if parts == 1:  # of several the last goes backward at once
            others += moment.others * (self.head.kept + self.loss.kept + given)
        else:
            others += moment.others * stream
        yield constant_entry(
            "activations of other pieces",
            others,
            PASSES,
            f"those of {len(replays)} blocks and more",
            f"{holds.in_flight} of {holds.pieces * parts} passes await their backward at the most",
        )
        held = given + (parts - 1) * stream
        yield constant_entry(
            "output of the stage", held, BACKWARD, "", "held until its backward has ended"
        )
        # Of the piece at work one is counted already: what its first block reads, the gradient
        # that its last is given.
        every = holds.pieces * (received + returned)
        sent = received // parts * (moment.done > 0)  # the gradient that went last is still there
        buffers = dict.fromkeys(ALL_PHASES, every + sent - received * (not offload))
        buffers[StepPhase.backward_last] -= returned // parts
        buffers[StepPhase.optimizer] = every
        formula = f"{holds.pieces} x {received + returned:,} B"
        reason = "one a piece for activations, and one for their gradients"
        yield MemoryEntry("buffers between stages", buffers, formula, reason)
