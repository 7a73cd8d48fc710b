"""``scalewise publish FOLDER...``: send runs, sweeps and their reports to Weights & Biases."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from scalewise import regular_files
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.failures import report_errors
from scalewise.run_files import read_json


def main(arguments: Sequence[str]) -> int:
    """Publish each folder; exit code 1 if something could not be sent."""
    folders = _check_folders(arguments)
    from scalewise.reports.publication import ReportPublication
    from scalewise.tracking.wandb_api import WandbServer, wandb_environment

    entity, project = (os.environ.get(f"WANDB_{name}") for name in ("ENTITY", "PROJECT"))
    with wandb_environment():
        server = WandbServer()
        published = [
            ReportPublication(server, folder, entity, project).publish() for folder in folders
        ]
    return 0 if all(published) else 1


def after_training(folder: Path, results: Iterable[Path]) -> None:
    """Publish a run, job or sweep that was tracked online, in a separate process.

    Failures are printed and do not affect the exit code.

    Args:
        folder: Folder of the run, job or sweep.
        results: Run folders of its jobs.
    """
    sessions = (read_json(result / "status.json").get("wandb", {}) for result in results)
    if any(session.get("mode") == "online" for session in sessions):
        sys.stdout.flush()
        with report_errors("not published"):
            subprocess.run(  # noqa: S603 (a list without user input)
                [sys.executable, "-P", "-m", "scalewise", "publish", str(folder)],
                stdin=subprocess.DEVNULL,
                check=False,
            )


def _check_folders(arguments: Sequence[str]) -> list[Path]:
    if not arguments:
        raise ConfigError.for_key(
            "", "", "no folder given", "scalewise publish runs/NAME/TIMESTAMP"
        )
    folders = [regular_files.expand_home(argument).absolute() for argument in arguments]
    fix = "name a folder with a status.json or a sweep.json"
    issues = [
        ConfigIssue("", "", f"{argument} is not a folder of a run or a sweep", fix)
        for argument, folder in zip(arguments, folders, strict=True)
        if not (read_json(folder / "sweep.json") or read_json(folder / "status.json"))
    ]
    if issues:
        raise ConfigError(issues)
    return list(dict.fromkeys(folders))
