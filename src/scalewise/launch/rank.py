"""The start of a rank's process: light, so that whoever only starts ranks imports no Lightning."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from scalewise.run import Run

ORPHAN_GRACE = 10.0
"""Seconds in which a rank whose launcher has died may save itself, at the most."""


def work(run: Run, folder: Path, resume: Path | None, facts: dict[str, object]) -> None:
    """Trains as one of the ranks; the rank comes from the environment, as torchrun sets it.

    Leaves its word in ``folder`` and ends with its ending's exit code.
    """
    from scalewise.launch.worker import attempt

    _end_with(os.getppid(), min(run.launch.grace, ORPHAN_GRACE))
    ending = attempt(run, folder, resume, facts)
    if ending.status != "ok":
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads of a broken process group would hold the interpreter back.
        os._exit(ending.exit_code)


def _end_with(parent: int, grace: float) -> None:
    """Ends this process when its parent is gone: by SIGTERM, then without asking."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
