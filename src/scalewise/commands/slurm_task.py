"""Task of a Slurm job: ``python -m scalewise.commands.slurm_task FOLDER NUMBER TIMEOUTS``.

``FOLDER`` contains the job specs of a sweep, ``NUMBER`` selects one, and ``TIMEOUTS`` is the
maximum number of requeues after the time limit. Each task is one rank.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from scalewise import console
from scalewise.console import print_lines
from scalewise.errors import EXIT_CODES, ConfigError, Interrupted, ScalewiseError
from scalewise.failures import describe_exception, report_errors
from scalewise.launch import executor, external_launcher, signals, slurm_cli
from scalewise.launch.executor import INTERRUPTED, SweepTask
from scalewise.launch.job import (
    ExternalRank,
    Result,
    begin_job,
    claim_folder,
    finish_job,
    run_external_rank,
)
from scalewise.launch.outcomes import Outcome, outcome_of_exception
from scalewise.run_files import read_json, write_json
from scalewise.torch_environment import set_torch_variables
from scalewise.validation.run_issues import iter_machine_issues


def main(arguments: Sequence[str]) -> int:
    """Run this rank and return its exit code, once the job has a status or is requeued."""
    folder, number, timeouts = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    environment_error = external_launcher.adopt_slurm_step(os.environ, min_tasks=1)
    with console.shield_streams():
        try:
            if environment_error is not None:
                raise environment_error
            task = executor.read_task(folder / f"{number}.json")
            result = _run_rank(task)
        except ScalewiseError as error:
            print_lines(*f"scalewise: {error}".split("\n"), stderr=True)
            return error.exit_code
        except Exception as error:
            print_lines(f"scalewise: {describe_exception(error)}", stderr=True)
            return EXIT_CODES["failed"]
        if external_launcher.is_leader():
            with signals.ignore_signals():  # a requeue sends signals to the processes that it ends
                counter_file = folder / f"{number}-timeouts.json"
                if result.exit_code not in INTERRUPTED or not _requeue_interrupted(
                    counter_file, timeouts, result
                ):
                    _write_report(result.folder)
        return result.exit_code


def _run_rank(task: SweepTask) -> Result:
    """Run this rank, in the folder of the previous attempt if there is one."""
    is_requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    is_retry = is_requeued and (task.folder / "status.json").is_file()
    try:
        with signals.raise_on_signals("before training began"):
            if issues := list(iter_machine_issues(task.job_spec.run)):
                raise ConfigError(issues)
            return run_external_rank(ExternalRank(is_retry), task.job_spec, task.folder)
    except Interrupted as error:
        outcome = Outcome("interrupted", str(error), None, (), error.signal_number)
    except Exception as error:  # every exception becomes a status
        outcome = outcome_of_exception(error, int(os.environ["RANK"]))
    if not external_launcher.is_leader():
        return Result(outcome.status, outcome.reason, outcome.exit_code, task.folder, {})
    previous_status = read_json(task.folder / "status.json")
    folder = task.folder if is_retry else claim_folder(task.folder)
    status = begin_job(task.job_spec, folder, None, previous_status)
    return finish_job(status, outcome, task.job_spec, status.attempts, folder)


def _write_report(folder: Path) -> None:
    """Write the report of the job, as the submitting process may have ended."""
    from scalewise.reports import html_report

    with report_errors("no report"):
        for page in html_report.write_reports([folder]):
            print_lines(f"report {page}")


def _requeue_interrupted(counter_file: Path, max_timeouts: int, result: Result) -> bool:
    """Requeue an interrupted job if allowed, and print the decision; returns whether it is.

    ``counter_file`` contains the number of earlier timeouts.
    """
    is_requeued = False
    time_limit_near = result.exit_code - 128 == signal.SIGUSR2
    if time_limit_near and not _may_be_requeued(counter_file, max_timeouts):
        explanation = f"hydra.launcher.max_num_timeout={max_timeouts} is reached"
        status = read_json(result.folder / "status.json")
        write_json(
            result.folder / "status.json", {**status, "reason": f"{result.reason}; {explanation}"}
        )
    else:
        is_requeued, explanation = _requeue_outcome(time_limit_near)
    print_lines(f"{result.status}: {result.reason}; {explanation}")
    return is_requeued


def _may_be_requeued(counter_file: Path, max_timeouts: int) -> bool:
    """Count a timeout of the job; returns whether it may be requeued."""
    timeouts = int(str(read_json(counter_file).get("timeouts", 0)))
    write_json(counter_file, {"timeouts": timeouts + 1})
    return timeouts < max_timeouts


def _requeue_outcome(time_limit_near: bool) -> tuple[bool, str]:
    """Requeue a job at its time limit or after preemption; returns whether it is, and why.

    A job that is no longer running was cancelled, or requeued by Slurm itself.
    """
    job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    fields = slurm_cli.job_facts(job)
    if fields.get("JobState") != "RUNNING":
        return False, f"Slurm state: {fields.get('JobState', 'unknown')}"
    if not time_limit_near and fields.get("PreemptTime", "None") == "None":
        return False, "the job was not preempted"
    is_requeued = slurm_cli.requeue_job(job)
    return is_requeued, "Slurm requeued the job" if is_requeued else "Slurm did not requeue the job"


if __name__ == "__main__":
    set_torch_variables(os.environ)
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes import no code from this folder
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of a failed process group block the exit of the interpreter.
    os._exit(code)
