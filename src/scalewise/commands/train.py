"""``scalewise train``: one job or a sweep of them, each ending in a report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalewise.commands import publish, show
from scalewise.commands.fit import resolve_auto, resolve_auto_all
from scalewise.config.app import Command, JobEnd, SweepJob, run_command
from scalewise.config.compose import changed_from_defaults
from scalewise.errors import ConfigError
from scalewise.failures import report_errors
from scalewise.launch import executors, external_launcher, signals, sweep_resume
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import JobSpec, Result, execute
from scalewise.launch.locks import FolderLock
from scalewise.launch.sweep_resume import EarlierJob, ResumeRequest
from scalewise.launch.sweep_runner import claim_sweep_folder, execute_all
from scalewise.run_config import RunConfig
from scalewise.tracking import wandb_session
from scalewise.typed_override import command_line


class TrainCommand(Command):
    """Runs jobs and writes their reports."""

    remote_launchers = executors.REMOTE_LAUNCHERS
    produces_measurements = True

    def __init__(
        self, arguments: Sequence[str], resume_request: ResumeRequest | None = None
    ) -> None:
        self._command = command_line("train", tuple(arguments))
        self._resume_request = resume_request
        self._earlier_jobs: list[EarlierJob] = []
        self._lock: FolderLock | None = None

    def run_single(self, run: RunConfig, folder: Path) -> int:
        """Runs a single job."""
        if self._resume_request is not None:
            self._resume_request.reject_single_run()
        with signals.raise_on_signals("outside of training"):
            fit, sizing = resolve_auto(run)
            if external_launcher.is_leader():
                show.print_auto_choices(run, fit, sizing)
            order = JobSpec(
                fit,
                self._command,
                changed=tuple(changed_from_defaults(fit)),
                micro_batch_choice=sizing,
            )
            if external_launcher.is_leader():
                show.print_heading(order)
            result = execute(order, folder)
            if external_launcher.is_leader():
                show.finish_job(result)
                publish.after_training(result.folder, [result.folder])
            return result.exit_code

    def choose_sweep_folder(self, folder: Path) -> Path:
        """Returns the sweep's folder: a new one, or that of the sweep to go on with.

        Refuses a sweep among ranks that somebody else started.

        A process that has been a rank cannot be one of the next job: of a job that failed it keeps
        the process group, the memory limit and the collectives under way, and the next may want
        another number of ranks.
        """
        if external_launcher.is_external_rank():
            external_launcher.exit_if_not_rank_0()
            raise ConfigError.for_key(
                "",
                "",
                "a sweep starts the ranks of each job itself; here torchrun or srun started them",
                f"without them run: {self._command}",
            )
        if self._resume_request is None or self._lock is not None:
            return folder
        found = sweep_resume.resumed_folder(self._resume_request.sweep, folder)
        self._lock = sweep_resume.lock_sweep("resume_sweep", self._resume_request.sweep, found)
        self._earlier_jobs = sweep_resume.earlier_jobs(found, self._resume_request.retry)
        return found

    def claim_sweep_folder(self, folder: Path, *, user_named: bool) -> Path:
        """Makes and locks the folder of a new sweep; a search goes on in a folder that is given."""
        if self._lock is None:
            if self.is_search and user_named and folder.is_dir():
                self._lock = sweep_resume.lock_sweep("hydra.sweep.dir", str(folder), folder)
            else:
                self._lock = claim_sweep_folder(folder)
        return self._lock.folder

    def release_sweep_folder(self) -> None:
        """Lets other processes drive the sweep."""
        if self._lock is not None:
            self._lock.release()

    def run_sweep(
        self,
        jobs: Sequence[SweepJob],
        folder: Path,
        question: str,
        launcher_options: Mapping[str, object],
    ) -> list[JobEnd]:
        """Runs the jobs of a sweep, then writes the sweep's report."""
        wandb_session.clear_run_id(os.environ)  # jobs inherit it, on this machine and from Slurm
        away = launcher_options["engine"] in self.remote_launchers
        untried = "not tried, as its jobs run on other machines" * away
        fits = resolve_auto_all([job.run for job in jobs], no_probe_reason=untried)
        for job, (run, sizing) in zip(jobs, fits, strict=True):
            show.print_auto_choices(job.run, run, sizing)
        tasks = [
            SweepTask(
                job.number,
                JobSpec(
                    run,
                    command=command_line("train", run.overrides),
                    varied=job.varied,
                    changed=tuple(changed_from_defaults(run)),
                    sweep=f"{folder.parent.name}/{folder.name}",
                    micro_batch_choice=sizing,
                ),
                job.folder,
            )
            for job, (run, sizing) in zip(jobs, fits, strict=True)
        ]
        kept: dict[int, Result] = {}
        if self._resume_request is not None and not self.is_search:
            tasks, kept = sweep_resume.renumber_tasks(tasks, self._earlier_jobs, folder)
            show.print_resume_summary(len(tasks), len(kept), folder)
        results = execute_all(
            tasks,
            folder,
            executors.build_executor(launcher_options),
            command=self._command,
            question=question,
            on_start=show.print_job_start,
            on_end=_report_outcome,
            kept_results=kept,
        )
        with report_errors("no table of the jobs"):
            show.print_job_table(tasks, results)
        show.finish_sweep(results, folder)
        publish.after_training(folder, [result.folder for result in results])
        return [JobEnd(result.exit_code, result.objective) for result in results]


def _report_outcome(task: SweepTask, result: Result) -> None:
    """Says how a job ended; W&B hears at once of one that ended badly."""
    show.print_job_outcome(task, result)
    if result.exit_code:
        publish.after_training(result.folder, [result.folder])


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of ``scalewise train ARGUMENTS``."""
    with signals.raise_on_signals("before there was a run"):
        resumption, rest = sweep_resume.parse_resume_request(arguments)
        return run_command(TrainCommand(rest, resumption), rest)
