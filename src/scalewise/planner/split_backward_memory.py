"""Memory of a rank whose pipeline schedule computes the gradients of inputs and weights apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import islice

from scalewise.planner.activation_liveness import memory_of_saved_tensors, model_op_graphs
from scalewise.planner.device_memory import DeviceMemory, persistent_entries
from scalewise.planner.memory_breakdown import MemoryBreakdown, MemoryEntry, StepPhase
from scalewise.planner.rank_memory import RankMemory
from scalewise.planner.rank_step import PeakPoint, StateConfigs, rank_step
from scalewise.planner.split_schedule import PassKind, SplitPoint, SplitSchedule
from scalewise.planner.split_stage import stage_memory
from scalewise.run_config import RunConfig

REASONS = {
    "activations of blocks": "of the micro-batch whose backward runs",
    "activations of other pieces": "saved by forward passes that wait for their backward",
    "kept for weight gradients": "saved tensors, and gradients of the outputs of layers",
    "gradients": "accumulated over micro-batches",
    "whole gradients": "kept until the reduction after the last backward of their stage",
    "gathered weights of blocks": "kept until the next forward",
    "gathered weights outside of blocks": "kept until the schedule ends",
    "buffers between stages": "received tensors, and gradients of inputs until the next step",
    "at work": "of the pass that is running, freed after it",
}
"""Meaning of each entry that depends on the schedule."""


class SplitBackwardMemory:
    """Memory of one rank over all passes of its schedule.

    Args:
        run: Run that trains.
        rank_memory: Partition of the rank.
        schedule: Order of its passes.
        configs: Configs of the run that decide the memory of model states.
    """

    def __init__(
        self,
        run: RunConfig,
        rank_memory: RankMemory,
        schedule: SplitSchedule,
        configs: StateConfigs,
    ) -> None:
        states, forward_spec = rank_memory.states, rank_memory.forward_spec
        self._schedule, self._states = schedule, states
        self._persistent = persistent_entries(configs, states).entries
        self._persistent_bytes = sum(
            entry.bytes.get(StepPhase.forward, 0) for entry in self._persistent
        )
        end = PeakPoint(
            finished_backwards=schedule.micro_batches, follows_forward=False, ends_schedule=True
        )
        self._after_schedule = DeviceMemory(run, rank_memory, configs, end).breakdown.entries
        step = rank_step(configs, states, PeakPoint())
        self._step, self._on_cpu = step, forward_spec.on_cpu
        stages = rank_memory.stages
        self._stages = [
            stage_memory(
                run.model,
                run.memory,
                stage,
                forward_spec,
                memory_of_saved_tensors(run),
                step.last_gather_bytes,
                has_local_next=schedule.has_local_next(index),
                has_local_previous=index > 0 and schedule.has_local_next(index - 1),
            )
            for index, stage in enumerate(stages)
        ]
        num_buffers = sum((not it.is_first) + (not it.is_last) for it in stages)
        residual_bytes = model_op_graphs(run.model, forward_spec).block.sizes[0]
        self._buffer_bytes = schedule.micro_batches * num_buffers * residual_bytes
        self._gathered_by_stage: list[int] = []
        if (fsdp := states.fsdp) is not None:
            gathered = map(fsdp.gathered_bytes, states.list_block_weights())
            self._gathered_by_stage = [sum(islice(gathered, len(it.layers))) for it in stages]

    @cached_property
    def peak(self) -> int:
        """Peak memory, in bytes."""
        peaks = [size for size, _ in self._peaks.values()]
        return max(*peaks, *(sum(sizes.values()) for sizes in self._end_sizes.values()))

    @cached_property
    def breakdown(self) -> MemoryBreakdown:
        """Memory breakdown; each phase is that of the pass with its highest peak."""
        sizes: dict[StepPhase, Mapping[str, int]] = {
            phase: self._schedule_sizes(point, phase) for phase, (_, point) in self._peaks.items()
        }
        sizes |= self._end_sizes
        texts = {entry.name: entry for entry in (*self._after_schedule, *self._persistent)}
        names = dict.fromkeys(name for each in sizes.values() for name in each)
        entries = []
        for name in names:
            by_phase = {phase: each[name] for phase, each in sizes.items() if each.get(name)}
            formula, reason = "", REASONS.get(name, "")
            if name in texts and name not in REASONS:
                formula, reason = texts[name].formula, texts[name].reason
            entries.append(MemoryEntry(name, by_phase, formula, reason))
        return MemoryBreakdown(tuple(entry for entry in entries if entry.max_bytes))

    @cached_property
    def _peaks(self) -> Mapping[StepPhase, tuple[int, SplitPoint]]:
        """Highest peak of each phase of the schedule, and the point of its pass."""
        peaks: dict[StepPhase, tuple[int, SplitPoint]] = {}
        for point in self._schedule.points:
            before = self._persistent_bytes + sum(self._state_sizes(point).values())
            for phase, size in self._running_peaks(point).items():
                if before + size > peaks.get(phase, (0, point))[0]:
                    peaks[phase] = (before + size, point)
        return peaks

    def _running_peaks(self, point: SplitPoint) -> Mapping[StepPhase, int]:
        """Peak of the running pass by phase, above the bytes before it."""
        has_gradients = self._accumulates or point.finished[point.stage] > 0
        if self._converts_gradients(point.stage):
            has_gradients = point.follows_weights[point.stage]
        peaks = self._stages[point.stage].peaks[point.kind, not has_gradients]
        if point.kind is not PassKind.input_backward:
            return peaks
        # All blocks of the stage are gathered before the first one runs.
        gathering, summing = self._gathering_peak(point), self._summed_gradients(point)
        return {phase: max(size + summing, gathering) for phase, size in peaks.items()}

    def _gathering_peak(self, point: SplitPoint) -> int:
        """Size of the all-gather buffer of the last block, if the input backward gathers blocks."""
        fsdp = self._states.fsdp
        if fsdp is None or fsdp.num_shards == 1 or fsdp.keeps_unsharded:
            return 0
        return 0 if point.follows_backward[point.stage] else self._step.gather_buffer_bytes

    def _summed_gradients(self, point: SplitPoint) -> int:
        """Bytes by which the first sum of gradients is larger than these gradients."""
        stage = point.stage
        is_first_sum = point.follows_weights[stage] and not point.continues_backward[stage]
        if not (is_first_sum and self._converts_gradients(stage)):
            return 0
        assert self._states.fsdp is not None
        element_bytes = self._step.configs.gradient_element_bytes
        gradients = self._stages[stage].gradient_bytes
        return gradients * self._states.fsdp.reduced_element_bytes // element_bytes - gradients

    @property
    def _accumulates(self) -> bool:
        """Whether gradients of an earlier schedule are added to."""
        return self._step.gradients_persist and self._states.fsdp is None

    def _schedule_sizes(self, point: SplitPoint, phase: StepPhase) -> Mapping[str, int]:
        """Bytes by entry in a phase of a pass."""
        persistent = {it.name: it.bytes.get(StepPhase.forward, 0) for it in self._persistent}
        return (
            persistent | self._state_sizes(point) | {"at work": self._running_peaks(point)[phase]}
        )

    def _state_sizes(self, point: SplitPoint) -> dict[str, int]:
        """Bytes right before a pass, by entry, without those that do not depend on it."""
        stages, kind = self._stages, point.kind
        waiting = sum(
            count * it.waiting_bytes for count, it in zip(point.waiting, stages, strict=True)
        )
        deferred = sum(
            count * it.deferred_bytes for count, it in zip(point.deferred, stages, strict=True)
        )
        running = 0
        if kind is PassKind.input_backward:
            running = stages[point.stage].waiting_bytes
            waiting -= running
        elif kind is PassKind.weight_backward:
            running = stages[point.stage].deferred_bytes
            deferred -= running
        kept = sum(
            count * it.input_gradient_bytes
            for count, it in zip(point.finished_inputs, stages, strict=True)
        )
        if self._on_cpu:  # NCCL frees what it has sent
            kept += sum(
                count * it.sent_output_bytes
                for count, it in zip(point.finished, stages, strict=True)
            )
        return {
            "activations of blocks": running,
            "activations of other pieces": waiting,
            "kept for weight gradients": deferred,
            "buffers between stages": self._buffer_bytes + kept,
            **self._gradient_sizes(point),
            **self._gathered_sizes(point),
        }

    def _gradient_sizes(self, point: SplitPoint) -> dict[str, int]:
        """Gradients of all stages, with FSDP whole until the last micro-batch of a stage."""
        states, step, stages = self._states, self._step, range(len(self._stages))
        shards = states.numel(states.gradient_shards, trained=True) * step.gradient_element_bytes
        if self._accumulates:
            return {"gradients": shards}
        whole = {index: self._stage_gradients(point, index) for index in stages}
        if states.fsdp is None:
            return {"gradients": sum(whole.values())}
        reduced = [index for index in stages if self._is_reduced(point, index)]
        if not step.gradients_persist:
            shards = sum(whole.pop(index) // states.fsdp.num_shards for index in reduced)
        return {
            "gradients": shards,
            "whole gradients": sum(size for index, size in whole.items() if index not in reduced),
        }

    def _stage_gradients(self, point: SplitPoint, index: int) -> int:
        """Gradients of a stage before their reduction, in bytes."""
        if not point.finished[index]:
            return 0
        gradients = self._stages[index].gradient_bytes
        if self._states.fsdp is None:
            return gradients
        element_bytes = self._step.configs.gradient_element_bytes
        summed = gradients * self._states.fsdp.reduced_element_bytes // element_bytes
        if not self._converts_gradients(index) or self._is_reduced(point, index):
            return summed
        return summed * point.continues_backward[index] + gradients * point.follows_weights[index]

    def _converts_gradients(self, index: int) -> bool:
        """Whether FSDP adds gradients of a stage to a sum of another format.

        It does so in the next input backward: a weight backward is none of the module.
        """
        fsdp = self._states.fsdp
        if fsdp is None or self._states.stages[index].is_first:
            return False
        return fsdp.reduced_element_bytes != self._step.configs.gradient_element_bytes

    def _is_reduced(self, point: SplitPoint, index: int) -> bool:
        """Whether the gradients of a stage are reduced, which also reshards its parameters."""
        return point.finished[index] == self._schedule.micro_batches

    def _gathered_sizes(self, point: SplitPoint) -> dict[str, int]:
        """Parameters that FSDP has gathered; the schedule keeps those of a stage after backward."""
        fsdp, running = self._states.fsdp, point.stage
        if fsdp is None:
            return {}
        groups = [fsdp.groups.root, fsdp.groups.head]
        blocks = self._gathered_by_stage
        if fsdp.keeps_unsharded:
            groups.append(fsdp.groups.embedding)
            gathered = sum(blocks)
        else:
            gathered = sum(
                size
                for index, size in enumerate(blocks)
                if index != running
                and point.follows_backward[index]
                and not self._is_reduced(point, index)
            )
            if point.kind is not PassKind.forward:
                gathered += blocks[running]
            else:
                gathered += self._step.gathered_block_bytes
                if not point.follows_backward[running]:
                    gathered += self._step.gather_buffer_bytes * self._step.gathers_in_forward
        return {
            "gathered weights of blocks": gathered,
            "gathered weights outside of blocks": sum(map(fsdp.gathered_bytes, groups)),
        }

    @cached_property
    def _end_sizes(self) -> Mapping[StepPhase, Mapping[str, int]]:
        """Bytes by entry in the phases after the last pass."""
        kept = self._schedule.micro_batches * sum(it.input_gradient_bytes for it in self._stages)
        phases = [StepPhase.reduce_rest] if self._states.fsdp is not None else []
        sizes = {}
        for phase in (*phases, StepPhase.optimizer):
            by_name = {it.name: it.bytes.get(phase, 0) for it in self._after_schedule}
            name = "buffers between stages"
            sizes[phase] = by_name | {name: by_name.get(name, 0) + kept}
        if phases:  # the gradients of other stages are reduced before
            point = self._schedule.points[-1]
            sizes[StepPhase.reduce_rest] |= self._gradient_sizes(point)
            sizes[StepPhase.reduce_rest] |= self._gathered_sizes(point)
        return sizes
