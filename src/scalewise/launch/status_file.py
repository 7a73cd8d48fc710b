"""Job status: ``status.json``."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scalewise import atomic
from scalewise.failures import report_errors
from scalewise.hardware import this_machine
from scalewise.launch.outcomes import Outcome
from scalewise.launch.suggested_overrides import suggested_overrides
from scalewise.run_config import RunConfig
from scalewise.run_files import WANDB_FACTS, read_json, write_json

RESERVED_BYTES = 49152
"""Disk space reserved for the final status, in bytes: reason, log tail and suggested fixes."""
RECORDED_PACKAGES = ("scalewise", "torch", "lightning", "hydra-core", "wandb", "peft")


@dataclass(frozen=True)
class Status:
    """Content of ``status.json``."""

    verb: str
    """Name of the command."""
    name: str
    """Name of the run."""
    question: str
    """Question that the run answers."""
    command: str
    """Command line."""
    choices: Mapping[str, str]
    """Selected option of each config group."""
    overrides: tuple[str, ...]
    """Overrides of the run."""
    varied: Mapping[str, str]
    """Overrides by key that differ between the jobs of the sweep."""
    changed: tuple[Mapping[str, object], ...]
    """Differences from the config of an earlier run."""
    world_size: int
    """Number of ranks."""
    config_hash: str
    """Config hash."""
    started: str
    """Start time, in ISO format."""
    status: str = "running"
    """``running``, or the status of the outcome."""
    reason: str = ""
    """Reason of the status."""
    exit_code: int | None = None
    """Exit code; None while running."""
    ended: str | None = None
    """End time, in ISO format; None while running."""
    seconds: float = 0.0
    """Duration, in seconds."""
    attempts: int = 1
    """Number of attempts."""
    rank: int | None = None
    """Rank that failed first, if known."""
    log_tail: tuple[str, ...] = ()
    """Last lines of the traceback of that rank."""
    cures: tuple[Mapping[str, str], ...] = ()
    """Suggested fixes, with ``override`` and ``why``."""
    resumed_from: str | None = None
    """Checkpoint that the run resumed from; None: from scratch."""
    micro_batch: Mapping[str, object] = field(default_factory=dict)
    """How ``trainer.micro_batch=auto`` was resolved; empty if it is a number."""
    process: int = field(default_factory=os.getpid)
    """Process ID of the launcher."""
    host: str = field(default_factory=socket.gethostname)
    """Host name."""
    machine: Mapping[str, object] = field(default_factory=lambda: machine_facts())
    """Devices, processor, memory and system."""
    versions: Mapping[str, str] = field(default_factory=lambda: versions())
    """Versions of Python and packages."""
    git_commit: str | None = None
    """Commit of the working folder; None without git."""
    git_dirty: bool | None = None
    """Whether tracked files have changes; None without git."""
    wandb: Mapping[str, object] = field(
        default_factory=lambda: {"mode": "disabled", "url": None, "folder": None}
    )
    """Mode, URL, folder and group of the W&B run."""

    def with_outcome(self, outcome: Outcome, run: RunConfig, attempts: int, folder: Path) -> Status:
        """Status of the job after it has ended."""
        end = datetime.now(UTC)
        start = datetime.fromisoformat(self.started)
        return replace(
            self,
            status=outcome.status,
            reason=outcome.reason,
            exit_code=outcome.exit_code,
            ended=end.isoformat(timespec="milliseconds"),
            seconds=round((end - start).total_seconds(), 3),
            attempts=attempts,
            rank=outcome.rank,
            log_tail=outcome.log_tail,
            cures=_suggestions(outcome, run, folder),
            wandb=read_json(folder / WANDB_FACTS) or self.wandb,
        )

    def write(self, folder: Path) -> None:
        """Write ``status.json`` atomically."""
        write_json(folder / "status.json", asdict(self))

    def reserve(self, folder: Path) -> None:
        """Reserve disk space for the final status.

        Raises ``OSError`` if it is not free.
        """
        atomic.reserve_space(
            folder / "status.json", RESERVED_BYTES + 2 * len(json.dumps(asdict(self)))
        )


def _suggestions(outcome: Outcome, run: RunConfig, folder: Path) -> tuple[dict[str, str], ...]:
    with report_errors("no override is suggested"):
        return tuple(suggested_overrides(outcome, run, has_checkpoint=_has_checkpoint(folder)))
    return ()


def _has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("checkpoints/step-*"))  # an incomplete checkpoint has another name


def machine_facts() -> dict[str, object]:
    """Description of this machine for reports."""
    machine = this_machine()
    return {
        "device": machine.gpus[0] if machine.gpus else "cpu",
        "devices": len(machine.gpus),
        "processor": machine.processor,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect a run."""
    versions_by_package = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            versions_by_package[package] = version(package)
        except PackageNotFoundError:
            versions_by_package[package] = "absent"
    return versions_by_package


def git_state() -> dict[str, Any]:
    """``git_commit`` and ``git_dirty`` of the working folder; None without a repository.

    Does not run the program that a repository may set as ``core.fsmonitor``.
    """

    def git(*arguments: str) -> str | None:
        try:
            process = subprocess.run(  # noqa: S603 (fixed arguments)
                ["git", "-c", "core.fsmonitor=", *arguments],  # noqa: S607 (git of the PATH)
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return process.stdout.strip()

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}
