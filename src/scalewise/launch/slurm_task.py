"""One task of a job under Slurm: ``python -m scalewise.launch.slurm_task FOLDER NUMBER TIMEOUTS``.

``FOLDER`` holds the orders of a sweep, ``NUMBER`` picks one, and ``TIMEOUTS`` says how often the
job may wait in the queue again because its time was up. Each task is one rank.
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
from scalewise.launch import external_launcher, job_serialization, signals, slurm_cli
from scalewise.launch.executor import INTERRUPTED, SweepTask
from scalewise.launch.job import Result, begin_job, claim_folder, finish_job
from scalewise.launch.outcomes import outcome_of_exception
from scalewise.launch.status import Outcome
from scalewise.tracking.run_files import read_json, write_json


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of this rank, once the job has a status or waits again."""
    folder, number, timeouts = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    incomplete = external_launcher.adopt_slurm_step(os.environ, min_tasks=1)
    with console.shield_streams():
        try:
            if incomplete is not None:
                raise incomplete
            task = job_serialization.read_task(folder / f"{number}.json")
            result = _run_rank(task)
        except ScalewiseError as error:
            print_lines(*f"scalewise: {error}".split("\n"), stderr=True)
            return error.exit_code
        except Exception as error:
            print_lines(f"scalewise: {describe_exception(error)}", stderr=True)
            return EXIT_CODES["failed"]
        if external_launcher.is_leader():
            with signals.ignore_signals():  # a requeue sends them to those whom it ends
                count = folder / f"{number}-timeouts.json"
                if result.exit_code not in INTERRUPTED or not _requeue_interrupted(
                    count, timeouts, result
                ):
                    _write_report(result.folder)
        return result.exit_code


def _run_rank(task: SweepTask) -> Result:
    """Runs this rank, in the job's folder of an earlier attempt if there was one."""
    requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    again = requeued and (task.folder / "status.json").is_file()
    try:
        with signals.raise_on_signals("before training began"):
            if issues := list(task.job_spec.run.validate_machine()):
                raise ConfigError(issues)
            from scalewise.launch.external_rank import run_external_rank

            return run_external_rank(task.job_spec, task.folder, is_retry=again)
    except Interrupted as error:
        outcome = Outcome("interrupted", str(error), None, (), error.signal_number)
    except Exception as error:  # whatever it is, the job has a status
        outcome = outcome_of_exception(error, int(os.environ["RANK"]))
    if not external_launcher.is_leader():
        return Result(outcome.status, outcome.reason, outcome.exit_code, task.folder, {})
    earlier = read_json(task.folder / "status.json")
    folder = task.folder if again else claim_folder(task.folder)
    status = begin_job(task.job_spec, folder, None, earlier)
    return finish_job(status, outcome, task.job_spec, status.attempts, folder)


def _write_report(folder: Path) -> None:
    """Writes the job's report: who submitted it may have left."""
    from scalewise.reports import files  # of the floor above

    with report_errors("no report"):
        for page in files.write_reports([folder]):
            print_lines(f"report {page}")


def _requeue_interrupted(counter_file: Path, max_timeouts: int, result: Result) -> bool:
    """Lets an interrupted job wait in the queue again where it may; returns whether it does.

    Prints what became of it. ``counter_file`` is the file that knows how often its time was up so
    far.
    """
    again = False
    warned = result.exit_code - 128 == signal.SIGUSR2
    if warned and not _may_be_requeued(counter_file, max_timeouts):
        told = f"hydra.launcher.max_num_timeout={max_timeouts} is used up"
        status = read_json(result.folder / "status.json")
        write_json(result.folder / "status.json", {**status, "reason": f"{result.reason}; {told}"})
    else:
        again, told = _requeue_outcome(warned)
    print_lines(f"{result.status}: {result.reason}; {told}")
    return again


def _may_be_requeued(counter_file: Path, max_timeouts: int) -> bool:
    """Counts that the time of a job was nearly up; returns whether it may have more."""
    so_far = int(str(read_json(counter_file).get("timeouts", 0)))
    write_json(counter_file, {"timeouts": so_far + 1})
    return so_far < max_timeouts


def _requeue_outcome(time_limit_near: bool) -> tuple[bool, str]:
    """Returns whether an interrupted job waits in the queue again, and what became of it.

    If it was ``time_limit_near`` of its time or is preempted: where somebody cancelled it, or Slurm
    itself has requeued it, it is not running any more.
    """
    job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    facts = slurm_cli.job_facts(job)
    if facts.get("JobState") != "RUNNING":
        return False, f"Slurm says {facts.get('JobState', 'nothing')}"
    if not time_limit_near and facts.get("PreemptTime", "None") == "None":
        return False, "nobody asked for its place"
    again = slurm_cli.requeue_job(job)
    return again, "it waits in the queue again" if again else "Slurm did not requeue it"


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes run no code of this folder
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of a broken process group would hold the interpreter back.
    os._exit(code)
