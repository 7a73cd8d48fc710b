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

    def __init__(self, run: RunConfig, rank_memory: RankMemory, moment: PipelineMoment) -> None:
        assert rank_memory.zero is not None
        self.zero = rank_memory.zero
        # From stage 2 a gradient leaves for its bucket as soon as it is made.
        super().__init__(
            run,
            replace(
                rank_memory,
                has_persistent_buckets=rank_memory.has_persistent_buckets or self.zero.stage > 1,
            ),
            moment,
        )

    @property
    def gradient_element_bytes(self) -> int:
        """Returns the bytes of a number of a gradient that waits for the step."""
        return self.zero.gradient_element_bytes

    def _parameter_entry(self, dtype: FloatFormat) -> MemoryEntry:
        return super()._parameter_entry(self.run.precision.compute)

    def _persistent_entries(self) -> Iterator[MemoryEntry]:
        run, rank_memory, zero = self.run, self.rank_memory, self.zero
        yield from super()._persistent_entries()
        if not rank_memory.states_on_host:
            count = rank_memory.numel(rank_memory.state_shards, trained=True)
            formula = f"{count:,} x {zero.master_element_bytes} B"
            reason = f"a copy in {run.precision.parameters} that the optimizer steps"
            yield constant_entry(
                "masters", count * zero.master_element_bytes, ALL_PHASES, formula, reason
            )
        if zero.persistence_threshold:
            weights = (
                *rank_memory.block_weights * rank_memory.num_layers,
                *rank_memory.other_weights,
            )
            whole = sum(each.numel for each in weights if each.numel < zero.persistence_threshold)
            reason = "too small to be shared out: parallelism.keep_whole_below"
            formula = f"{whole:,} x {zero.weight_element_bytes} B"
            yield constant_entry(
                "small weights", whole * zero.weight_element_bytes, ALL_PHASES, formula, reason
            )

    def _gradient_entries(self) -> Iterator[MemoryEntry]:
        rank_memory, zero, run = self.rank_memory, self.zero, self.run
        share = rank_memory.numel(rank_memory.state_shards, trained=True)
        formula = f"{share:,} x {zero.gradient_element_bytes} B"
        if zero.stage == 1:
            yield from self._stage1_gradient_entries()
        elif not rank_memory.states_on_host:
            reason = "those of this rank's share"
            yield constant_entry(
                "gradients",
                share * zero.gradient_element_bytes,
                self._gradient_shard_phases,
                formula,
                reason,
            )
        again = run.accumulation > 1 and zero.stage == 2
        if (
            again
            and zero.gradient_element_bytes
            == zero.weight_element_bytes
            == zero.master_element_bytes
            and not rank_memory.states_on_host
        ):
            reason = "before they are added to those of other passes"
            yield constant_entry(
                "gradients of this pass",
                share * zero.gradient_element_bytes,
                self._reduction_phases,
                formula,
                reason,
            )
        yield from self._bucket_entries()
        if zero.max_live_elements:
            yield self._gathered_weights_entry()

    def _stage1_gradient_entries(self) -> Iterator[MemoryEntry]:
        """Gradients stay where they are, or leave for buckets as they are made."""
        rank_memory, zero = self.rank_memory, self.zero
        trained, each = rank_memory.numel(1, trained=True), zero.gradient_element_bytes
        ends = [w for w in rank_memory.other_weights if w.role in ("embedding", "position")]
        if self.gradients_persist or zero.num_buckets == 1 or zero.bucket_elements >= trained:
            yield from super()._gradient_entries()
        else:
            weights = (
                *rank_memory.block_weights * rank_memory.num_layers,
                *(w for w in rank_memory.other_weights if w not in ends),
            )
            large = shard_elements(
                (w for w in weights if w.numel > zero.bucket_elements), trained=True
            )
            kept = rank_memory.numel(rank_memory.state_shards, trained=True) + large
            reason = "of this rank's share, and those that no bucket holds"
            phases = dict.fromkeys(AFTER_HEAD, kept * each) | {StepPhase.optimizer: trained * each}
            yield MemoryEntry("gradients", phases, f"{kept:,} x {each} B", reason)
        last = shard_elements(ends, trained=True)
        what, reason = "gradient of the embedding", "made last, and there while buckets leave"
        yield constant_entry(
            what, last * each, (StepPhase.reduce_rest,), f"{last:,} x {each} B", reason
        )

    @property
    def _gradient_shard_phases(self) -> tuple[StepPhase, ...]:
        """Returns when a rank has room for its share: in stage 2 from the first full bucket on."""
        if self.zero.stage == 3 or self.run.accumulation > 1:
            return ALL_PHASES
        block = shard_elements(self.rank_memory.block_weights, trained=True)
        made = {  # with those of the block at work
            phase: self.head_numel + (done + 1) * block
            for phase, (_, done) in self.blocks_by_phase.items()
        }
        full = (phase for phase in AFTER_HEAD[:-1] if made[phase] >= self.zero.bucket_elements)
        return (*full, StepPhase.reduce_rest, StepPhase.optimizer)

    @property
    def _bucket_phases(self) -> tuple[StepPhase, ...]:
        """Returns when there are buckets: those of stages 1 and 2 from the first gradient on."""
        return AFTER_HEAD if self.zero.stage < 3 else BACKWARD

    @property
    def _reduction_phases(self) -> tuple[StepPhase, ...]:
        """Returns when buckets are sent: one that takes all, when backward has ended."""
        takes_all = self.zero.bucket_elements >= self.rank_memory.numel(1, trained=True)
        return (StepPhase.reduce_rest,) if takes_all else self._bucket_phases

    def _bucket_entries(self) -> Iterator[MemoryEntry]:
        """Gradients on their way to the ranks that step them."""
        zero, ranks, trained = (
            self.zero,
            self.rank_memory.state_shards,
            self.rank_memory.numel(1, trained=True),
        )
        bucket = min(zero.bucket_elements, trained)
        formula, reason = (
            f"{zero.num_buckets} x {bucket:,} x {zero.weight_element_bytes} B",
            "filled, then reduced",
        )
        yield constant_entry(
            "buckets",
            zero.num_buckets * bucket * zero.weight_element_bytes,
            self._bucket_phases,
            formula,
            reason,
        )
        weights = (*self.rank_memory.block_weights, *self.rank_memory.other_weights)
        # What no bucket can hold is sent by itself.
        whole = max(bucket, max((w.numel for w in weights if w.trainable), default=0))
        sent = whole - whole // ranks if zero.stage == 2 else 0
        if zero.stage == 3 and bucket == trained:
            sent = whole  # gradients are joined; those of a part when it is not at its most
        if zero.master_element_bytes > zero.weight_element_bytes and zero.stage < 3:
            sent += whole
        reason = "what a reduction makes of a bucket"
        formula = f"{sent:,} x {zero.master_element_bytes} B"
        yield constant_entry(
            "buckets on their way",
            sent * zero.master_element_bytes,
            self._reduction_phases,
            formula,
            reason,
        )

    def _gathered_weights_entry(self) -> MemoryEntry:
        """Stage 3: what is whole stays so while no more than ``live`` numbers are."""
        zero, rank_memory = self.zero, self.rank_memory
        weights = (*rank_memory.block_weights * rank_memory.num_layers, *rank_memory.other_weights)
        large = sum(each.numel for each in weights if each.numel >= zero.persistence_threshold)
        whole = min(large, max(zero.max_live_elements, shard_elements(rank_memory.block_weights)))
        reason = "gathered for their next use, up to 1e9 numbers"
        formula = f"{whole:,} x {zero.weight_element_bytes} B"
        return constant_entry(
            "gathered weights", whole * zero.weight_element_bytes, PASSES, formula, reason
        )
