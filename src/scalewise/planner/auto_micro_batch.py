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
    status: FitStatus

    @property
    def micro_batch(self) -> int:
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
    def overrides(self) -> tuple[str, ...]:
        """Returns what is typed to get it."""
        return (f"{SIZE}={self.rows}",)

    @property
    def description(self) -> str:
        """Returns how it was found, in words."""
        tried = ", ".join(f"{trial.rows} {trial.status}" for trial in self.trials)
        return f"ledger: {self.verdict}; " + (f"tried: {tried}" if tried else self.untried)


def micro_batch_options(run: RunConfig) -> tuple[MicroBatchOption, ...]:
    """Returns the run with every micro batch that keeps the rows of a step, the smallest first."""
    rows = run.micro_batch  # all of a step, as none is chosen
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    tried = (replace(run, trainer=replace(run.trainer, micro_batch=size)) for size in sizes)
    return tuple(
        MicroBatchOption(it, check_fit(it).status) for it in tried if not any(it.validate())
    )


def choose_by_plan(options: Sequence[MicroBatchOption]) -> int:
    """Returns the place of the largest that fits, and of the smallest where none does."""
    return max((place for place, way in enumerate(options) if way.status.is_acceptable), default=0)


def resolve_auto_micro_batch(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run with what the ledger puts for ``auto``, and what is typed to get it."""
    if run.trainer.micro_batch != AUTO:
        return run, ()
    found = micro_batch_options(run)
    way = found[choose_by_plan(found)]
    return way.run, MicroBatchChoice(way.micro_batch, way.status).overrides


def choose_by_probes(
    run: RunConfig, run_probe: Callable[[RunConfig], str] | None, skip_reason: str = ""
) -> MicroBatchChoice:
    """Returns the largest micro batch that runs, looked for from the one that the ledger says.

    ``run_probe`` tries a run and returns its status; None: the ledger alone, and ``skip_reason``
    says why. Raises ``ConfigError`` where there is no memory for the smallest.
    """
    found = micro_batch_options(run)
    place = choose_by_plan(found)
    if found[place].status.is_out_of_memory:
        raise _is_too_large(found[0].run, f"{found[0].status} by the ledger")
    if run_probe is None:
        return MicroBatchChoice(found[place].micro_batch, found[place].status, untried=skip_reason)
    trials: list[ProbeResult] = []

    def fits(way: MicroBatchOption) -> bool:
        trials.append(ProbeResult(way.micro_batch, run_probe(way.run)))
        return trials[-1].status == "ok"

    if fits(found[place]):
        larger = found[place + 1 :]
        while larger and not larger[0].status.is_out_of_memory and fits(larger[0]):
            place, larger = place + 1, larger[1:]
    while trials[-1].status == OUT and trials[-1].rows == found[place].micro_batch:
        if place == 0:
            raise _is_too_large(found[0].run, "it ran out of memory when it was tried")
        place -= 1
        fits(found[place])
    return MicroBatchChoice(found[place].micro_batch, found[place].status, tuple(trials))


def _is_too_large(run: RunConfig, cause: str) -> ConfigError:
    fit, change = check_fit(run), suggest_fix(run)
    needed, there = format_bytes(fit.reserved[0]), format_bytes(fit.capacity or 0)
    reason = f"a micro batch of {run.micro_batch} needs {needed} of {there}: {cause}"
    return ConfigError.for_key(
        SIZE, AUTO, reason, f"set {change.override_text}" if change else "see `scalewise plan`"
    )
