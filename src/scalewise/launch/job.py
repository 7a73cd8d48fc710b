"""Execution of one job: folder, data preparation, attempts and status."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import yaml

from scalewise import atomic, inputs
from scalewise.callback_config import is_builtin
from scalewise.checkpoints import manifest
from scalewise.data.prepare import prepare_splits
from scalewise.data.remote_files import copy_inputs
from scalewise.errors import ConfigError
from scalewise.failures import report_errors
from scalewise.launch import (
    exit_reports,
    external_launcher,
    flight_recorder,
    locks,
    processes,
    signals,
)
from scalewise.launch.checkpoint_lookup import locked_find_checkpoint
from scalewise.launch.config_hash import config_hash
from scalewise.launch.outcomes import Outcome, outcome_of_exception
from scalewise.launch.rank_mode import ElasticRanks, InProcess, run_ranks
from scalewise.launch.status_file import Status, git_state
from scalewise.launch_config import Isolation
from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.planner.auto_settings import MicroBatchChoice
from scalewise.planner.fit_check import reject_unfit
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json, write_text
from scalewise.strategies import deepspeed_ops
from scalewise.training.import_class import import_user_classes, instantiate_callbacks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """Outcome and measurements of a job."""

    status: str
    """Outcome: ok, pruned, failed, out_of_memory, timeout, interrupted or refused."""
    reason: str
    """Reason of the outcome; empty for ``ok``."""
    exit_code: int
    """Exit code of the outcome."""
    folder: Path
    """Folder of the run."""
    summary: Mapping[str, Any]
    """Content of ``summary.json``; its ``metrics`` by key. Empty if the job failed early."""

    @property
    def objective(self) -> float:
        """Last validation loss, else last training loss; infinite without either."""
        metrics = self.summary.get("metrics") or {}
        for key in ("val/loss", "train/loss"):
            if self.status == "ok" and metrics.get(key) is not None:
                return float(metrics[key])
        return float("inf")


@dataclass(frozen=True)
class JobSpec:
    """Config of a run with its command, its sweep and earlier attempts."""

    run: RunConfig
    """Config of the run."""
    command: str = ""
    """Command line that started the job."""
    varied: Mapping[str, str] = field(default_factory=dict)
    """Overrides by key that differ between the jobs of the sweep."""
    changed: Sequence[Mapping[str, object]] = ()
    """Differences from the config of an earlier run."""
    sweep: str | None = None
    """Name of the sweep; None: a single run."""
    attempts: Sequence[Path] = ()
    """Folders of earlier attempts at the job, the newest first; the job resumes from them."""
    micro_batch_choice: MicroBatchChoice | None = None
    """How ``trainer.micro_batch=auto`` was resolved; None: the option is a number."""


@dataclass(frozen=True)
class ExternalRank:
    """This process is a rank that an external launcher started: torchrun or srun."""

    implementation: ClassVar[str] = "scalewise.launch.external_rank"
    is_retry: bool = False
    """Whether it resumes an earlier attempt in the same folder."""


@lazy_dispatch
def run_external_rank(external_rank: ExternalRank, job_spec: JobSpec, folder: Path) -> Result:
    """Train as the rank of this process and return the result; rank 0 writes the status.

    Raises ``ConfigError`` for invalid jobs, and ``Interrupted`` for a signal before the job has a
    folder.
    """
    raise not_registered(run_external_rank, external_rank)


def execute(job_spec: JobSpec, folder: Path) -> Result:
    """Run one job in ``folder`` and return its result.

    Raises ``ConfigError``, without creating a folder, if data or checkpoint are invalid, and
    ``Interrupted`` for a signal before the folder is created.
    """
    with signals.raise_on_signals("before training began"):
        if external_launcher.is_external_rank():
            return run_external_rank(ExternalRank(), job_spec, folder)
        if needs_own_process(job_spec):
            # The forkserver imports while this process prepares data.
            processes.start_forkserver(job_spec.run.imports)
        steps = prepare_job(job_spec)
        with ExitStack() as exit_stack:
            folder, resume = claim_locked(job_spec, folder, steps, exit_stack)
            status = begin_job(job_spec, folder, resume)
            outcome, attempts = _run_attempts(job_spec, folder, resume, status)
            return finish_job(status, outcome, job_spec, attempts, folder)


def prepare_job(job_spec: JobSpec) -> int:
    """Prepare data, callbacks and parallelism, and return the number of optimizer steps.

    Raises ``ConfigError`` if the job cannot run.
    """
    run = job_spec.run
    if run.launch.refuse_unfit:
        reject_unfit(run)
    if not all(is_builtin(callback["_target_"]) for callback in run.callbacks.values()):
        instantiate_callbacks(run)  # their constructors check their arguments
    deepspeed_ops.build_extensions(run.parallelism.native_extensions, run.hardware.device)
    if run.objective.is_user_defined:
        import_user_classes(run)
        # The length of its data loaders is unknown here.
        steps = run.trainer.max_steps or sys.maxsize
    else:
        copy_inputs(run.data)
        splits = prepare_splits(run.data, run.model.vocabulary, run.seed)
        steps = run.num_steps(len(splits.train))
    return steps


def claim_locked(
    job_spec: JobSpec, folder: Path, steps: int, exit_stack: ExitStack
) -> tuple[Path, Path | None]:
    """Create the folder of a job and lock it until ``exit_stack`` closes.

    Returns the folder and the checkpoint to resume. Raises ``ConfigError`` if the checkpoint is
    invalid or its run is in use.
    """
    with locked_resume_checkpoint(job_spec, folder, steps) as resume:
        folder = claim_folder(folder)
        exit_stack.enter_context(locks.acquire_lock(folder))
        return folder, resume


@contextmanager
def locked_resume_checkpoint(job_spec: JobSpec, folder: Path, steps: int) -> Iterator[Path | None]:
    """Yield the checkpoint that a job of ``steps`` steps resumes; None without one."""
    checkpoint = _attempt_checkpoint(job_spec) if job_spec.attempts else None
    if checkpoint is not None or job_spec.run.resume is None:
        yield checkpoint
        return
    in_sweep = job_spec.sweep is not None
    with locked_find_checkpoint(job_spec.run, folder, steps, in_sweep=in_sweep) as path:
        yield path


def _attempt_checkpoint(job_spec: JobSpec) -> Path | None:
    """Newest checkpoint of the earlier attempts at a job; None without one."""
    checkpoints = (
        manifest.newest_checkpoint(attempt / "checkpoints") for attempt in job_spec.attempts
    )
    return next(filter(None, checkpoints), None)


def claim_folder(folder: Path) -> Path:
    """Create the folder of a job; appends ``-2``, ``-3``, ... if it belongs to another job."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            claimed_folder = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
            claimed_folder.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                (claimed_folder / "overrides.txt").open("x", encoding="utf-8").close()
                return claimed_folder
    except OSError as error:
        reason = f"cannot be created: {error.strerror}"
        raise ConfigError.for_key(
            "hydra.run.dir", folder, reason, "run in another folder"
        ) from error
    raise ConfigError.for_key(
        "hydra.run.dir", folder, "already contains a run", "set another folder"
    )


