"""Everything that can be said of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from scalewise.plan import budget, sizing
from scalewise.plan.cure import Cure, Judge, cure
from scalewise.plan.steptime import StepTime, of_step
from scalewise.plan.verdict import Fit, judged

if TYPE_CHECKING:
    from scalewise.run import Run

HOUR = 3600.0


@dataclass(frozen=True)
class Plan:
    """What a run will need and take on its hardware."""

    run: Run
    fit: Fit
    step: StepTime | None
    told: tuple[str, ...] = ()
    """What is typed to get it, where it is not the run that was asked about."""
    tracer: Judge | None = None
    """What judges changes of a run that is known by trace alone; None: nobody does."""

    @cached_property
    def cure(self) -> Cure | None:
        """Returns the smallest change that makes it fit; None where it fits, or nothing helps."""
        if self.fit.verdict.good:
            return None
        if self.run.objective.by_trace:
            return None if self.tracer is None else cure(self.run, self.tracer)
        return cure(self.run)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Returns the shortest and the longest step, seconds."""
        if self.step is None:
            return None
        hardware, seconds = self.run.hardware, self.step.seconds
        return seconds * hardware.step_shortest, seconds * hardware.step_longest

    @property
    def tokens_per_s(self) -> float | None:
        """Returns tokens/s of all devices."""
        return None if self.step is None else self.run.tokens_per_step / self.step.seconds

    @property
    def mfu(self) -> float | None:
        """Returns the model's flops over the devices' peak."""
        run = self.run
        peak = run.hardware.peak_flops(run.precision.peak_kind)
        if self.step is None or not peak:
            return None
        return run.flops_per_step / run.world_size / self.step.seconds / peak

    def seconds_for(self, tokens: float) -> float | None:
        """Returns the time to train on so many tokens."""
        return None if self.tokens_per_s is None else tokens / self.tokens_per_s

    def dollars_for(self, tokens: float) -> float | None:
        """Returns the price of training on so many tokens, US dollars."""
        each = price(self.run, self.tokens_per_s)
        return None if each is None else each * tokens / 1e9

    def kwh_for(self, tokens: float) -> float | None:
        """Returns the energy of training on so many tokens, kWh."""
        seconds, watts = self.seconds_for(tokens), self.run.hardware.watts
        return None if seconds is None or not watts else self._device_hours(seconds) * watts / 1e3

    def _device_hours(self, seconds: float) -> float:
        return seconds / HOUR * self.run.world_size


def planned(run: Run) -> Plan:
    """Returns the plan of a run, from its specs alone; what it leaves open is chosen."""
    run, rows = sizing.settled(run)
    run, kept = budget.settled(run)
    return Plan(run, judged(run), of_step(run), (*rows, *kept))


def record(run: Run) -> dict[str, object]:
    """Returns what is foreseen of a run, as its folder keeps it: ``foreseen`` and what it is of.

    Memory is bytes of the fullest device, by line at its peak and by phase; ``collectives`` are
    those that the layout declares for rank 0 and one step. Of what is known by trace nothing is.
    """
    if run.objective.by_trace:
        return {}
    fit, step = judged(run), of_step(run)
    ledger = fit.ledger
    at_peak = {line.what: line.bytes.get(ledger.fullest, 0) for line in ledger.lines}
    return {
        **foreseen(run),
        "fullest": ledger.fullest.value,
        "ledger": {what: size for what, size in at_peak.items() if size},
        "phases": {phase.value: size for phase, size in ledger.phases.items() if size},
        "step_parts": {} if step is None else step.parts(),
        "collectives": [
            {
                "kind": sent.kind.value,
                "axes": list(sent.axes),
                "what": sent.what,
                "bytes": sent.bytes,
                "count": sent.count,
            }
            for sent in run.parallelism.collectives(run)
        ],
        "limit_bytes": fit.capacity,
    }


def price(run: Run, tokens_per_s: float | None) -> float | None:
    """Returns what a billion tokens cost at this speed, US dollars; None where no price is known.

    ``tokens_per_s`` is of all ranks.
    """
    hourly = run.hardware.dollars_per_hour
    if not tokens_per_s or not hourly:
        return None
    return hourly * run.world_size * 1e9 / tokens_per_s / HOUR


def foreseen(run: Run) -> dict[str, float | None]:
    """Returns what ``memory/peak_bytes`` and ``time/step_s`` will be, under ``plan/``.

    A time that cannot be told is None; what is known only by trace is not foreseen.
    """
    if run.objective.by_trace:
        return {}
    step = of_step(run)
    return {
        "plan/peak_bytes": judged(run).ledger.peak,
        "plan/step_s": None if step is None else step.seconds,
    }
