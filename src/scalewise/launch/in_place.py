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
from scalewise.launch import locks, one_node, signals, words
from scalewise.launch.classify import classify
from scalewise.launch.job import (
    Order,
    Result,
    begin,
    checked,
    claim_locked,
    end,
    facts,
    resumed_checkpoint,
    tracked,
)
from scalewise.launch.locks import InUseError
from scalewise.launch.rank import BEREFT_WAIT
from scalewise.launch.status import Ending, Status
from scalewise.launch.worker import attempt
from scalewise.run import Run
from scalewise.tracking.files import read_json


def run_rank(order: Order, folder: Path, *, again: bool = False) -> Result:
    """Trains as this process's rank and returns how it ended; rank 0 writes the job's status.

    ``again``: after an earlier attempt in the same folder, from its last checkpoint. Raises
    ``ConfigError`` where the job is refused, ``Interrupted`` for a signal before it has a folder.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != order.run.world_size:
        raise ConfigError.one(
            "parallelism",
            order.run.choices.get("parallelism", ""),
            f"is a layout of {order.run.world_size} ranks; {world_size} were started",
        )
    with ExitStack() as locked:
        return _run_rank(order, folder, rank, world_size, locked, again=again)


def _run_rank(
    order: Order, folder: Path, rank: int, world_size: int, locked: ExitStack, *, again: bool
) -> Result:
    status, own, resume = None, folder, None
    if rank == 0:
        status, own, resume = _begun(order, folder, locked, again)
    try:
        with signals.raised("before training began"):
            own, resume = _agreed(order.run, own, resume)
            if own != folder:
                with suppress(OSError):
                    folder.rmdir()  # Hydra made one for each rank
            known = facts(order, status, own, resume, status.attempts) if status else {}
            with signals.kept():
                ending = attempt(tracked(order, own, resume), own, resume, known)
    except Interrupted as error:
        ending = Ending("interrupted", str(error), None, (), error.signal_number)
    except Exception as error:  # whatever it is, the job has a status
        ending = classify(error, rank)
        words.leave(own, rank, ending)
    if ending.bereft and status:
        time.sleep(BEREFT_WAIT)  # until the others have left word
        ending = words.cause(own, world_size) or ending
    result = Result(ending.status, ending.reason, ending.exit_code, own, {})
    if status is not None:
        result = end(status, ending, order, status.attempts, own)
    if (ending.exit_code == 0 or ending.status == "interrupted") and dist.is_initialized():
        _leave_together()
    return result


def _begun(
    order: Order, folder: Path, locked: ExitStack, again: bool
) -> tuple[Status, Path, Path | None]:
    steps = checked(order)
    if not again:
        folder, resume = claim_locked(order, folder, steps, locked)
        return begin(order, folder, resume), folder, resume
    with suppress(InUseError):  # of an attempt that Slurm has ended, on a node that is gone
        locked.enter_context(locks.acquire(folder))
    resume = store.latest(folder / "checkpoints")
    if resume is None:
        with resumed_checkpoint(order, folder, steps) as resume:
            pass
    return begin(order, folder, resume, read_json(folder / "status.json")), folder, resume


def _agreed(run: Run, folder: Path, resume: Path | None) -> tuple[Path, Path | None]:
    """Joins the other ranks, and returns what rank 0 has settled."""
    on_cuda = run.hardware.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        one_node.use_loopback()
    if (store := _store()) is None:
        dist.init_process_group(backend)
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    settled: list[Any] = [folder, resume]
    dist.broadcast_object_list(settled)
    return settled[0], settled[1]


def _store() -> TCPStore | None:
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
            return one_node.store_server(address, port, world_size, timeout)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return TCPStore(address, port, world_size, rank == 0, timeout, wait_for_workers=False)


def _leave_together() -> None:
    """Waits for rank 0, which has more to write: a launcher ends the others when one has ended."""
    with suppress(RuntimeError):  # whom a signal stopped while starting may be alone
        dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
