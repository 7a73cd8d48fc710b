"""The lines of one device's ledger: what lasts, what passes keep, what is at work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from scalewise.memory import Recompute
from scalewise.models.base import Part
from scalewise.parallelism.holds import Gathering, Holds, numbers, sizes
from scalewise.plan.ledger import EVERY, Line, Phase
from scalewise.plan.moments import Moment, waiting
from scalewise.plan.phases import (
    AFTER_HEAD,
    BACKWARD,
    PASSES,
    STEPPED_IN_BACKWARD,
    WITH_ROTATIONS,
    blocks,
    line,
)
from scalewise.plan.replay import Replay
from scalewise.plan.replays import NOTHING, of_block, of_ends, of_start, tapes_of
from scalewise.precision import Number
from scalewise.training.callbacks.spec import AVERAGED_BYTES

if TYPE_CHECKING:
    from scalewise.run import Run

KEPT = {
    Recompute.nothing: "all that backward reads",
    Recompute.selective: "products and attention; the rest is made again",
    Recompute.full: "the input of a block; the rest is made again",
}
"""What is kept of a block."""


class Device:
    """Works a ledger out, purpose by purpose."""

    def __init__(self, run: Run, holds: Holds, moment: Moment) -> None:
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
        self.blocks = blocks(holds.layers)
        self.tapes = tapes_of(run.model, holds.shape)
        self.fresh, self.stepped = fresh, self._stepped()
        self.block = of_block(run.model, holds.shape, Recompute.nothing, fresh)
        self.replays = self._replays(holds.parts)
        kept = (each.kept for each in self.replays)
        self.kept_by_first = tuple(accumulate(kept, initial=0))
        start, head, loss = of_ends(run.model, holds.shape, fresh, self.stepped)
        self.start = start if holds.first else NOTHING
        self.head, self.loss = (head, loss) if holds.last else (NOTHING, NOTHING)

    def _replays(self, parts: Sequence[Part]) -> list[Replay]:
        """Returns what the blocks of some parts do, in order."""
        run, shape = self.run, self.holds.shape
        found: list[Replay] = []
        for part in parts:
            for place, each in enumerate(run.memory.of_parts((part,))):
                of = of_start if part.first and not place else of_block
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
        return numbers(ends, trained=True)

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of a number of a gradient that waits for the step."""
        return self.run.precision.parameters.bytes

    def lines(self) -> Iterator[Line]:
        """Yields what lasts, what passes keep, and what is at work."""
        yield from self._lasting()
        yield from self._gradients()
        if self.tied:
            yield self._of_tied()
            if self.stepped > 0:
                size = numbers(self.holds.rest, trained=True) * self.gradient_bytes
                reason = "of the tied weight, when both its gradients are one"
                yield line(
                    "step", round(size * (1 + self.stepped)), (Phase.reduce_rest,), "", reason
                )
        if self.gathering is not None:
            yield from self._gathered(self.gathering)
        yield from self._kept()
        yield from self._at_work()
        if self.holds.pieces > 1:
            yield from self._pipeline()

    def _lasting(self) -> Iterator[Line]:
        run, holds = self.run, self.holds
        if not holds.parameters_on_host:
            yield self._of_parameters(run.precision.parameters)
        yield line(
            "buffers",
            getattr(run.model, "buffer_bytes", 0) * len(holds.parts) * holds.shape.table // 4,
            EVERY,
            "2 x context x head width",
            "rotations of every place, whole on every rank",
        )
        trained, state = holds.numbers(holds.states, trained=True), holds.state_bytes(run)
        if state and not (holds.states_on_host or holds.states_paged):
            yield line(
                "optimizer state",
                state,
                EVERY,
                f"{trained:,} x {state / trained:.4g} B",
                "for each number that is trained",
            )
        if not holds.parameters_on_host:
            formula = f"{holds.numbers(holds.parameters, trained=True):,} x {AVERAGED_BYTES} B"
            reason = "moving average of the weights, as they are sharded"
            yield line("average", holds.average_bytes(run), EVERY, formula, reason)
        if holds.shape.on_cpu and self.stepped < 0:
            scratch = holds.scratch_bytes(run)
            when = STEPPED_IN_BACKWARD if run.optimizer.in_backward else (Phase.optimizer,)
            yield line("step", scratch, when, "", "what stepping the largest takes")

    def _of_parameters(self, number: Number) -> Line:
        shards = self.holds.parameters
        size, count = self.holds.weight_bytes(number.bytes, shards), self.holds.numbers(shards)
        shared = f", 1 of {shards} shards" if shards > 1 else ""
        packed = (count * number.bytes - size) // (number.bytes - 1)
        formula, reason = f"{count:,} x {number.bytes} B{shared}", f"held in {number}"
        if packed:
            formula = f"{packed:,} B + {count - packed:,} x {number.bytes} B{shared}"
            reason = f"packed matrices, and the rest held in {number}"
        return line("parameters", size, EVERY, formula, reason)

    def _gradients(self) -> Iterator[Line]:
        if self.run.optimizer.in_backward:
            return
        holds, each = self.holds, self.gradient_bytes
        count = holds.numbers(holds.gradients, trained=True)
        whole = count * each
        if holds.copies:
            yield line("buckets", holds.copies, EVERY, f"{count:,} x {each} B", "as they are sent")
        reason = "made as backward comes to them"
        if self.stays:
            reason = "summed up over micro batches"
            if holds.buckets:
                reason = "in buckets that outlive the step"
            yield line("gradients", whole, EVERY, f"{count:,} x {each} B", reason)
            if holds.buckets and self.run.accumulation > 1:
                yield self._of_earlier(each, "each moves into its bucket when it is complete")
            return
        if self.followed:
            return
        block, rest = self.block.gradients, self.head.gradients
        if holds.gathering is not None:
            block = numbers(holds.block, holds.gradients, trained=True) * each
            rest = 0
        grown = {
            phase: done * block + rest
            for phase, (_, done) in self.blocks.items()
            if phase in AFTER_HEAD
        }
        grown |= {Phase.optimizer: whole}
        yield Line("gradients", grown, f"{count:,} x {each} B", reason)

    def _of_tied(self) -> Line:
        """A weight with two uses: autograd adds the gradients of both up before it holds either."""
        (name,) = self.run.model.tied_weights
        (weight,) = (weight for weight in self.holds.rest if weight.name == name)
        size = weight.count * self.holds.shape.held * weight.trainable
        waiting = size * (self.head.gradients == 0)
        phases = dict.fromkeys(AFTER_HEAD[:-2], waiting)
        phases |= {Phase.backward_embedding: waiting + size}
        return Line("gradient of the tied head", phases, f"{weight.count:,}", "waits for the other")

    def _gathered(self, gathering: Gathering) -> Iterator[Line]:
        """FSDP: whole weights around the block at work, and gradients on their way to shards."""
        holds, shards = self.holds, gathering.shards
        block = sizes(holds.block, gathering.whole, shards) * shards
        rest = sizes(holds.rest, gathering.whole, shards) * shards
        layers, keeps = holds.layers, gathering.keeps
        if shards > 1 or gathering.replicas:
            yield line(
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
                Phase.forward: max(whole, 1) * each + each,
                Phase.loss: whole * each + last,
                Phase.backward_loss: whole * each,
                Phase.backward_head: (whole or ahead) * each,
                Phase.backward_last: (whole or 1 + ahead) * each,
                Phase.reduce_last: (max(whole - 1, 0) or ahead) * each,
                Phase.backward_next: (max(whole - 1, 0) or 1 + min(ahead, layers - 2)) * each,
                Phase.backward_second: (2 * keeps or 1 + min(ahead, 1)) * each,
                Phase.backward_first: each,
                Phase.reduce_block: 0,
            }
            if self.followed and not keeps:
                held |= {
                    phase: min(layers, done + 1 + ahead) * each
                    for phase, (_, done) in self.blocks.items()
                    if phase in AFTER_HEAD
                }
            yield Line(
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
        trained = numbers(holds.block, shards, trained=True) * shards
        ends = numbers(holds.rest, shards, trained=True) * shards
        reduced = trained * gathering.reduced
        own, root = self.block.gradients, self.head.gradients + self.start.gradients
        tied = self.head.gradients if self.run.model.tied_weights else 0
        several = self.head.gradients + (layers > 1) * reduced
        yield Line(
            "gradients on their way to shards",
            {
                Phase.backward_last: self.head.gradients,
                Phase.reduce_last: self.head.gradients + own + reduced,
                Phase.backward_next: several,
                Phase.backward_second: several,
                Phase.backward_first: several,
                Phase.reduce_block: self.head.gradients + own + reduced,
                Phase.backward_embedding: self.head.gradients + reduced,
                Phase.reduce_rest: root - tied + ends * gathering.reduced,
            },
            f"{trained:,} x {gathering.reduced} B a block",
            "whole gradients, and the buffer of a reduction until the next",
        )

    def _of_this_piece(self, each: int) -> Line:
        """What the first piece of several leaves whole, in the format of a reduction."""
        block = numbers(self.holds.block, trained=True) * each
        grown = {
            phase: done * block + self.head_weights * each * self.holds.last
            for phase, (_, done) in self.blocks.items()
            if phase in AFTER_HEAD
        }
        reason = "kept until the last piece reduces"
        return Line("whole gradients", grown, f"{block:,} B a block", reason)

    def _of_earlier(self, each: int, reason: str) -> Line:
        """What earlier micro batches have left whole and not yet in its place."""
        block = numbers(self.holds.block, trained=True) * each
        rest = numbers(self.holds.rest, trained=True) * each
        moves = self.holds.gathering is None and not self.tied
        last = rest - self.head_weights * each * moves
        layers = self.holds.layers
        phases = {
            phase: (layers - done) * block + (last if phase in AFTER_HEAD else rest)
            for phase, (_, done) in self.blocks.items()
        }
        formula = f"{layers} blocks x {block:,} B + {rest:,} B"
        return Line("gradients of earlier micro batches", phases, formula, reason)

    def _of_replicas(self, gathering: Gathering) -> Line:
        """Shards of gradients that replicas have summed up; torch holds them until the end."""
        block = numbers(self.holds.block, gathering.shards, trained=True) * gathering.reduced
        phases = {phase: done * block for phase, (_, done) in self.blocks.items()}
        return Line(
            "sums over replicas", phases, f"{block:,} B a block", "held until backward ends"
        )

    def _kept(self) -> Iterator[Line]:
        kept = {phase: self.kept_by_first[waiting] for phase, (waiting, _) in self.blocks.items()}
        sizes = Counter(each.kept for each in self.replays)
        formula = " + ".join(f"{count} x {size:,} B" for size, count in sizes.items())
        ways = dict.fromkeys(self.run.memory.of_parts(self.holds.parts))
        reason = "; ".join(KEPT[each] for each in ways)
        if self.run.memory.offload:
            gone = sum(each.away for each in self.replays)
            reason, formula = "the rest waits elsewhere", f"{formula}, and {gone:,} B offloaded"
        yield Line("activations of blocks", kept, formula, reason)
        until = PASSES[: PASSES.index(Phase.backward_embedding)]
        yield line("activations of the embedding", self.start.kept, until, "", "what dropout drew")
        what, formula = "rotations", "2 x tokens x head width"
        if self.run.data.packing:
            what, formula = "rotations and mask", f"rows x ({formula} + tokens x tokens)"
        yield line(what, self.tapes.shared, WITH_ROTATIONS, formula, "of this row's places")
        before = {
            Phase.loss: self.head.kept,
            Phase.backward_loss: self.head.kept,
        }
        yield Line("activations of the head", before, "", "what the norm and the head keep")

    def _at_work(self) -> Iterator[Line]:
        head, loss, start = self.head, self.loss, self.start
        replays = self.replays
        before = self.kept_by_first
        forward = max(
            kept + block.forward_peak for kept, block in zip(before, replays, strict=False)
        )
        work = {
            Phase.forward: forward - before[-2],
            Phase.loss: max(head.forward_peak - head.kept, loss.forward_peak),
            Phase.backward_loss: loss.backward_peak,
            Phase.backward_head: head.backward_peak,
            Phase.backward_last: replays[-1].backward_peak,
            Phase.backward_next: replays[-2:][0].backward_peak * (self.holds.layers > 2),
            Phase.backward_second: replays[:2][-1].backward_peak * (self.holds.layers > 2),
            Phase.backward_first: replays[0].backward_peak,
            Phase.backward_embedding: start.backward_peak,
        }
        yield Line("at work", work, "", "what one part makes while it runs")

    def _pipeline(self) -> Iterator[Line]:
        """Stages: other pieces that await their backward, and what is sent on and back."""
        holds, tapes, moment, parts = self.holds, self.tapes, self.moment, len(self.holds.parts)
        stream = tapes.block.sizes[0]
        received = stream * sum(not part.first for part in holds.parts)
        returned = stream * sum(not part.last for part in holds.parts)
        given = tapes.loss.sizes[0] if holds.last and tapes.loss else stream
        replays = self._replays(tuple(waiting(holds, moment)))
        others = sum(each.kept for each in replays)
        others += moment.others * (tapes.shared + self.start.kept)
        offload = self.run.memory.offload  # then nothing that was kept is in a buffer
        others -= stream * sum(not part.first for part in waiting(holds, moment)) * (not offload)
        if parts == 1:  # of several the last goes backward at once
            others += moment.others * (self.head.kept + self.loss.kept + given)
        else:
            others += moment.others * stream
        yield line(
            "activations of other pieces",
            others,
            PASSES,
            f"those of {len(replays)} blocks and more",
            f"{holds.in_flight} of {holds.pieces * parts} passes await their backward at the most",
        )
        held = given + (parts - 1) * stream
        yield line("output of the stage", held, BACKWARD, "", "held until its backward has ended")
        # Of the piece at work one is counted already: what its first block reads, the gradient
        # that its last is given.
        every = holds.pieces * (received + returned)
        sent = received // parts * (moment.done > 0)  # the gradient that went last is still there
        buffers = dict.fromkeys(EVERY, every + sent - received * (not offload))
        buffers[Phase.backward_last] -= returned // parts
        buffers[Phase.optimizer] = every
        formula = f"{holds.pieces} x {received + returned:,} B"
        reason = "one a piece for activations, and one for their gradients"
        yield Line("buffers between stages", buffers, formula, reason)
