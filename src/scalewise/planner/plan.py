"""Everything that can be said of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from scalewise.planner import auto_checkpointing, auto_micro_batch
from scalewise.planner.fit_check import FitReport, check_fit
from scalewise.planner.step_time import StepTime, predict_step_time
from scalewise.planner.suggested_fix import FitCheck, SuggestedFix, suggest_fix

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

HOUR = 3600.0


@dataclass(frozen=True)
class Plan:
    """What a run will need and take on its hardware."""

    run: RunConfig
    fit: FitReport
    step_time: StepTime | None
    overrides: tuple[str, ...] = ()
    """What is typed to get it, where it is not the run that was asked about."""
    trace_fit_check: FitCheck | None = None
    """What judges changes of a run that is known by trace alone; None: nobody does."""

    @cached_property
    def suggested_fix(self) -> SuggestedFix | None:
        """Returns the smallest change that makes it fit; None where it fits, or nothing helps."""
        if self.fit.status.is_acceptable:
            return None
        if self.run.objective.trace_only:
            return (
                None
                if self.trace_fit_check is None
                else suggest_fix(self.run, self.trace_fit_check)
            )
        return suggest_fix(self.run)

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """Returns the shortest and the longest step, seconds."""
        if self.step_time is None:
            return None
        hardware, seconds = self.run.hardware, self.step_time.seconds
        return seconds * hardware.step_shortest, seconds * hardware.step_longest

    @property
    def tokens_per_s(self) -> float | None:
        """Returns tokens/s of all devices."""
        return None if self.step_time is None else self.run.tokens_per_step / self.step_time.seconds

    @property
    def mfu(self) -> float | None:
        """Returns the model's flops over the devices' peak."""
        run = self.run
        peak = run.hardware.peak_flops(run.precision.peak_kind)
        if self.step_time is None or not peak:
            return None
        return run.flops_per_step / run.world_size / self.step_time.seconds / peak

    def seconds_for(self, tokens: float) -> float | None:
        """Returns the time to train on so many tokens."""
        return None if self.tokens_per_s is None else tokens / self.tokens_per_s

    def dollars_for(self, tokens: float) -> float | None:
        """Returns the price of training on so many tokens, US dollars."""
        each = dollars_per_billion_tokens(self.run, self.tokens_per_s)
        return None if each is None else each * tokens / 1e9

    def kwh_for(self, tokens: float) -> float | None:
        """Returns the energy of training on so many tokens, kWh."""
        seconds, watts = self.seconds_for(tokens), self.run.hardware.watts
        return None if seconds is None or not watts else self._device_hours(seconds) * watts / 1e3

    def _device_hours(self, seconds: float) -> float:
        return seconds / HOUR * self.run.world_size


def build_plan(run: RunConfig) -> Plan:
    """Returns the plan of a run, from its specs alone; what it leaves open is chosen."""
    run, rows = auto_micro_batch.resolve_auto_micro_batch(run)
    run, kept = auto_checkpointing.resolve_auto_checkpointing(run)
    return Plan(run, check_fit(run), predict_step_time(run), (*rows, *kept))


def plan_record(run: RunConfig) -> dict[str, object]:
    """Returns what is foreseen of a run, as its folder keeps it: ``foreseen`` and what it is of.

    Memory is bytes of the fullest device, by line at its peak and by phase; ``collectives`` are
    those that the layout declares for rank 0 and one step. Of what is known by trace nothing is.
    """
    if run.objective.trace_only:
        return {}
    fit, step = check_fit(run), predict_step_time(run)
    breakdown = fit.breakdown
    at_peak = {line.name: line.bytes.get(breakdown.peak_phase, 0) for line in breakdown.entries}
    return {
        **predicted_metrics(run),
        "fullest": breakdown.peak_phase.value,
        "ledger": {what: size for what, size in at_peak.items() if size},
        "phases": {phase.value: size for phase, size in breakdown.phases.items() if size},
        "step_parts": {} if step is None else step.parts(),
        "collectives": [
            {
                "kind": sent.kind.value,
                "axes": list(sent.axes),
                "what": sent.name,
                "bytes": sent.bytes,
                "count": sent.count,
            }
            for sent in run.parallelism.collectives(run)
        ],
        "limit_bytes": fit.capacity,
    }


def dollars_per_billion_tokens(run: RunConfig, tokens_per_s: float | None) -> float | None:
    """Returns what a billion tokens cost at this speed, US dollars; None where no price is known.

    ``tokens_per_s`` is of all ranks.
    """
    hourly = run.hardware.dollars_per_hour
    if not tokens_per_s or not hourly:
        return None
    return hourly * run.world_size * 1e9 / tokens_per_s / HOUR


def predicted_metrics(run: RunConfig) -> dict[str, float | None]:
    """Returns what ``memory/peak_bytes`` and ``time/step_s`` will be, under ``plan/``.

    A time that cannot be told is None; what is known only by trace is not foreseen.
    """
    if run.objective.trace_only:
        return {}
    step = predict_step_time(run)
    return {
        "plan/peak_bytes": check_fit(run).breakdown.peak,
        "plan/step_s": None if step is None else step.seconds,
    }
