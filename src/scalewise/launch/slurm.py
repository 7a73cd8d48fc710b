"""Jobs of a sweep as job arrays under Slurm, a task a rank; this process submits and watches.

Whether a job went well is what its ``status.json`` says. What Slurm says only tells whether to wait
on, and why a job ended that could not say so itself.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalewise import regular_files
from scalewise.console import print_lines
from scalewise.errors import EXIT_CODES, ConfigError, ConfigIssue, Interrupted, ScalewiseError
from scalewise.hardware import DeviceKind
from scalewise.launch import exit_reports, job_serialization, signals, slurm_cli
from scalewise.launch.executor import StartCallback, SweepTask
from scalewise.launch.job import Result
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import read_json, write_json
from scalewise.typed_override import command_line

SHORTEST_POLL, LONGEST_POLL = 1.0, 30.0
"""Seconds between two looks at the queue: rarer as time goes by, since all users share Slurm."""
SETTLING_S = 10.0
"""Seconds that a status may take to be seen here, on a disk of several machines."""
SILENCE_S = 900.0
"""Seconds that Slurm may not answer; its controller restarts within minutes."""
LAST_RANKS_S = 60
"""Seconds that ranks may go on when one has ended: what is left then waits for the dead."""
_OUTCOMES = {"CANCELLED": "interrupted", "OUT_OF_MEMORY": "out_of_memory", "TIMEOUT": "timeout"}
"""What the ending of a job that left no status is called, by Slurm's state; others have failed."""

_SBATCH = {"timeout_min": "time", "name": "job_name", "mem_gb": "mem"}
"""Fields that sbatch calls otherwise."""


class SlurmExecutor:
    """Hands jobs to Slurm; the options are the fields of ``hydra/launcher=slurm``."""

    def __init__(self, **options: Any) -> None:
        self._nodes = int(options.pop("nodes"))
        self._folder = Path(str(options.pop("submitit_folder"))).absolute()
        self._timeouts = int(options.pop("max_num_timeout"))
        self._options = options

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Yields each task with how it ended, as they end.

        A signal ends the watching and no job: it raises ``Interrupted``, which says how to go on.
        """
        if issues := list(self._validate(tasks)):
            raise ConfigError({str(issue): issue for issue in issues}.values())
        tasks = [replace(task, folder=_next_folder(task.folder)) for task in tasks]
        jobs = self._submit_all(tasks)
        for task in tasks:
            on_start(task)
        arrays = " ".join(sorted({job.partition("_")[0] for job in jobs.values()}))
        shown = command_line("status", [self._folder.parent])
        print_lines("", f"in Slurm's queue: {arrays}; {shown}")
        try:
            yield from self._watch({jobs[task.number]: task for task in tasks})
        except Interrupted as error:
            report = command_line("report", [self._folder.parent])
            raise Interrupted(
                error.signal_number,
                f"{error}; the jobs go on: {shown} shows them, "
                f"scancel {arrays} ends them; then: {report}",
            ) from None

    def _validate(self, tasks: Sequence[SweepTask]) -> Iterator[ConfigIssue]:
        if not slurm_cli.has_slurm():
            reason = "there is no sbatch here"
            fix = "submit from a machine of the cluster, or set hydra/launcher=scalewise"
            yield ConfigIssue("hydra/launcher", "slurm", reason, fix)
        devices = self._options["gpus_per_node"]
        for run in (task.job_spec.run for task in tasks):
            nodes = self._count_nodes(run)
            if run.world_size % nodes:
                reason = f"a run of {run.world_size} ranks is not spread evenly over {nodes} nodes"
                yield ConfigIssue("hydra.launcher.nodes", self._nodes, reason)
            if devices and run.hardware.device is not DeviceKind.cuda:
                fix = "name the device of the nodes, as by hardware=h100"
                reason = "the run goes to the CPU, and needs none"
                yield ConfigIssue("hydra.launcher.gpus_per_node", devices, reason, fix)
            if run.launch.timeout is not None:
                fix = "set hydra.launcher.timeout_min"
                yield ConfigIssue(
                    "launch.timeout", run.launch.timeout, "Slurm ends what takes too long", fix
                )
            if run.launch.max_restarts:
                reason = "Slurm starts jobs again where a place or their time was lost"
                fix = "leave it out"
                yield ConfigIssue("launch.max_restarts", run.launch.max_restarts, reason, fix)

    def _count_nodes(self, run: RunConfig) -> int:
        """Returns the nodes of a run: as many as asked for, or as its ranks need."""
        of_profile = run.hardware.devices_per_node if run.hardware.device == "cuda" else None
        each = self._options["gpus_per_node"] or of_profile or run.world_size
        return min(run.world_size, max(self._nodes, -(-run.world_size // each)))

    def _submit_all(self, tasks: Sequence[SweepTask]) -> dict[int, str]:
        """Submits jobs of like shape as one array each; returns Slurm's id of each job."""
        self._folder.mkdir(parents=True, exist_ok=True)
        shapes: dict[tuple[int, int, bool], list[SweepTask]] = {}
        for task in tasks:
            job_serialization.write_task(task, self._folder / f"{task.number}.json")
            run = task.job_spec.run
            on_cuda = run.hardware.device is DeviceKind.cuda
            shapes.setdefault((self._count_nodes(run), run.world_size, on_cuda), []).append(task)
        jobs: dict[int, str] = {}
        try:
            with signals.raise_on_signals("while the jobs were handed to Slurm"):
                for (nodes, ranks, on_cuda), alike in shapes.items():
                    numbers = [task.number for task in alike]
                    array = self._submit_array(numbers, nodes, ranks // nodes, on_cuda)
                    jobs |= {number: f"{array}_{number}" for number in numbers}
        except BaseException:
            slurm_cli.cancel_jobs(jobs.values())  # all or none
            raise
        known = slurm_cli.sweep_job_ids(self._folder.parent)
        file = self._folder / slurm_cli.JOBS
        write_json(file, {**known, **{str(n): job for n, job in jobs.items()}})
        return jobs

    def _submit_array(
        self, numbers: Sequence[int], nodes: int, ranks_per_node: int, on_cuda: bool
    ) -> str:
        """Returns the id of an array whose elements are these jobs of the sweep."""
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        options = {_SBATCH.get(key, key): value for key, value in self._options.items()}
        most = options["array_parallelism"]
        further = options["additional_parameters"]
        if on_cuda and not (options["gpus_per_node"] or options["gres"] or "gpus" in further):
            options["gpus_per_node"] = ranks_per_node
        options |= {
            "nodes": nodes,
            "ntasks_per_node": ranks_per_node,
            "mem": f"{options['mem']}GB" if options["mem"] else None,
            "srun_args": [f"--wait={LAST_RANKS_S}", "--kill-on-bad-exit=0"],
            "additional_parameters": {
                "requeue": True,
                **further,
                "array": f"{','.join(map(str, numbers))}%{min(len(numbers), most)}",
            },
        }
        line = [sys.executable, "-P", "-m", "scalewise.launch.slurm_task", str(self._folder)]
        try:
            executor = SlurmExecutor(self._folder)
            executor.update_parameters(**options)
            executor.parameters["map_count"] = len(numbers)  # names logs after the array
            # A plain command: what submitit itself would run is a pickle.
            job = executor._submit_command(
                f'{shlex.join(line)} "$SLURM_ARRAY_TASK_ID" {self._timeouts}'
            )
        except (FailedJobError, FailedSubmissionError, ValueError) as error:
            said = [line for line in str(error).splitlines() if "error:" in line]
            reason = "; ".join(said) or " ".join(str(error).split())
            raise ConfigError.for_key("hydra/launcher", "slurm", reason) from error
        return str(job.job_id)

    def _watch(self, jobs: Mapping[str, SweepTask]) -> Iterator[tuple[SweepTask, Result]]:
        waiting, gone = dict(jobs), dict[str, float]()
        began = answered = time.monotonic()
        while waiting:
            with signals.raise_on_signals("while the jobs were waited for"):
                time.sleep(min(LONGEST_POLL, SHORTEST_POLL + (time.monotonic() - began) / 30))
                states = slurm_cli.job_states()
                ended = [job for job in waiting if self._has_ended(waiting[job], job, states, gone)]
            for job in ended:
                task = waiting.pop(job)
                yield task, _job_result(task, job)
            if states is not None:
                answered = time.monotonic()
            elif time.monotonic() - answered > SILENCE_S:
                raise ScalewiseError(
                    f"Slurm has not answered for {SILENCE_S:.0f} s; its jobs may go on: "
                    f"{command_line('status', [self._folder.parent])} shows what they leave"
                )

    def _has_ended(
        self,
        task: SweepTask,
        job: str,
        states: Mapping[str, str] | None,
        missing_since: dict[str, float],
    ) -> bool:
        """Returns whether a job has ended for good; writes how, where it could not itself."""
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
    """Returns the folder that the job will claim: what an earlier job left there says nothing."""
    tries = (folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, 1000)))
    return next(own for own in tries if not own.exists())


