"""``scalewise train``: one job or a sweep of them, each ending in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scalewise.config.compose import changed
from scalewise.config.door import End, Job, Verb, open_door
from scalewise.errors import ConfigError
from scalewise.launch import engines, signals, started
from scalewise.launch.engine import Task
from scalewise.launch.job import Order, execute
from scalewise.launch.status import command_line
from scalewise.launch.sweep import execute_all
from scalewise.run import Run
from scalewise.verbs import show
from scalewise.verbs.fit import all_fitted, fitted


class Train(Verb):
    """Runs jobs and writes their reports."""

    elsewhere = engines.ELSEWHERE

    def __init__(self, arguments: Sequence[str]) -> None:
        self._command = command_line("train", tuple(arguments))

    def one(self, run: Run, folder: Path) -> int:
        """Runs a single job."""
        with signals.raised("outside of training"):
            fit = fitted(run)
            if started.leads():
                show.refitted(run, fit)
            order = Order(fit, command=self._command, changed=tuple(changed(fit)))
            if started.leads():
                show.heading(order)
            result = execute(order, folder)
            if started.leads():
                show.ended(result)
            return result.exit_code

    def admit_many(self) -> None:
        """Refuses a sweep among ranks that somebody else started.

        A process that has been a rank cannot be one of the next job: of a job that failed it keeps
        the process group, the memory limit and the collectives under way, and the next may want
        another number of ranks.
        """
        if started.by_others():
            started.let_rank_0_speak()
            raise ConfigError.one(
                "",
                "",
                "a sweep starts the ranks of each job itself; here torchrun or srun started them",
                f"without them run: {self._command}",
            )

    def many(
        self, jobs: Sequence[Job], folder: Path, question: str, engine: Mapping[str, object]
    ) -> list[End]:
        """Runs the jobs of a sweep, then writes the sweep's report."""
        runs = all_fitted([job.run for job in jobs])
        for job, run in zip(jobs, runs, strict=True):
            show.refitted(job.run, run)
        tasks = [
            Task(
                job.number,
                Order(
                    run,
                    command=command_line("train", run.overrides),
                    varied=job.varied,
                    changed=tuple(changed(run)),
                    sweep=f"{folder.parent.name}/{folder.name}",
                ),
                job.folder,
            )
            for job, run in zip(jobs, runs, strict=True)
        ]
        results = execute_all(
            tasks,
            folder,
            engines.named(engine),
            command=self._command,
            question=question,
            announce=show.announce,
            report=show.outcome,
        )
        show.table(tasks, results)
        show.sweep_ended(results, folder)
        return [End(result.exit_code, result.objective) for result in results]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of ``scalewise train ARGUMENTS``."""
    with signals.raised("before there was a run"):
        return open_door(Train(arguments), arguments)
