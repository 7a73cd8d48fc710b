"""What one rank does: train, and leave word of how it ended."""

from __future__ import annotations

import os
from pathlib import Path

from scalewise import output
from scalewise.hardware import DeviceKind
from scalewise.launch import words
from scalewise.launch.classify import classify
from scalewise.launch.processes import limit_memory
from scalewise.launch.status import Ending
from scalewise.run import Run
from scalewise.tracking.files import FACTS, write_json
from scalewise.tracking.session import Session, open_session
from scalewise.training.fit import Place, fit
from scalewise.training.stopping import STOP


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
    words.reserve(folder, place.rank)
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
        ending = classify(error, place.rank).after_signal(STOP.received)
    words.leave(folder, place.rank, ending)
    session.finish(ending.status, ending.reason, ending.exit_code)
    return ending
