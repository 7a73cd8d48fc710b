"""Executor that submits jobs as Slurm job arrays with one task per rank, and waits for them.

The outcome of a job is in its ``status.json``. The state of Slurm only determines whether to wait,
and the reason if a job ended without writing a status.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalewise import regular_files
from scalewise.compat.optuna_submitit import submit_command
from scalewise.errors import EXIT_CODES, ConfigError, ConfigIssue, Interrupted, ScalewiseError
from scalewise.hardware import DeviceKind
from scalewise.launch import executor, exit_reports, flight_recorder, signals, slurm_cli
from scalewise.launch.executor import StartCallback, SweepTask
from scalewise.launch.job import Result
from scalewise.run_config import RunConfig
from scalewise.run_files import parse_time, read_json, write_json
from scalewise.typed_override import command_line

logger = logging.getLogger(__name__)

MIN_POLL_S, MAX_POLL_S = 1.0, 30.0
"""Poll interval of the queue, in seconds; it grows with time to limit the load on Slurm."""
SETTLING_S = 10.0
"""Maximum delay of a status on a shared file system, in seconds."""
SILENCE_S = 900.0
"""Maximum time without a response of Slurm, in seconds; its controller restarts within minutes."""
PEER_WAIT_S = 60
"""Time until srun kills the other ranks after one has ended, in seconds."""
_OUTCOMES = {"CANCELLED": "interrupted", "OUT_OF_MEMORY": "out_of_memory", "TIMEOUT": "timeout"}
"""Outcome of a job without status, by its Slurm state; ``failed`` for other states."""

_SBATCH_NAMES = {"timeout_min": "time", "name": "job_name", "mem_gb": "mem"}
"""Parameter names of sbatch, by launcher option."""


class SlurmExecutor:
    """Submits jobs to Slurm; the options are the fields of ``hydra/launcher=slurm``."""

    def __init__(self, **options: Any) -> None:
        self._nodes = int(options.pop("nodes"))
        self._folder = Path(str(options.pop("submitit_folder"))).absolute()
        self._timeouts = int(options.pop("max_num_timeout"))
        self._options = options

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Submit the jobs and yield each task with its result as it ends.

        A signal ends the wait, not the jobs: it raises ``Interrupted``, whose message has the next
        commands.
        """
        if issues := list(self._validate(tasks)):
            raise ConfigError({str(issue): issue for issue in issues}.values())
        tasks = [replace(task, folder=_next_folder(task.folder)) for task in tasks]
        job_ids = self._submit_all(tasks)
        for task in tasks:
            on_start(task)
        arrays = " ".join(sorted({job.partition("_")[0] for job in job_ids.values()}))
        status_command = command_line("status", [self._folder.parent])
        logger.info("")
        logger.info(f"submitted to Slurm: {arrays}; {status_command}")
        try:
            yield from self._watch({job_ids[task.number]: task for task in tasks})
        except Interrupted as error:
            report_command = command_line("report", [self._folder.parent])
            raise Interrupted(
                error.signal_number,
                f"{error}; the jobs continue: {status_command} shows them, "
                f"scancel {arrays} cancels them; afterwards: {report_command}",
            ) from None

    def _validate(self, tasks: Sequence[SweepTask]) -> Iterator[ConfigIssue]:
        if not slurm_cli.has_slurm():
            reason = "sbatch is not installed on this machine"
            fix = "submit from a machine of the cluster, or set hydra/launcher=scalewise"
            yield ConfigIssue("hydra/launcher", "slurm", reason, fix)
        devices = self._options["gpus_per_node"]
        for run in (task.job_spec.run for task in tasks):
            nodes = self._count_nodes(run)
            if run.world_size % nodes:
                reason = f"{run.world_size} ranks cannot be divided evenly among {nodes} nodes"
                yield ConfigIssue("hydra.launcher.nodes", self._nodes, reason)
            if devices and run.hardware.device is not DeviceKind.cuda:
                fix = "set hardware to the device of the nodes, e.g. hardware=h100"
                reason = "the run uses the CPU"
                yield ConfigIssue("hydra.launcher.gpus_per_node", devices, reason, fix)
            if run.launch.timeout is not None:
                fix = "set hydra.launcher.timeout_min"
                yield ConfigIssue(
                    "launch.timeout", run.launch.timeout, "is not supported under Slurm", fix
                )
            if run.launch.max_restarts:
                reason = "is not supported under Slurm, which requeues jobs"
                fix = "remove it"
                yield ConfigIssue("launch.max_restarts", run.launch.max_restarts, reason, fix)

    def _count_nodes(self, run: RunConfig) -> int:
        """Number of nodes of a run: the option, or more if its ranks require them."""
        profile_devices = run.hardware.devices_per_node if run.hardware.device == "cuda" else None
        ranks_per_node = self._options["gpus_per_node"] or profile_devices or run.world_size
        return min(run.world_size, max(self._nodes, -(-run.world_size // ranks_per_node)))

    def _submit_all(self, tasks: Sequence[SweepTask]) -> dict[int, str]:
        """Submit jobs of the same shape as one array each; returns the Slurm IDs by job number."""
        self._folder.mkdir(parents=True, exist_ok=True)
        shapes: dict[tuple[int, int, bool], list[SweepTask]] = {}
        for task in tasks:
            executor.write_task(task, self._folder / f"{task.number}.json")
            run = task.job_spec.run
            on_cuda = run.hardware.device is DeviceKind.cuda
            shapes.setdefault((self._count_nodes(run), run.world_size, on_cuda), []).append(task)
        job_ids: dict[int, str] = {}
        try:
            with signals.raise_on_signals("while the jobs were submitted to Slurm"):
                for (nodes, ranks, on_cuda), same_shape in shapes.items():
                    numbers = [task.number for task in same_shape]
                    array = self._submit_array(numbers, nodes, ranks // nodes, on_cuda)
                    job_ids |= {number: f"{array}_{number}" for number in numbers}
        except BaseException:
            slurm_cli.cancel_jobs(job_ids.values())  # submit all jobs or none
            raise
        earlier_ids = slurm_cli.sweep_job_ids(self._folder.parent)
        file = self._folder / slurm_cli.JOBS
        write_json(file, {**earlier_ids, **{str(n): job_id for n, job_id in job_ids.items()}})
        return job_ids

    def _submit_array(
        self, numbers: Sequence[int], nodes: int, ranks_per_node: int, on_cuda: bool
    ) -> str:
        """Submit an array of these jobs and return its Slurm ID."""
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        options = {_SBATCH_NAMES.get(key, key): value for key, value in self._options.items()}
        parallelism = options["array_parallelism"]
        user_parameters = options["additional_parameters"]
        if on_cuda and not (
            options["gpus_per_node"] or options["gres"] or "gpus" in user_parameters
        ):
            options["gpus_per_node"] = ranks_per_node
        options |= {
            "nodes": nodes,
            "ntasks_per_node": ranks_per_node,
            "mem": f"{options['mem']}GB" if options["mem"] else None,
            "srun_args": [f"--wait={PEER_WAIT_S}", "--kill-on-bad-exit=0"],
            "additional_parameters": {
                "requeue": True,
                **user_parameters,
                "array": f"{','.join(map(str, numbers))}%{min(len(numbers), parallelism)}",
            },
        }
        command = [sys.executable, "-P", "-m", "scalewise.commands.slurm_task", str(self._folder)]
        try:
            executor = SlurmExecutor(self._folder)
            executor.update_parameters(**options)
            # Log file names then contain the array index.
            executor.parameters["map_count"] = len(numbers)
            # A plain command, because submitit's own runs a pickle.
            job = submit_command(
                executor, f'{shlex.join(command)} "$SLURM_ARRAY_TASK_ID" {self._timeouts}'
            )
        except (FailedJobError, FailedSubmissionError, ValueError) as error:
            messages = [line for line in str(error).splitlines() if "error:" in line]
            reason = "; ".join(messages) or " ".join(str(error).split())
            raise ConfigError.for_key("hydra/launcher", "slurm", reason) from error
        return str(job.job_id)

    def _watch(self, jobs: Mapping[str, SweepTask]) -> Iterator[tuple[SweepTask, Result]]:
        waiting_tasks, missing_since = dict(jobs), dict[str, float]()
        start = last_response = time.monotonic()
        while waiting_tasks:
            with signals.raise_on_signals("while waiting for the jobs"):
                time.sleep(min(MAX_POLL_S, MIN_POLL_S + (time.monotonic() - start) / 30))
                states = slurm_cli.job_states()
                ended_jobs = [
                    job
                    for job in waiting_tasks
                    if self._has_ended(waiting_tasks[job], job, states, missing_since)
                ]
            for job in ended_jobs:
                task = waiting_tasks.pop(job)
                yield task, _job_result(task, job)
            if states is not None:
                last_response = time.monotonic()
            elif time.monotonic() - last_response > SILENCE_S:
                raise ScalewiseError(
                    f"Slurm has not responded for {SILENCE_S:.0f} s; the jobs may still run: "
                    f"{command_line('status', [self._folder.parent])} shows their status"
                )

    def _has_ended(
        self,
        task: SweepTask,
        job: str,
        states: Mapping[str, str] | None,
        missing_since: dict[str, float],
    ) -> bool:
        """Whether a job has ended for good; writes the status of a job that could not."""
        status = read_json(task.folder / "status.json").get("status", "waiting")
        if states is None or job in states:
            missing_since.pop(job, None)
            return status not in ("waiting", "running", "interrupted")
        if status in ("waiting", "running"):
            if time.monotonic() - missing_since.setdefault(job, time.monotonic()) < SETTLING_S:
                return False
            write_lost_status(task.folder, job, self._folder)
        return True


def _next_folder(folder: Path) -> Path:
    """Folder that the job will claim, which is new: earlier folders have another status."""
    candidates = (folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, 1000)))
    return next(candidate for candidate in candidates if not candidate.exists())


def write_lost_status(folder: Path, job: str, log_folder: Path) -> None:
    """Write the status of a job that left Slurm's queue without writing its outcome."""
    status = read_json(folder / "status.json")
    if not status:
        return
    outcome = exit_reports.lost_rank_reason(folder, int(str(status["world_size"])))
    state, reason = _slurm_state(job)
    log = sorted(log_folder.glob(f"{job}_*_log.err"))
    tail = regular_files.read_text(log[0], errors="replace").splitlines()[-12:] if log else []
    name = _OUTCOMES.get(state, "failed")
    if outcome is not None:
        outcome = flight_recorder.add_dump_path(outcome, folder)
        reason = f"{outcome.reason}; {reason}"
        tail = list(outcome.log_tail) or tail
    end = datetime.now(UTC)
    start = parse_time(status.get("started")) or end
    status |= {
        "status": name,
        "reason": reason,
        "exit_code": EXIT_CODES.get(name, 128 + 15),
        "ended": end.isoformat(timespec="milliseconds"),
        "seconds": round((end - start).total_seconds(), 3),
        "rank": outcome.rank if outcome else None,
        "log_tail": tail,
    }
    write_json(folder / "status.json", status)
    exit_reports.remove_reports(folder)


def _slurm_state(job: str) -> tuple[str, str]:
    """Slurm state of an ended job, and a reason for its status."""
    facts = slurm_cli.job_facts(job)
    state = facts.get("JobState", "")
    if not state:
        return "", f"job {job} is unknown to Slurm and has no exit report"
    exit_code = facts.get("ExitCode", "?")
    return state, f"Slurm state of job {job}: {state}, exit code {exit_code}"


def _job_result(task: SweepTask, job: str) -> Result:
    status = read_json(task.folder / "status.json")
    if not status:  # it never started
        state, reason = _slurm_state(job)
        name = _OUTCOMES.get(state, "failed")
        return Result(name, reason, EXIT_CODES.get(name, 128 + 15), task.folder, {})
    return Result(
        str(status["status"]),
        str(status["reason"]),
        int(str(status["exit_code"])),
        task.folder,
        read_json(task.folder / "summary.json"),
    )
