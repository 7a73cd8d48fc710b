"""``scalewise train``: train one run or the jobs of a sweep, and write their reports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalewise.commands import publish, show
from scalewise.commands.auto_resolution import resolve_auto, resolve_auto_all
from scalewise.config.app import run_command
from scalewise.config.command import Command, JobOutcome, SweepJob
from scalewise.config.compose import changed_from_defaults
from scalewise.config.launchers import REMOTE_LAUNCHERS
from scalewise.errors import ConfigError
from scalewise.failures import report_errors
from scalewise.launch import external_launcher, signals, sweep_resume
from scalewise.launch.executor import SweepTask, build_executor
from scalewise.launch.job import JobSpec, Result, execute
from scalewise.launch.locks import FolderLock
from scalewise.launch.sweep_resume import EarlierJob, ResumeRequest
from scalewise.launch.sweep_runner import claim_sweep_folder, execute_all
from scalewise.planner.fit_check import check_fit
from scalewise.run_config import RunConfig
from scalewise.sweep_question import SweepQuestion
from scalewise.tracking import wandb_session
from scalewise.typed_override import command_line


class TrainCommand(Command):
    """Command that trains runs and writes their reports."""

    remote_launchers = REMOTE_LAUNCHERS
    produces_measurements = True

    def __init__(
        self, arguments: Sequence[str], resume_request: ResumeRequest | None = None
    ) -> None:
        self._command = command_line("train", tuple(arguments))
        self._resume_request = resume_request
        self._earlier_jobs: list[EarlierJob] = []
        self._lock: FolderLock | None = None

    def run_single(self, run: RunConfig, folder: Path) -> int:
        """Train a single run."""
        if self._resume_request is not None:
            self._resume_request.reject_single_run()
        with signals.raise_on_signals("outside of training"):
            resolved, micro_batch_choice = resolve_auto(run)
            if external_launcher.is_leader():
                show.print_auto_choices(run, resolved, micro_batch_choice)
            job_spec = JobSpec(
                resolved,
                self._command,
                changed=tuple(changed_from_defaults(resolved)),
                micro_batch_choice=micro_batch_choice,
            )
            if external_launcher.is_leader():
                show.print_heading(job_spec)
            result = execute(job_spec, folder)
            if external_launcher.is_leader():
                show.finish_job(result)
                publish.after_training(result.folder, [result.folder])
            return result.exit_code

    def choose_sweep_folder(self, folder: Path) -> Path:
        """Choose the folder of a new sweep, or of the sweep to resume.

        Raises ``ConfigError`` for ranks of an external launcher such as torchrun. Such a process
        cannot run several jobs: a failed job leaves its process group, memory limit and pending
        collectives behind, and the next job may need another number of ranks.
        """
        if external_launcher.is_external_rank():
            external_launcher.exit_if_not_rank_0()
            raise ConfigError.for_key(
                "",
                "",
                "a sweep is not supported with torchrun or srun: it starts the ranks of each job",
                f"run without torchrun and srun: {self._command}",
            )
        if self._resume_request is None or self._lock is not None:
            return folder
        resumed_folder = sweep_resume.resumed_folder(self._resume_request.sweep, folder)
        self._lock = sweep_resume.lock_sweep(
            "resume_sweep", self._resume_request.sweep, resumed_folder
        )
        self._earlier_jobs = sweep_resume.earlier_jobs(resumed_folder, self._resume_request.retry)
        return resumed_folder

    def claim_sweep_folder(self, folder: Path, *, user_named: bool) -> Path:
        """Create and lock the folder of a new sweep; a search resumes in a folder of the user."""
        if self._lock is None:
            if self.is_search and user_named and folder.is_dir():
                self._lock = sweep_resume.lock_sweep("hydra.sweep.dir", str(folder), folder)
            else:
                self._lock = claim_sweep_folder(folder)
        return self._lock.folder

    def release_sweep_folder(self) -> None:
        """Release the lock of the sweep folder."""
        if self._lock is not None:
            self._lock.release()

    def run_sweep(
        self,
        jobs: Sequence[SweepJob],
        folder: Path,
        question: SweepQuestion,
        launcher_options: Mapping[str, object],
    ) -> list[JobOutcome]:
        """Run the jobs of a sweep, then write its report."""
        wandb_session.clear_run_id(os.environ)  # jobs would inherit it
        is_remote = launcher_options["engine"] in self.remote_launchers
        no_probe_reason = "not probed: jobs run on other machines" * is_remote
        resolved_jobs = resolve_auto_all([job.run for job in jobs], no_probe_reason=no_probe_reason)
        for job, (run, micro_batch_choice) in zip(jobs, resolved_jobs, strict=True):
            show.print_auto_choices(job.run, run, micro_batch_choice)
        tasks = [
            SweepTask(
                job.number,
                JobSpec(
                    run,
                    command=command_line("train", run.overrides),
                    varied=job.varied,
                    changed=tuple(changed_from_defaults(run)),
                    sweep=f"{folder.parent.name}/{folder.name}",
                    micro_batch_choice=micro_batch_choice,
                ),
                job.folder,
            )
            for job, (run, micro_batch_choice) in zip(jobs, resolved_jobs, strict=True)
        ]
        earlier_results: dict[int, Result] = {}
        if self._resume_request is not None and not self.is_search:
            tasks, earlier_results = sweep_resume.renumber_tasks(tasks, self._earlier_jobs, folder)
            show.print_resume_summary(len(tasks), len(earlier_results), folder)
        results = execute_all(
            tasks,
            folder,
            build_executor(launcher_options),
            command=self._command,
            question=question,
            on_start=show.print_job_start,
            on_end=_report_outcome,
            kept_results=earlier_results,
            cases={
                job.run.name: {"expect": job.expectation.as_dict(), "plan": _fit_status(job.run)}
                for job in jobs
                if job.expectation is not None
            },
        )
        with report_errors("no job table"):
            show.print_job_table(tasks, results)
        show.finish_sweep(results, folder)
        publish.after_training(folder, [result.folder for result in results])
        exit_codes = [result.exit_code for result in results]
        if any(job.expectation is not None for job in jobs):
            from scalewise.commands import show_grades  # imports numpy

            passed = show_grades.grade_sweep_folder(folder)
            exit_codes = [int(not passed[job.run.name]) for job in jobs]
        return [
            JobOutcome(exit_code, result.objective)
            for exit_code, result in zip(exit_codes, results, strict=True)
        ]


def _fit_status(run: RunConfig) -> str:
    """Predicted fit status of a case; empty if only a trace predicts its memory."""
    return "" if run.objective.trace_only else check_fit(run).status.value


def _report_outcome(task: SweepTask, result: Result) -> None:
    """Print the outcome of a job; publish a failed one immediately."""
    show.print_job_outcome(task, result)
    if result.exit_code:
        publish.after_training(result.folder, [result.folder])


def main(arguments: Sequence[str]) -> int:
    """Run ``scalewise train ARGUMENTS`` and return its exit code."""
    with signals.raise_on_signals("before there was a run"):
        resume_request, overrides = sweep_resume.parse_resume_request(arguments)
        return run_command(TrainCommand(overrides, resume_request), overrides)
