"""Python API: ``compose`` and ``train``."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from scalewise import console
from scalewise.commands.auto_resolution import resolve_auto
from scalewise.commands.publish import after_training
from scalewise.config.compose import changed_from_defaults, compose
from scalewise.failures import report_errors
from scalewise.launch import external_launcher
from scalewise.launch.job import JobSpec, Result, execute
from scalewise.run_config import RunConfig as Run
from scalewise.typed_override import command_line

__all__ = ["Result", "Run", "compose", "train"]


def train(run: Run, folder: Path | str | None = None) -> Result:
    """Train a run, write its report and return its result.

    Values of ``auto`` are resolved first. A failed run returns a ``Result`` and raises no
    exception. A run with several ranks starts processes: call this function below
    ``if __name__ == "__main__":``.

    Args:
        run: Run to train.
        folder: Run folder; None: ``runs/NAME/TIMESTAMP``.

    Raises:
        ConfigError: The data or the checkpoint cannot be used.
    """
    with console.shield_streams():
        run, sizing = resolve_auto(run)
        if folder is None:
            folder = Path("runs") / run.name / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
        command = command_line("train", run.overrides)
        job_spec = JobSpec(
            run, command, changed=tuple(changed_from_defaults(run)), micro_batch_choice=sizing
        )
        result = execute(job_spec, Path(folder).absolute())
        if external_launcher.is_leader():
            # Here: ranks import the caller's script, and so this module, but draw no charts.
            from scalewise.reports import html_report

            with report_errors("no report"):
                html_report.write_reports([result.folder])
            after_training(result.folder, [result.folder])
        return result
