"""``trainer.micro_batch=auto``: the most rows at a time for which there is memory.

The rows of a step stay: those that a pass does not take, further passes do. Every size is looked
at that goes into a rank's rows without a rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scalewise.errors import ConfigError
from scalewise.planner.fit_check import FitStatus, check_fit
from scalewise.planner.suggested_fix import suggest_fix
from scalewise.trainer_config import AUTO, SIZE
from scalewise.units import format_bytes

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

OUT = "out_of_memory"


@dataclass(frozen=True)
class MicroBatchOption:
    """A run with a micro batch of its own, and what the ledger says of it."""

    run: RunConfig
    verdict: FitStatus

    @property
    def rows(self) -> int:
        """Returns the micro batch."""
        return self.run.micro_batch


@dataclass(frozen=True)
class ProbeResult:
    """A few steps that really ran, and how they ended: the status of a job."""

    rows: int
    status: str


@dataclass(frozen=True)
class MicroBatchChoice:
    """A micro batch, and how it was found."""

    rows: int
    verdict: FitStatus
    trials: tuple[ProbeResult, ...] = ()
    untried: str = ""
    """Why nothing was tried."""

    @property
    def told(self) -> tuple[str, ...]:
        """Returns what is typed to get it."""
        return (f"{SIZE}={self.rows}",)

    @property
    def how(self) -> str:
        """Returns how it was found, in words."""
        tried = ", ".join(f"{trial.rows} {trial.status}" for trial in self.trials)
        return f"ledger: {self.verdict}; " + (f"tried: {tried}" if tried else self.untried)


def micro_batch_options(run: RunConfig) -> tuple[MicroBatchOption, ...]:
    """Returns the run with every micro batch that keeps the rows of a step, the smallest first."""
    rows = run.micro_batch  # all of a step, as none is chosen
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    tried = (replace(run, trainer=replace(run.trainer, micro_batch=size)) for size in sizes)
    return tuple(
        MicroBatchOption(it, check_fit(it).verdict) for it in tried if not any(it.complaints())
    )


def choose_by_plan(found: Sequence[MicroBatchOption]) -> int:
    """Returns the place of the largest that fits, and of the smallest where none does."""
    return max((place for place, way in enumerate(found) if way.verdict.good), default=0)


def resolve_auto_micro_batch(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run with what the ledger puts for ``auto``, and what is typed to get it."""
    if run.trainer.micro_batch != AUTO:
        return run, ()
    found = micro_batch_options(run)
    way = found[choose_by_plan(found)]
    return way.run, MicroBatchChoice(way.rows, way.verdict).told


def choose_by_probes(
    run: RunConfig, ends: Callable[[RunConfig], str] | None, untried: str = ""
) -> MicroBatchChoice:
    """Returns the largest micro batch that runs, looked for from the one that the ledger says.

    ``ends`` tries a run and returns its status; None: the ledger alone, and ``untried`` says why.
    Raises ``ConfigError`` where there is no memory for the smallest.
    """
    found = micro_batch_options(run)
    place = choose_by_plan(found)
    if found[place].verdict.bad:
        raise _is_too_large(found[0].run, f"{found[0].verdict} by the ledger")
    if ends is None:
        return MicroBatchChoice(found[place].rows, found[place].verdict, untried=untried)
    trials: list[ProbeResult] = []

    def fits(way: MicroBatchOption) -> bool:
        trials.append(ProbeResult(way.rows, ends(way.run)))
        return trials[-1].status == "ok"

    if fits(found[place]):
        larger = found[place + 1 :]
        while larger and not larger[0].verdict.bad and fits(larger[0]):
            place, larger = place + 1, larger[1:]
    while trials[-1].status == OUT and trials[-1].rows == found[place].rows:
        if place == 0:
            raise _is_too_large(found[0].run, "it ran out of memory when it was tried")
        place -= 1
        fits(found[place])
    return MicroBatchChoice(found[place].rows, found[place].verdict, tuple(trials))


def _is_too_large(run: RunConfig, why: str) -> ConfigError:
    fit, change = check_fit(run), suggest_fix(run)
    needed, there = format_bytes(fit.reserved[0]), format_bytes(fit.capacity or 0)
    reason = f"a micro batch of {run.micro_batch} needs {needed} of {there}: {why}"
    return ConfigError.one(
        SIZE, AUTO, reason, f"set {change.line}" if change else "see `scalewise plan`"
    )
