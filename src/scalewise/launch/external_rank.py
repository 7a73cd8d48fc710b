"""Rank of a job whose ranks an external launcher started: torchrun, srun."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # no list of its exports
from torch.distributed.constants import default_pg_timeout

from scalewise.checkpoints import manifest
from scalewise.errors import ConfigError, Interrupted
from scalewise.hardware import DeviceKind
from scalewise.launch import exit_reports, flight_recorder, locks, rendezvous, signals
from scalewise.launch.elastic import LAUNCHER_LOST_WAIT_S, PEER_GRACE
from scalewise.launch.job import (
    ExternalRank,
    JobSpec,
    Result,
    begin_job,
    claim_locked,
    finish_job,
    locked_resume_checkpoint,
    prepare_job,
    run_external_rank,
    wandb_metadata,
    with_wandb_group,
)
from scalewise.launch.locks import InUseError
from scalewise.launch.outcomes import Outcome, outcome_of_exception
from scalewise.launch.rank_worker import run_attempt
from scalewise.launch.status_file import Status
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json

FAILURE_POLL_S = 1.0
"""Interval at which rank 0 looks for exit reports of failed ranks, in seconds."""


@run_external_rank.register(ExternalRank)
def _run_external_rank(external_rank: ExternalRank, job_spec: JobSpec, folder: Path) -> Result:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != job_spec.run.world_size:
        raise ConfigError.for_key(
            "parallelism",
            job_spec.run.option("parallelism"),
            f"requires {job_spec.run.world_size} ranks; {world_size} were started",
        )
    with ExitStack() as exit_stack:
        return _run_rank_job(
            job_spec, folder, rank, world_size, exit_stack, is_retry=external_rank.is_retry
        )


def _run_rank_job(
    job_spec: JobSpec,
    folder: Path,
    rank: int,
    world_size: int,
    exit_stack: ExitStack,
    *,
    is_retry: bool,
) -> Result:
    status, run_folder, resume = None, folder, None
    if rank == 0:
        status, run_folder, resume = _begin_job(job_spec, folder, exit_stack, is_retry)
    try:
        with signals.raise_on_signals("before training began"):
            run_folder, resume = _broadcast_job(job_spec.run, run_folder, resume)
            exit_reports.dump_stacks_on_crash(run_folder, rank)
            flight_recorder.enable_recorder(run_folder, os.environ)
            if status is not None:
                exit_stack.enter_context(_exit_after_failure(status, job_spec, run_folder))
            if run_folder != folder:
                with suppress(OSError):
                    folder.rmdir()  # Hydra creates one for each rank
            metadata = (
                wandb_metadata(job_spec, status, run_folder, resume, status.attempts)
                if status
                else {}
            )
            with signals.restore_handlers():
                outcome = run_attempt(
                    with_wandb_group(job_spec, run_folder, resume), run_folder, resume, metadata
                )
    except Interrupted as error:
        outcome = Outcome("interrupted", str(error), None, (), error.signal_number)
    except Exception as error:  # every exception becomes a status
        outcome = outcome_of_exception(error, rank)
        exit_reports.write_report(run_folder, rank, outcome)
    if outcome.peer_failure and status:
        time.sleep(LAUNCHER_LOST_WAIT_S)  # for the exit reports of the other ranks
        outcome = exit_reports.lost_rank_reason(run_folder, world_size) or outcome
    result = Result(outcome.status, outcome.reason, outcome.exit_code, run_folder, {})
    if status is not None:
        result = finish_job(status, outcome, job_spec, status.attempts, run_folder)
    if (outcome.exit_code == 0 or outcome.status == "interrupted") and dist.is_initialized():
        _wait_for_rank_0()
    return result


@contextmanager
def _exit_after_failure(status: Status, job_spec: JobSpec, folder: Path) -> Iterator[None]:
    """Write the status and exit, in a thread of rank 0, if it does not notice another failure.

    The launcher cannot end a rank that waits in a collective of a device by SIGTERM.
    """
    is_over = threading.Event()

    def watch() -> None:
        while (failure := exit_reports.first_failure(folder)) is None:
            if is_over.wait(FAILURE_POLL_S):
                return
        if is_over.wait(PEER_GRACE):
            return
        reported_ranks = {outcome.rank for outcome in exit_reports.read_reports(folder)}
        if reported_ranks and 0 not in reported_ranks:  # empty: the status is written
            result = finish_job(status, failure, job_spec, status.attempts, folder)
            os._exit(result.exit_code)

    threading.Thread(target=watch, daemon=True, name="failure-watch").start()
    try:
        yield
    finally:
        is_over.set()


def _begin_job(
    job_spec: JobSpec, folder: Path, exit_stack: ExitStack, is_retry: bool
) -> tuple[Status, Path, Path | None]:
    steps = prepare_job(job_spec)
    if not is_retry:
        folder, resume = claim_locked(job_spec, folder, steps, exit_stack)
        return begin_job(job_spec, folder, resume), folder, resume
    with suppress(InUseError):  # a lost node may still hold the lock of the previous attempt
        exit_stack.enter_context(locks.acquire_lock(folder))
    resume = manifest.newest_checkpoint(folder / "checkpoints")
    if resume is None:
        with locked_resume_checkpoint(job_spec, folder, steps) as resume:
            pass
    return begin_job(job_spec, folder, resume, read_json(folder / "status.json")), folder, resume


def _broadcast_job(run: RunConfig, folder: Path, resume: Path | None) -> tuple[Path, Path | None]:
    """Initialize the process group; return the folder and checkpoint that rank 0 selected."""
    device = None
    if run.hardware.device is DeviceKind.cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        rendezvous.use_loopback()
    # Lightning passes both too, but to no group that exists.
    options: dict[str, Any] = {
        "device_id": device,
        "timeout": timedelta(seconds=run.launch.collective_timeout),
    }
    if (store := _connect_store()) is not None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        options |= {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device else "gloo", **options)
    values: list[Any] = [folder, resume]
    dist.broadcast_object_list(values)
    return values[0], values[1]


def _connect_store() -> TCPStore | None:
    """TCPStore at ``MASTER_ADDR``; rank 0 serves it on that interface only.

    None if the launcher's agent serves it. If rank 0 cannot bind ``MASTER_ADDR`` (the address of a
    proxy), the store listens on all interfaces, as in torch.
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
    """Wait until rank 0 has written its files, as launchers end all ranks when one exits."""
    with suppress(RuntimeError):  # other ranks may have ended by a signal during startup
        dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
