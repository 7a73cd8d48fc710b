"""``scalewise train``: one job or a sweep of them, each ending in a report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalewise.config.compose import changed
from scalewise.config.door import End, Job, Verb, open_door
from scalewise.errors import ConfigError
from scalewise.failures import survived
from scalewise.launch import engines, resumed_sweep, signals, started
from scalewise.launch.engine import Task
from scalewise.launch.job import Order, Result, execute
from scalewise.launch.locks import FolderLock
from scalewise.launch.resumed_sweep import Earlier, Resumption
from scalewise.launch.sweep import claimed, execute_all
from scalewise.run import Run
from scalewise.tracking import session
from scalewise.typed_override import command_line
from scalewise.verbs import publish, show
from scalewise.verbs.fit import all_fitted, fitted


class Train(Verb):
    """Runs jobs and writes their reports."""

    elsewhere = engines.ELSEWHERE
    measures = True

    def __init__(self, arguments: Sequence[str], resumption: Resumption | None = None) -> None:
        self._command = command_line("train", tuple(arguments))
        self._resumption = resumption
        self._earlier: list[Earlier] = []
        self._lock: FolderLock | None = None

    def one(self, run: Run, folder: Path) -> int:
        """Runs a single job."""
        if self._resumption is not None:
            self._resumption.refuse_run()
        with signals.raised("outside of training"):
            fit, sizing = fitted(run)
            if started.leads():
                show.refitted(run, fit, sizing)
            order = Order(fit, self._command, changed=tuple(changed(fit)), sizing=sizing)
            if started.leads():
                show.heading(order)
            result = execute(order, folder)
            if started.leads():
                show.ended(result)
                publish.after_training(result.folder, [result.folder])
            return result.exit_code

    def admit_many(self, folder: Path) -> Path:
        """Returns the sweep's folder: a new one, or that of the sweep to go on with.

        Refuses a sweep among ranks that somebody else started.

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
        if self._resumption is None or self._lock is not None:
            return folder
        found = resumed_sweep.folder_of(self._resumption.sweep, folder)
        self._lock = resumed_sweep.lock("resume_sweep", self._resumption.sweep, found)
        self._earlier = resumed_sweep.earlier(found, self._resumption.retry)
        return found

    def claim_many(self, folder: Path, *, given: bool) -> Path:
        """Makes and locks the folder of a new sweep; a search goes on in a folder that is given."""
        if self._lock is None:
            if self.searching and given and folder.is_dir():
                self._lock = resumed_sweep.lock("hydra.sweep.dir", str(folder), folder)
            else:
                self._lock = claimed(folder)
        return self._lock.folder

    def release_many(self) -> None:
        """Lets other processes drive the sweep."""
        if self._lock is not None:
            self._lock.release()

    def many(
        self, jobs: Sequence[Job], folder: Path, question: str, engine: Mapping[str, object]
    ) -> list[End]:
        """Runs the jobs of a sweep, then writes the sweep's report."""
        session.forget_run(os.environ)  # jobs inherit it, on this machine and from Slurm
        away = engine["engine"] in self.elsewhere
        untried = "not tried, as its jobs run on other machines" * away
        fits = all_fitted([job.run for job in jobs], untried=untried)
        for job, (run, sizing) in zip(jobs, fits, strict=True):
            show.refitted(job.run, run, sizing)
        tasks = [
            Task(
                job.number,
                Order(
                    run,
                    command=command_line("train", run.overrides),
                    varied=job.varied,
                    changed=tuple(changed(run)),
                    sweep=f"{folder.parent.name}/{folder.name}",
                    sizing=sizing,
                ),
                job.folder,
            )
            for job, (run, sizing) in zip(jobs, fits, strict=True)
        ]
        kept: dict[int, Result] = {}
        if self._resumption is not None and not self.searching:
            tasks, kept = resumed_sweep.placed(tasks, self._earlier, folder)
            show.resumed(len(tasks), len(kept), folder)
        results = execute_all(
            tasks,
            folder,
            engines.named(engine),
            command=self._command,
            question=question,
            announce=show.announce,
            report=_told,
            kept=kept,
        )
        with survived("no table of the jobs"):
            show.table(tasks, results)
        show.sweep_ended(results, folder)
        publish.after_training(folder, [result.folder for result in results])
        return [End(result.exit_code, result.objective) for result in results]


def _told(task: Task, result: Result) -> None:
    """Says how a job ended; W&B hears at once of one that ended badly."""
    show.outcome(task, result)
    if result.exit_code:
        publish.after_training(result.folder, [result.folder])


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of ``scalewise train ARGUMENTS``."""
    with signals.raised("before there was a run"):
        resumption, rest = resumed_sweep.asked(arguments)
        return open_door(Train(rest, resumption), rest)
