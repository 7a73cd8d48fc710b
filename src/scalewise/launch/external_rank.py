"""One rank of a job whose ranks somebody else started: torchrun, srun."""

from __future__ import annotations

import errno
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # no list of its exports
from torch.distributed.constants import default_pg_timeout

from scalewise.checkpoints import store
from scalewise.errors import ConfigError, Interrupted
from scalewise.launch import exit_reports, locks, rendezvous, signals
from scalewise.launch.job import (
    JobSpec,
    Result,
    begin_job,
    claim_locked,
    finish_job,
    locked_resume_checkpoint,
    prepare_job,
    wandb_facts,
    with_wandb_group,
)
from scalewise.launch.locks import InUseError
from scalewise.launch.outcomes import outcome_of_exception
from scalewise.launch.rank_entrypoint import LAUNCHER_LOST_WAIT_S
from scalewise.launch.rank_worker import run_attempt
from scalewise.launch.status import Outcome, Status
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import read_json


def run_external_rank(job_spec: JobSpec, folder: Path, *, is_retry: bool = False) -> Result:
    """Trains as this process's rank and returns how it ended; rank 0 writes the job's status.

    ``is_retry``: after an earlier attempt in the same folder, from its last checkpoint. Raises
    ``ConfigError`` where the job is refused, ``Interrupted`` for a signal before it has a folder.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != job_spec.run.world_size:
        raise ConfigError.for_key(
            "parallelism",
            job_spec.run.choices.get("parallelism", ""),
            f"is a layout of {job_spec.run.world_size} ranks; {world_size} were started",
        )
    with ExitStack() as locked:
        return _run_rank_job(job_spec, folder, rank, world_size, locked, is_retry=is_retry)


def _run_rank_job(
    job_spec: JobSpec,
    folder: Path,
    rank: int,
    world_size: int,
    exit_stack: ExitStack,
    *,
    is_retry: bool,
) -> Result:
    status, own, resume = None, folder, None
    if rank == 0:
        status, own, resume = _begin_job(job_spec, folder, exit_stack, is_retry)
    try:
        with signals.raise_on_signals("before training began"):
            own, resume = _broadcast_job(job_spec.run, own, resume)
            if own != folder:
                with suppress(OSError):
                    folder.rmdir()  # Hydra made one for each rank
            known = wandb_facts(job_spec, status, own, resume, status.attempts) if status else {}
            with signals.restore_handlers():
                outcome = run_attempt(with_wandb_group(job_spec, own, resume), own, resume, known)
    except Interrupted as error:
        outcome = Outcome("interrupted", str(error), None, (), error.signal_number)
    except Exception as error:  # whatever it is, the job has a status
        outcome = outcome_of_exception(error, rank)
        exit_reports.write_report(own, rank, outcome)
    if outcome.peer_failure and status:
        time.sleep(LAUNCHER_LOST_WAIT_S)  # until the others have left word
        outcome = exit_reports.lost_rank_reason(own, world_size) or outcome
    result = Result(outcome.status, outcome.reason, outcome.exit_code, own, {})
    if status is not None:
        result = finish_job(status, outcome, job_spec, status.attempts, own)
    if (outcome.exit_code == 0 or outcome.status == "interrupted") and dist.is_initialized():
        _wait_for_rank_0()
    return result


def _begin_job(
    job_spec: JobSpec, folder: Path, exit_stack: ExitStack, is_retry: bool
) -> tuple[Status, Path, Path | None]:
    steps = prepare_job(job_spec)
    if not is_retry:
        folder, resume = claim_locked(job_spec, folder, steps, exit_stack)
        return begin_job(job_spec, folder, resume), folder, resume
    with suppress(InUseError):  # of an attempt that Slurm has ended, on a node that is gone
        exit_stack.enter_context(locks.acquire_lock(folder))
    resume = store.newest_checkpoint(folder / "checkpoints")
    if resume is None:
        with locked_resume_checkpoint(job_spec, folder, steps) as resume:
            pass
    return begin_job(job_spec, folder, resume, read_json(folder / "status.json")), folder, resume


def _broadcast_job(run: RunConfig, folder: Path, resume: Path | None) -> tuple[Path, Path | None]:
    """Joins the other ranks, and returns what rank 0 has settled."""
    on_cuda = run.hardware.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        rendezvous.use_loopback()
    if (store := _connect_store()) is None:
        dist.init_process_group(backend)
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    settled: list[Any] = [folder, resume]
    dist.broadcast_object_list(settled)
    return settled[0], settled[1]


def _connect_store() -> TCPStore | None:
    """Returns the store at ``MASTER_ADDR``; rank 0 serves it, on that interface only.

    None where the launcher's agent serves it. A ``MASTER_ADDR`` that rank 0 cannot bind (the
    address of a proxy) is served on all interfaces, as torch does.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = default_pg_timeout
    if rank == 0:
        try:
            return rendezvous.store_server(address, port, world_size, timeout)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return TCPStore(address, port, world_size, rank == 0, timeout, wait_for_workers=False)


def _wait_for_rank_0() -> None:
    """Waits for rank 0, which has more to write: a launcher ends the others when one has ended."""
    with suppress(RuntimeError):  # whom a signal stopped while starting may be alone
        dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
