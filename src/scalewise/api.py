"""The same doors from Python."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from scalewise.config.compose import changed, compose
from scalewise.failures import survived
from scalewise.launch import started
from scalewise.launch.job import Order, Result, execute
from scalewise.run import Run
from scalewise.typed_override import command_line

__all__ = ["Result", "Run", "compose", "train"]


def train(run: Run, folder: Path | str | None = None) -> Result:
    """Trains ``run``, writes its report, and returns how it ended.

    What ``auto`` leaves open is chosen first. ``folder`` is where the run's files go; None:
    ``runs/NAME/TIMESTAMP``. A failure is a ``Result``, not an exception; data or a checkpoint that
    cannot be used raise ``ConfigError``. A run of several ranks starts processes, so call it below
    ``if __name__ == "__main__":``.
    """
    from scalewise.reports import files
    from scalewise.verbs.fit import fitted
    from scalewise.verbs.publish import after_training

    run, sizing = fitted(run)
    if folder is None:
        folder = Path("runs") / run.name / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    command = command_line("train", run.overrides)
    order = Order(run, command, changed=tuple(changed(run)), sizing=sizing)
    result = execute(order, Path(folder).absolute())
    if started.leads():
        with survived("no report"):
            files.write([result.folder])
        after_training(result.folder, [result.folder])
    return result
