"""``scalewise publish PATH...``: sends runs and sweeps to Weights & Biases, with their report."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.failures import report_errors
from scalewise.tracking.run_files import read_json


def main(arguments: Sequence[str]) -> int:
    """Sends each folder given; returns 0, or 1 where something of them was not to be sent."""
    folders = _check_folders(arguments)
    from scalewise.reports.publication import ReportPublication
    from scalewise.tracking.wandb_api import WandbServer, wandb_environment

    entity, project = (os.environ.get(f"WANDB_{name}") for name in ("ENTITY", "PROJECT"))
    with wandb_environment():
        server = WandbServer()
        whole = [ReportPublication(server, folder, entity, project).publish() for folder in folders]
    return 0 if all(whole) else 1


def after_training(folder: Path, results: Iterable[Path]) -> None:
    """Publishes a run, job or sweep that was tracked online, from a process of its own.

    ``results`` are the folders of its jobs. What is not to be sent is said, and costs nothing else.
    """
    told = (read_json(result / "status.json").get("wandb", {}) for result in results)
    if any(facts.get("mode") == "online" for facts in told):
        sys.stdout.flush()
        with report_errors("not published"):
            subprocess.run(  # noqa: S603 (a list of our own words)
                [sys.executable, "-P", "-m", "scalewise", "publish", str(folder)],
                stdin=subprocess.DEVNULL,
                check=False,
            )


def _check_folders(arguments: Sequence[str]) -> list[Path]:
    if not arguments:
        raise ConfigError.for_key(
            "", "", "no folder given", "scalewise publish runs/NAME/TIMESTAMP"
        )
    folders = [Path(argument).expanduser().absolute() for argument in arguments]
    fix = "give one that holds a status.json or a sweep.json"
    issues = [
        ConfigIssue("", "", f"{argument} is no folder of a run or a sweep", fix)
        for argument, folder in zip(arguments, folders, strict=True)
        if not (read_json(folder / "sweep.json") or read_json(folder / "status.json"))
    ]
    if issues:
        raise ConfigError(issues)
    return list(dict.fromkeys(folders))
