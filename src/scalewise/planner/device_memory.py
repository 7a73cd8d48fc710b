"""Memory of one device at a point of a step: groups of entries, each computed once per search.

Runs of a search differ in few options. Each group depends on some of them only, and is cached by
exactly these: its functions receive no run.
"""

from __future__ import annotations

from functools import lru_cache

from scalewise.planner.activation_liveness import memory_of_saved_tensors
from scalewise.planner.activation_memory import activation_entries
from scalewise.planner.deepspeed_memory import ZeroPersistentStates, ZeroStateMemory
from scalewise.planner.memory_breakdown import (
    ALL_PHASES,
    FORWARD,
    EntryGroup,
    MemoryBreakdown,
    group_entries,
)
from scalewise.planner.model_state_memory import ModelStateMemory, PersistentStates
from scalewise.planner.pipeline_memory import pipeline_entries
from scalewise.planner.rank_memory import RankMemory
from scalewise.planner.rank_states import RankStates
from scalewise.planner.rank_step import PeakPoint, StateConfigs, rank_step
from scalewise.planner.step_liveness import StepGradients, step_liveness
from scalewise.run_config import RunConfig

NUM_FORWARD_PHASES = len(FORWARD)
assert ALL_PHASES[:NUM_FORWARD_PHASES] == FORWARD


class DeviceMemory:
    """Memory of one rank at one point of a step.

    Args:
        run: Run that trains.
        rank_memory: Partition of the rank.
        configs: Configs of the run that decide the memory of model states.
        peak_point: Point of the step.
    """

    def __init__(
        self, run: RunConfig, rank_memory: RankMemory, configs: StateConfigs, peak_point: PeakPoint
    ) -> None:
        self._peak_point = peak_point
        states, passes, forward_spec = (
            rank_memory.states,
            rank_memory.passes,
            rank_memory.forward_spec,
        )
        state_point = peak_point.without_counts
        step, saved_on = rank_step(configs, states, state_point), memory_of_saved_tensors(run)
        gradient_mode = step.fresh_gradients, step.step_scratch_ratio
        liveness = step_liveness(
            run.model, run.memory, passes.stages, forward_spec, saved_on, *gradient_mode
        )
        self._groups = [
            persistent_entries(configs, states),
            _gradient_entries(configs, states, state_point, liveness.gradients),
            activation_entries(
                run.model,
                run.memory,
                passes.stages,
                forward_spec,
                liveness,
                saved_on,
                run.memory.offload and peak_point.waiting_passes > 0,
                step.last_gather_bytes,
                step.gather_buffer_bytes * step.gathers_in_schedule,
            ),
        ]
        if passes.num_pipeline_micro_batches > 1:
            self._groups.append(
                pipeline_entries(
                    run.model,
                    run.memory,
                    passes,
                    forward_spec,
                    liveness,
                    saved_on,
                    *gradient_mode,
                    peak_point,
                )
            )

        sums = [*map(sum, zip(*(group.sums for group in self._groups), strict=True))]
        if not peak_point.follows_forward:
            sums[:NUM_FORWARD_PHASES] = [0] * NUM_FORWARD_PHASES
        self._sums, self.peak = sums, max(sums)

    @property
    def breakdown(self) -> MemoryBreakdown:
        """Memory breakdown at this point of a step."""
        entries = tuple(entry for group in self._groups for entry in group.entries)
        if not self._peak_point.follows_forward:
            entries = tuple(it for it in (e.without(FORWARD) for e in entries) if it.max_bytes)
        return MemoryBreakdown.with_sums(entries, self._sums)


@lru_cache(maxsize=4096)
def persistent_entries(configs: StateConfigs, states: RankStates) -> EntryGroup:
    """Return the entries of parameters and optimizer state."""
    kind = PersistentStates if states.zero is None else ZeroPersistentStates
    return group_entries(kind(configs, states).iter_entries())


@lru_cache(maxsize=4096)
def _gradient_entries(
    configs: StateConfigs, states: RankStates, peak_point: PeakPoint, gradients: StepGradients
) -> EntryGroup:
    """Return the entries of gradients and of gathered parameters."""
    kind = ModelStateMemory if states.zero is None else ZeroStateMemory
    return group_entries(kind(configs, states, peak_point, gradients).iter_gradient_entries())