def attempt_folders(planned_folder: Path) -> tuple[Path, ...]:
    """Folders of the attempts at a job, the newest first."""
    folders: list[Path] = []
    folder = planned_folder
    while (folder / "overrides.txt").exists():
        folders.insert(0, folder)
        folder = planned_folder.with_name(f"{planned_folder.name}-{len(folders) + 1}")
    return tuple(folders)


def begin_job(
    job_spec: JobSpec,
    folder: Path,
    resume: Path | None,
    previous_status: Mapping[str, Any] | None = None,
) -> Status:
    """Write config, inputs and status of a job before it starts, and return the status.

    ``previous_status``: ``status.json`` of the previous attempt. Raises ``ConfigError``
    if the disk has no space for the status at the end of the job. An exception removes new files.
    """
    try:
        return _write_first_status(job_spec, folder, resume, previous_status or {})
    except BaseException as error:  # includes signals
        exit_reports.remove_reports(folder)
        if not previous_status:
            _remove_claimed(folder)
        if (reason_and_fix := atomic.disk_full_reason(error)) is None:
            raise
        raise ConfigError.for_key("hydra.run.dir", folder, *reason_and_fix) from error


def _remove_claimed(folder: Path) -> None:
    """Remove the files of ``claim_folder`` and ``begin_job``, and folders that are then empty."""
    file_names = ("overrides.txt", "resolved.yaml", inputs.INPUTS_FILE, "status.json", locks.FILE)
    for name in file_names:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        (folder / "checkpoints").rmdir()
    with suppress(OSError):
        for parent in (folder, *folder.parents[:2]):
            parent.rmdir()