def write_lost_status(folder: Path, job: str, log_folder: Path) -> None:
    """Writes the status of a job that Slurm has no more and that left no word of its end."""
    status = read_json(folder / "status.json")
    if not status:
        return
    outcome = exit_reports.lost_rank_reason(folder, int(str(status["world_size"])))
    state, reason = _slurm_state(job)
    log = sorted(log_folder.glob(f"{job}_*_log.err"))
    tail = regular_files.read_text(log[0], errors="replace").splitlines()[-12:] if log else []
    name = _OUTCOMES.get(state, "failed")
    if outcome is not None:
        reason = f"{outcome.reason}; {reason}"
        tail = list(outcome.log_tail) or tail
    ended = datetime.now(UTC)
    begun = datetime.fromisoformat(str(status["started"]))
    status |= {
        "status": name,
        "reason": reason,
        "exit_code": EXIT_CODES.get(name, 128 + 15),
        "ended": ended.isoformat(timespec="milliseconds"),
        "seconds": round((ended - begun).total_seconds(), 3),
        "rank": outcome.rank if outcome else None,
        "log_tail": tail,
    }
    write_json(folder / "status.json", status)
    exit_reports.remove_reports(folder)


def _slurm_state(job: str) -> tuple[str, str]:
    """Returns Slurm's state of a job that has ended, and that in words."""
    facts = slurm_cli.job_facts(job)
    state = facts.get("JobState", "")
    if not state:
        return "", f"job {job} is not known to Slurm any more, and left no word"
    exit_code = facts.get("ExitCode", "?")
    return state, f"Slurm says of job {job}: {state}, exit code {exit_code}"


def _job_result(task: SweepTask, job: str) -> Result:
    status = read_json(task.folder / "status.json")
    if not status:  # it never began
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
