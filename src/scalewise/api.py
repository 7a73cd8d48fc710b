"""The same doors from Python."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from scalewise.config.compose import changed_from_defaults, compose
from scalewise.failures import report_errors
from scalewise.launch import external_launcher
from scalewise.launch.job import JobSpec, Result, execute
from scalewise.run_config import RunConfig as Run
from scalewise.typed_override import command_line

__all__ = ["Result", "Run", "compose", "train"]


def train(run: Run, folder: Path | str | None = None) -> Result:
    """Trains ``run``, writes its report, and returns its outcome.

    Values of ``auto`` are resolved first. ``folder`` is where the run's files are written; None:
    ``runs/NAME/TIMESTAMP``. A failed run is a ``Result``, not an exception; data or a checkpoint
    that cannot be used raises ``ConfigError``. A run with several ranks starts processes: call it
    below ``if __name__ == "__main__":``.
    """
    from scalewise.commands.fit import resolve_auto
    from scalewise.commands.publish import after_training
    from scalewise.reports import files

    run, sizing = resolve_auto(run)
    if folder is None:
        folder = Path("runs") / run.name / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    command = command_line("train", run.overrides)
    order = JobSpec(
        run, command, changed=tuple(changed_from_defaults(run)), micro_batch_choice=sizing
    )
    result = execute(order, Path(folder).absolute())
    if external_launcher.is_leader():
        with report_errors("no report"):
            files.write_reports([result.folder])
        after_training(result.folder, [result.folder])
    return result
