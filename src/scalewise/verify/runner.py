"""Runs of a comparison: each in processes of its own, with its state recorded on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scalewise.errors import Interrupted, ScalewiseError
from scalewise.launch import elastic
from scalewise.launch.job import JobSpec, prepare_job
from scalewise.launch.outcomes import Outcome
from scalewise.run_config import RunConfig
from scalewise.verify import reduced_run
from scalewise.verify.comparison import EPSILONS, Comparison, compare_runs
from scalewise.verify.diagnosis import diagnose
from scalewise.verify.recorded_run import RecordedRun

OUTPUT_FILE = "output-{rank}.log"
"""Output of a rank, which is not printed."""


class RunFailed(ScalewiseError):  # noqa: N818 (an outcome, not an error)
    """A run of the comparison that did not end well, with the exit code of its outcome."""

    def __init__(self, name: str, outcome: Outcome) -> None:
        self.exit_code = outcome.exit_code
        super().__init__(f"{name}: {outcome.status}: {outcome.reason}")


@dataclass(frozen=True)
class Verification:
    """Result of ``scalewise verify``."""

    small: RunConfig
    """Small run of the strategy."""
    comparisons: tuple[Comparison, ...]
    """Comparison in each precision, fp32 first; the last one if it has a difference."""
    cause: str
    """Likely cause of the first difference; empty without one."""

    @property
    def failed(self) -> Comparison | None:
        """First comparison with a difference; None: the strategy trains like one device."""
        return next((it for it in self.comparisons if it.differences), None)


def verify_run(small: RunConfig, folder: Path, on_start: Callable[[str], None]) -> Verification:
    """Run the comparison in fp32 and in the precision of the run.

    Args:
        small: Small run of the strategy, from ``reduced_run.reduce_run``.
        folder: Empty folder for the files of the runs.
        on_start: Function that receives the name of each run before it starts.

    Raises:
        ConfigError: data, callbacks or modules are not valid.
        RunFailed: a run did not end well.
        Interrupted: a signal ended a run.
    """
    prepare_job(JobSpec(small))
    runs = {"fp32": reduced_run.in_fp32(small)}
    if not reduced_run.is_fp32(small):
        runs[small.option("precision")] = small
    comparisons: list[Comparison] = []
    cause = ""
    for precision, run in runs.items():
        recorded = {
            name: run_recorded(each, folder / f"{precision}-{index}", name, on_start)
            for index, (name, each) in enumerate(_iter_runs(precision, run))
        }
        comparisons.append(compare_runs(precision, *recorded.values()))
        if comparisons[-1].differences:
            run_parts = partial(_run_contributions, run, precision, folder, on_start)
            cause = diagnose(comparisons[-1], run_parts)
            break
    return Verification(small, tuple(comparisons), cause)


def _run_contributions(
    run: RunConfig, precision: str, folder: Path, on_start: Callable[[str], None]
) -> RecordedRun:
    """Run the first step on one device, micro-batch by micro-batch."""
    each = reduced_run.with_recorder(
        reduced_run.contribution_run(run), 0.0, _batches_per_step(run), contributions=True
    )
    name = f"{precision}, one device by micro-batches"
    return run_recorded(each, folder / "contributions", name, on_start)


def _iter_runs(precision: str, run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield the runs of a comparison: one device, perturbed weights, the strategy."""
    reference = reduced_run.reference_run(run)
    batches = _batches_per_step(run)
    epsilon = EPSILONS[run.precision.compute]
    yield f"{precision}, one device", reduced_run.with_recorder(reference, 0.0, batches)
    perturbed = reduced_run.with_recorder(reference, epsilon, batches)
    yield f"{precision}, one device with perturbed weights", perturbed
    name = f"{precision}, {run.option('parallelism')} on {run.world_size} rank"
    yield f"{name}{'s' * (run.world_size > 1)}", reduced_run.with_recorder(run, 0.0, 1)


def _batches_per_step(run: RunConfig) -> int:
    """Batches of a user-defined module that the ranks read in a step; 1: one device reads all."""
    return run.parallelism.data_parallel_size if run.objective.is_user_defined else 1


def run_recorded(
    run: RunConfig, folder: Path, name: str, on_start: Callable[[str], None]
) -> RecordedRun:
    """Train a run that records its state in ``folder``.

    Raises:
        RunFailed: the run did not end well.
        Interrupted: a signal ended it.
    """
    on_start(name)
    (folder / "checkpoints").mkdir(parents=True)
    outcome = elastic.run_entry(run.world_size, _train_quietly, (run, folder), folder, run.launch)
    if outcome.status == "interrupted":
        raise Interrupted(outcome.signal_number, f"{outcome.reason.split()[0]} while verifying")
    if outcome.status != "ok":
        raise RunFailed(name, outcome)
    return RecordedRun(run, folder)


def _train_quietly(run: RunConfig, folder: Path) -> None:
    """Train as a rank whose output, that of libraries included, goes to a file."""
    with (folder / OUTPUT_FILE.format(rank=os.environ["RANK"])).open("wb") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    elastic.train_as_rank(run, folder, None, None)
