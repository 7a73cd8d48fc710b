"""The ledger of a device under DeepSpeed's ZeRO, whose optimizer holds otherwise than torch's.

After ``deepspeed/runtime/zero``: ``stage_1_and_2.py`` and ``stage3.py`` of DeepSpeed 0.18.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from scalewise.parallelism.rank_memory import RankMemory, shard_elements
from scalewise.planner.device_memory import DeviceMemory
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryEntry, StepPhase
from scalewise.planner.phases import AFTER_HEAD, BACKWARD, PASSES, constant_entry
from scalewise.planner.pipeline_peaks import PipelineMoment
from scalewise.precision import FloatFormat

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


class DeepSpeedDeviceMemory(DeviceMemory):
    """Weights at work, masters that are stepped, gradients in buckets on their way to one rank."""

    def __init__(self, run: RunConfig, holds: RankMemory, moment: PipelineMoment) -> None:
        assert holds.zero is not None
        self.zero = holds.zero
        # From stage 2 a gradient leaves for its bucket as soon as it is made.
        super().__init__(run, replace(holds, buckets=holds.buckets or self.zero.stage > 1), moment)

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of a number of a gradient that waits for the step."""
        return self.zero.summed

    def _of_parameters(self, number: FloatFormat) -> MemoryEntry:
        return super()._of_parameters(self.run.precision.compute)

    def _lasting(self) -> Iterator[MemoryEntry]:
        run, holds, zero = self.run, self.holds, self.zero
        yield from super()._lasting()
        if not holds.states_on_host:
            count = holds.numbers(holds.states, trained=True)
            formula = f"{count:,} x {zero.masters} B"
            reason = f"a copy in {run.precision.parameters} that the optimizer steps"
            yield constant_entry("masters", count * zero.masters, ALL_PHASES, formula, reason)
        if zero.threshold:
            weights = (*holds.block * holds.layers, *holds.rest)
            whole = sum(each.count for each in weights if each.count < zero.threshold)
            reason = "too small to be shared out: parallelism.keep_whole_below"
            formula = f"{whole:,} x {zero.weights} B"
            yield constant_entry("small weights", whole * zero.weights, ALL_PHASES, formula, reason)

    def _gradients(self) -> Iterator[MemoryEntry]:
        holds, zero, run = self.holds, self.zero, self.run
        share = holds.numbers(holds.states, trained=True)
        formula = f"{share:,} x {zero.summed} B"
        if zero.stage == 1:
            yield from self._of_first_stage()
        elif not holds.states_on_host:
            reason = "those of this rank's share"
            yield constant_entry("gradients", share * zero.summed, self._shared, formula, reason)
        again = run.accumulation > 1 and zero.stage == 2
        if again and zero.summed == zero.weights == zero.masters and not holds.states_on_host:
            reason = "before they are added to those of other passes"
            yield constant_entry(
                "gradients of this pass", share * zero.summed, self._sent, formula, reason
            )
        yield from self._buckets()
        if zero.live:
            yield self._gathered_weights()

    def _of_first_stage(self) -> Iterator[MemoryEntry]:
        """Gradients stay where they are, or leave for buckets as they are made."""
        holds, zero = self.holds, self.zero
        trained, each = holds.numbers(1, trained=True), zero.summed
        ends = [w for w in holds.rest if w.role in ("embedding", "position")]
        if self.stays or zero.buckets == 1 or zero.bucket >= trained:
            yield from super()._gradients()
        else:
            weights = (*holds.block * holds.layers, *(w for w in holds.rest if w not in ends))
            large = shard_elements((w for w in weights if w.count > zero.bucket), trained=True)
            kept = holds.numbers(holds.states, trained=True) + large
            reason = "of this rank's share, and those that no bucket holds"
            phases = dict.fromkeys(AFTER_HEAD, kept * each) | {StepPhase.optimizer: trained * each}
            yield MemoryEntry("gradients", phases, f"{kept:,} x {each} B", reason)
        last = shard_elements(ends, trained=True)
        what, reason = "gradient of the embedding", "made last, and there while buckets leave"
        yield constant_entry(
            what, last * each, (StepPhase.reduce_rest,), f"{last:,} x {each} B", reason
        )

    @property
    def _shared(self) -> tuple[StepPhase, ...]:
        """Returns when a rank has room for its share: in stage 2 from the first full bucket on."""
        if self.zero.stage == 3 or self.run.accumulation > 1:
            return ALL_PHASES
        block = shard_elements(self.holds.block, trained=True)
        made = {  # with those of the block at work
            phase: self.head_weights + (done + 1) * block
            for phase, (_, done) in self.blocks.items()
        }
        full = (phase for phase in AFTER_HEAD[:-1] if made[phase] >= self.zero.bucket)
        return (*full, StepPhase.reduce_rest, StepPhase.optimizer)

    @property
    def _begun(self) -> tuple[StepPhase, ...]:
        """Returns when there are buckets: those of stages 1 and 2 from the first gradient on."""
        return AFTER_HEAD if self.zero.stage < 3 else BACKWARD

    @property
    def _sent(self) -> tuple[StepPhase, ...]:
        """Returns when buckets are sent: one that takes all, when backward has ended."""
        takes_all = self.zero.bucket >= self.holds.numbers(1, trained=True)
        return (StepPhase.reduce_rest,) if takes_all else self._begun

    def _buckets(self) -> Iterator[MemoryEntry]:
        """Gradients on their way to the ranks that step them."""
        zero, ranks, trained = self.zero, self.holds.states, self.holds.numbers(1, trained=True)
        bucket = min(zero.bucket, trained)
        formula, reason = f"{zero.buckets} x {bucket:,} x {zero.weights} B", "filled, then reduced"
        yield constant_entry(
            "buckets", zero.buckets * bucket * zero.weights, self._begun, formula, reason
        )
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
        yield constant_entry(
            "buckets on their way", sent * zero.masters, self._sent, formula, reason
        )

    def _gathered_weights(self) -> MemoryEntry:
        """Stage 3: what is whole stays so while no more than ``live`` numbers are."""
        zero, holds = self.zero, self.holds
        weights = (*holds.block * holds.layers, *holds.rest)
        large = sum(each.count for each in weights if each.count >= zero.threshold)
        whole = min(large, max(zero.live, shard_elements(holds.block)))
        reason = "gathered for their next use, up to 1e9 numbers"
        formula = f"{whole:,} x {zero.weights} B"
        return constant_entry("gathered weights", whole * zero.weights, PASSES, formula, reason)
