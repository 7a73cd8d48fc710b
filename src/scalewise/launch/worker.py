"""What one rank does: train, and leave word of how it ended."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch

from scalewise import output
from scalewise.errors import ConfigError, Interrupted, ScalewiseError
from scalewise.hardware import DeviceKind
from scalewise.launch import words
from scalewise.launch.processes import limit_memory
from scalewise.launch.status import Ending
from scalewise.redaction import redacted
from scalewise.run import Run
from scalewise.tracking.files import FACTS, write_json
from scalewise.tracking.session import Session, open_session
from scalewise.training.callbacks.pruning import Pruned
from scalewise.training.fit import Place, fit
from scalewise.training.stopping import STOP

LOG_LINES = 12
LOST_RANK = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",
)
"""What gloo and NCCL say when a rank at the other end is gone."""


def attempt(run: Run, folder: Path, resume: Path | None, facts: dict[str, object] | None) -> Ending:
    """Returns how training in this process ended; never raises.

    ``facts``: what W&B is told; None: there is no tracking.
    """
    with output.shielded():
        return _attempt(run, folder, resume, facts)


def _attempt(
    run: Run, folder: Path, resume: Path | None, facts: dict[str, object] | None
) -> Ending:
    place = Place(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    session = Session()
    STOP.begin(alone="RANK" not in os.environ)
    try:
        if place.rank == 0 and facts is not None and run.tracking.tracks:
            session = open_session(run, folder, facts)
            (folder / FACTS).parent.mkdir(exist_ok=True)
            write_json(folder / FACTS, session.facts)
        if run.hardware.device is not DeviceKind.cuda:  # CUDA maps all that the devices have
            limit_memory(run.launch.memory_limit_gib)  # after W&B started a process of its own
        fit(run, folder, place, resume, session)
        ending = Ending("ok")
    except BaseException as error:
        ending = classify(error, place.rank)
    words.leave(folder, place.rank, ending)
    session.finish(ending.status, ending.reason, ending.exit_code)
    return ending


def classify(error: BaseException, rank: int) -> Ending:
    """Returns the ending that an exception stands for."""
    reason = redacted(" ".join(str(error).split())) or type(error).__name__
    said = redacted("".join(traceback.format_exception(error)))
    tail = tuple(said.splitlines()[-LOG_LINES:])
    if isinstance(error, Interrupted):
        return Ending("interrupted", reason, rank, (), error.signal_number)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", "SIGINT before the first step", rank, (), 2)
    if isinstance(error, Pruned):
        return Ending("pruned", reason, rank)
    if isinstance(error, ConfigError):
        return Ending("refused", "; ".join(str(c) for c in error.complaints), rank)
    if ran_out_of_memory(error):
        return Ending("out_of_memory", reason, rank, tail)
    if isinstance(error, ScalewiseError):
        return Ending("failed", reason, rank)
    bereft = isinstance(error, RuntimeError) and any(sign in reason for sign in LOST_RANK)
    reason = "lost contact with another rank" if bereft else f"{type(error).__name__}: {reason}"
    return Ending("failed", reason, rank, tail, bereft=bereft)


def ran_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that the device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "out of memory", "cannot allocate memory")
    return isinstance(error, RuntimeError | OSError) and any(
        sign in str(error).lower() for sign in signs
    )