def _write_first_status(
    job_spec: JobSpec, folder: Path, resume: Path | None, previous_status: Mapping[str, Any]
) -> Status:
    run = job_spec.run
    overrides = "".join(f"{override}\n" for override in run.overrides)
    write_text(folder / "overrides.txt", overrides)
    write_text(folder / "resolved.yaml", yaml.safe_dump(run.as_dict(), sort_keys=False))
    inputs.write_inputs(run.as_dict(), folder)
    (folder / "checkpoints").mkdir(exist_ok=True)
    exit_reports.prepare_reports(folder)
    status = Status(
        verb="train",
        name=run.name,
        question=run.question,
        command=job_spec.command,
        choices=run.applied_choices,
        overrides=run.overrides,
        varied=dict(job_spec.varied),
        changed=tuple(job_spec.changed),
        world_size=run.world_size,
        config_hash=config_hash(run),
        started=previous_status.get("started")
        or datetime.now(UTC).isoformat(timespec="milliseconds"),
        attempts=previous_status.get("attempts", 0) + 1,
        resumed_from=str(resume) if resume else None,
        micro_batch={}
        if job_spec.micro_batch_choice is None
        else _micro_batch_record(job_spec.micro_batch_choice),
        **git_state(),
    )
    status.reserve(folder)
    status.write(folder)  # last: a folder with a status is a run
    return status


def _micro_batch_record(choice: MicroBatchChoice) -> dict[str, object]:
    return {
        "rows": choice.micro_batch,
        "verdict": choice.fit_status,
        "trials": [{"rows": it.micro_batch, "status": it.status} for it in choice.probes],
        "untried": choice.skip_reason,
        "how": choice.description,
    }


def needs_own_process(job_spec: JobSpec) -> bool:
    """Whether a job runs in a separate process."""
    launch = job_spec.run.launch
    if launch.isolation is Isolation.auto:
        return (
            job_spec.run.parallelism.uses_process_group
            or launch.needs_own_process
            or job_spec.sweep is not None
        )
    return launch.isolation is Isolation.process or job_spec.run.parallelism.uses_process_group


def _run_attempts(
    job_spec: JobSpec, folder: Path, resume: Path | None, status: Status
) -> tuple[Outcome, int]:
    number, max_attempts = 0, job_spec.run.launch.max_restarts + 1
    while True:
        number += 1
        try:
            with signals.raise_on_signals("before training began"):
                outcome = _run_attempt(job_spec, folder, resume, status, number)
        except Exception as error:  # every exception becomes a status
            outcome = outcome_of_exception(error, None)
        if outcome.status not in ("failed", "timeout") or number >= max_attempts:
            return outcome, number
        resume = manifest.newest_checkpoint(folder / "checkpoints") or resume
        logger.info(f"attempt {number} {outcome.status}: {outcome.reason}; restarting")


def _run_attempt(
    job_spec: JobSpec, folder: Path, resume: Path | None, status: Status, number: int
) -> Outcome:
    metadata = wandb_metadata(job_spec, status, folder, resume, number)
    mode = ElasticRanks() if needs_own_process(job_spec) else InProcess()
    with signals.defer_signals():
        run_attempt = run_ranks.bind(mode)  # imports torch
    return run_attempt(with_wandb_group(job_spec, folder, resume), folder, resume, metadata)


def with_wandb_group(job_spec: JobSpec, folder: Path, resume: Path | None) -> RunConfig:
    """Config with a W&B group, if it has none.

    The group is the sweep, else the group of the resumed run, else the folder: each attempt is a
    separate W&B run, and the group contains all of them.
    """
    run = job_spec.run
    if run.tracking.group is not None:
        return run
    own_group = f"{folder.parent.name}/{folder.name}"
    group = job_spec.sweep or (_wandb_group(resume.parents[1]) if resume else None) or own_group
    return replace(run, tracking=replace(run.tracking, group=group))


def _wandb_group(folder: Path) -> str | None:
    group: str | None = read_json(folder / "status.json").get("wandb", {}).get("group")
    return group


def wandb_metadata(
    job_spec: JobSpec, status: Status, folder: Path, resume: Path | None, attempt: int
) -> dict[str, object]:
    """Metadata of the W&B run, in addition to the config."""
    values = asdict(status)
    keys = ("command", "git_commit", "git_dirty", "versions", "machine", "world_size")
    return {
        **{key: values[key] for key in keys},
        "host": socket.gethostname(),
        "folder": str(folder),
        "varied": dict(job_spec.varied),
        "attempt": attempt,
        "resumed_from": str(resume) if resume else None,
    }


def finish_job(
    status: Status, outcome: Outcome, job_spec: JobSpec, attempts: int, folder: Path
) -> Result:
    """Write the outcome of a job to ``status.json`` and return the result."""
    outcome = flight_recorder.add_dump_path(outcome, folder)
    with signals.ignore_signals():
        with report_errors(f"status.json of {folder} is not updated"):
            status.with_outcome(outcome, job_spec.run, attempts, folder).write(folder)
        exit_reports.remove_reports(folder)
    summary = read_json(folder / "summary.json")
    return Result(outcome.status, outcome.reason, outcome.exit_code, folder, summary)
