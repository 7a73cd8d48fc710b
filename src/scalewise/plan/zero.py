"""The ledger of a device under DeepSpeed's ZeRO, whose optimizer holds otherwise than torch's.

After ``deepspeed/runtime/zero``: ``stage_1_and_2.py`` and ``stage3.py`` of DeepSpeed 0.18.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from scalewise.parallelism.holds import Holds, numbers
from scalewise.plan.device import Device
from scalewise.plan.ledger import EVERY, Line, Phase
from scalewise.plan.moments import Moment
from scalewise.plan.phases import AFTER_HEAD, BACKWARD, PASSES, line
from scalewise.precision import Number

if TYPE_CHECKING:
    from scalewise.run import Run


class ZeroDevice(Device):
    """Weights at work, masters that are stepped, gradients in buckets on their way to one rank."""

    def __init__(self, run: Run, holds: Holds, moment: Moment) -> None:
        assert holds.zero is not None
        self.zero = holds.zero
        # From stage 2 a gradient leaves for its bucket as soon as it is made.
        super().__init__(run, replace(holds, buckets=holds.buckets or self.zero.stage > 1), moment)

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of a number of a gradient that waits for the step."""
        return self.zero.summed

    def _of_parameters(self, number: Number) -> Line:
        return super()._of_parameters(self.run.precision.compute)

    def _lasting(self) -> Iterator[Line]:
        run, holds, zero = self.run, self.holds, self.zero
        yield from super()._lasting()
        if not holds.states_on_host:
            count = holds.numbers(holds.states, trained=True)
            formula = f"{count:,} x {zero.masters} B"
            reason = f"a copy in {run.precision.parameters} that the optimizer steps"
            yield line("masters", count * zero.masters, EVERY, formula, reason)
        if zero.threshold:
            weights = (*holds.block * holds.layers, *holds.rest)
            whole = sum(each.count for each in weights if each.count < zero.threshold)
            reason = "too small to be shared out: parallelism.keep_whole_below"
            formula = f"{whole:,} x {zero.weights} B"
            yield line("small weights", whole * zero.weights, EVERY, formula, reason)

    def _gradients(self) -> Iterator[Line]:
        holds, zero, run = self.holds, self.zero, self.run
        share = holds.numbers(holds.states, trained=True)
        formula = f"{share:,} x {zero.summed} B"
        if zero.stage == 1:
            yield from self._of_first_stage()
        elif not holds.states_on_host:
            reason = "those of this rank's share"
            yield line("gradients", share * zero.summed, self._shared, formula, reason)
        again = run.accumulation > 1 and zero.stage == 2
        if again and zero.summed == zero.weights == zero.masters and not holds.states_on_host:
            reason = "before they are added to those of other passes"
            yield line("gradients of this pass", share * zero.summed, self._sent, formula, reason)
        yield from self._buckets()
        if zero.live:
            yield self._gathered_weights()

    def _of_first_stage(self) -> Iterator[Line]:
        """Gradients stay where they are, or leave for buckets as they are made."""
        holds, zero = self.holds, self.zero
        trained, each = holds.numbers(1, trained=True), zero.summed
        ends = [w for w in holds.rest if w.role in ("embedding", "position")]
        if self.stays or zero.buckets == 1 or zero.bucket >= trained:
            yield from super()._gradients()
        else:
            weights = (*holds.block * holds.layers, *(w for w in holds.rest if w not in ends))
            large = numbers((w for w in weights if w.count > zero.bucket), trained=True)
            kept = holds.numbers(holds.states, trained=True) + large
            reason = "of this rank's share, and those that no bucket holds"
            phases = dict.fromkeys(AFTER_HEAD, kept * each) | {Phase.optimizer: trained * each}
            yield Line("gradients", phases, f"{kept:,} x {each} B", reason)
        last = numbers(ends, trained=True)
        what, reason = "gradient of the embedding", "made last, and there while buckets leave"
        yield line(what, last * each, (Phase.reduce_rest,), f"{last:,} x {each} B", reason)

    @property
    def _shared(self) -> tuple[Phase, ...]:
        """Returns when a rank has room for its share: in stage 2 from the first full bucket on."""
        if self.zero.stage == 3 or self.run.accumulation > 1:
            return EVERY
        block = numbers(self.holds.block, trained=True)
        made = {  # with those of the block at work
            phase: self.head_weights + (done + 1) * block
            for phase, (_, done) in self.blocks.items()
        }
        full = (phase for phase in AFTER_HEAD[:-1] if made[phase] >= self.zero.bucket)
        return (*full, Phase.reduce_rest, Phase.optimizer)

    @property
    def _begun(self) -> tuple[Phase, ...]:
        """Returns when there are buckets: those of stages 1 and 2 from the first gradient on."""
        return AFTER_HEAD if self.zero.stage < 3 else BACKWARD

    @property
    def _sent(self) -> tuple[Phase, ...]:
        """Returns when buckets are sent: one that takes all, when backward has ended."""
        takes_all = self.zero.bucket >= self.holds.numbers(1, trained=True)
        return (Phase.reduce_rest,) if takes_all else self._begun

    def _buckets(self) -> Iterator[Line]:
        """Gradients on their way to the ranks that step them."""
        zero, ranks, trained = self.zero, self.holds.states, self.holds.numbers(1, trained=True)
        bucket = min(zero.bucket, trained)
        formula, reason = f"{zero.buckets} x {bucket:,} x {zero.weights} B", "filled, then reduced"
        yield line("buckets", zero.buckets * bucket * zero.weights, self._begun, formula, reason)
        weights = (*self.holds.block, *self.holds.rest)
        # What no bucket can hold is sent by itself.
        whole = max(bucket, max((w.count for w in weights if w.trainable), default=0))
        sent = whole - whole // ranks if zero.stage == 2 else 0
        if zero.stage == 3 and bucket == trained:
            sent = whole  # gradients are joined; those of a part when it is not at its most
        if zero.masters > zero.weights and zero.stage < 3:
            sent += whole
        reason = "what a reduction makes of a bucket"
        formula = f"{sent:,} x {zero.masters} B"
        yield line("buckets on their way", sent * zero.masters, self._sent, formula, reason)

    def _gathered_weights(self) -> Line:
        """Stage 3: what is whole stays so while no more than ``live`` numbers are."""
        zero, holds = self.zero, self.holds
        weights = (*holds.block * holds.layers, *holds.rest)
        large = sum(each.count for each in weights if each.count >= zero.threshold)
        whole = min(large, max(zero.live, numbers(holds.block)))
        reason = "gathered for their next use, up to 1e9 numbers"
        formula = f"{whole:,} x {zero.weights} B"
        return line("gathered weights", whole * zero.weights, PASSES, formula, reason)
