"""How a job stands or ended, as data: ``status.json``."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scalewise import atomic
from scalewise.errors import EXIT_CODES
from scalewise.failures import report_errors
from scalewise.hardware import this_machine
from scalewise.launch import oom_suggestions
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import FACTS, read_json, write_json

RESERVED_BYTES = 49152
"""Bytes reserved for what the end of a job adds to its status: reason, log tail, overrides."""
VERSIONS = ("scalewise", "torch", "lightning", "hydra-core", "wandb", "peft")


@dataclass(frozen=True)
class Outcome:
    """How a job, or one attempt at it, ended."""

    status: str
    """ok, pruned, failed, out_of_memory, timeout, interrupted or refused."""
    reason: str = ""
    rank: int | None = None
    """The rank it began with, where one is known."""
    log_tail: tuple[str, ...] = ()
    """The last lines that rank wrote about it."""
    signal_number: int = 0
    peer_failure: bool = False
    """Whether the rank ended only because it lost another, which is the cause."""

    def after_signal(self, signal_number: int) -> Outcome:
        """Returns how a job ended whose process had received a signal; 0: none.

        What fails then mostly fails by the signal: a compiler in the same process group ends too.
        """
        if not signal_number or self.status in ("ok", "pruned", "interrupted"):
            return self
        reason = f"{signal.Signals(signal_number).name}, then {self.reason}"
        return replace(self, status="interrupted", reason=reason, signal_number=signal_number)

    @property
    def exit_code(self) -> int:
        """Returns the process exit code of this ending."""
        if self.status == "interrupted":
            return 128 + self.signal_number
        return EXIT_CODES[self.status]


@dataclass(frozen=True)
class Status:
    """The content of ``status.json``."""

    verb: str
    name: str
    question: str
    command: str
    choices: Mapping[str, str]
    overrides: tuple[str, ...]
    varied: Mapping[str, str]
    changed: tuple[Mapping[str, object], ...]
    world_size: int
    config_hash: str
    started: str
    status: str = "running"
    reason: str = ""
    exit_code: int | None = None
    ended: str | None = None
    seconds: float = 0.0
    attempts: int = 1
    rank: int | None = None
    log_tail: tuple[str, ...] = ()
    cures: tuple[Mapping[str, str], ...] = ()
    resumed_from: str | None = None
    micro_batch: Mapping[str, object] = field(default_factory=dict)
    """How ``trainer.micro_batch=auto`` was settled."""
    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    machine: Mapping[str, object] = field(default_factory=lambda: machine_facts())
    versions: Mapping[str, str] = field(default_factory=lambda: versions())
    git_commit: str | None = None
    git_dirty: bool | None = None
    wandb: Mapping[str, object] = field(
        default_factory=lambda: {"mode": "disabled", "url": None, "folder": None}
    )

    def with_outcome(self, outcome: Outcome, run: RunConfig, attempts: int, folder: Path) -> Status:
        """Returns the status of a job that ended so."""
        end = datetime.now(UTC)
        begun = datetime.fromisoformat(self.started)
        return replace(
            self,
            status=outcome.status,
            reason=outcome.reason,
            exit_code=outcome.exit_code,
            ended=end.isoformat(timespec="milliseconds"),
            seconds=round((end - begun).total_seconds(), 3),
            attempts=attempts,
            rank=outcome.rank,
            log_tail=outcome.log_tail,
            cures=_suggestions(outcome, run, folder),
            wandb=read_json(folder / FACTS) or self.wandb,
        )

    def write(self, folder: Path) -> None:
        """Writes ``status.json``, whole or not at all."""
        write_json(folder / "status.json", asdict(self))

    def reserve(self, folder: Path) -> None:
        """Reserves disk space for the status that the job will end with.

        Raises ``OSError`` where that is not free.
        """
        atomic.reserve_space(
            folder / "status.json", RESERVED_BYTES + 2 * len(json.dumps(asdict(self)))
        )


def _suggestions(outcome: Outcome, run: RunConfig, folder: Path) -> tuple[dict[str, str], ...]:
    with report_errors("no override is suggested"):
        return tuple(suggested_overrides(outcome, run, has_checkpoint=_saved_bytes(folder)))
    return ()


def _saved_bytes(folder: Path) -> bool:
    return any(folder.glob("checkpoints/step-*"))  # a checkpoint gets its name when it is whole


def suggested_overrides(
    outcome: Outcome, run: RunConfig, *, has_checkpoint: bool
) -> list[dict[str, str]]:
    """Returns overrides that may mend a failure, each with why.

    ``has_checkpoint``: the run left a checkpoint.
    """
    found: list[tuple[str, str]] = []
    if outcome.status == "out_of_memory":
        found += oom_suggestions.oom_suggestions(run)
        if run.launch.memory_limit_gib is not None:
            found.append(("launch.memory_limit_gib=null", "Lifts the limit set for this job."))
    elif outcome.status == "timeout" and run.launch.timeout is not None:
        longer = f"launch.timeout={run.launch.timeout * 2:g}"
        found.append((longer, "Twice the time, if it was slow and not stuck."))
        if run.checkpoint.every is None:
            found.append(("checkpoint.every=100", "Leaves something to resume from."))
    elif "lower optimizer.lr" in outcome.reason and not run.objective.is_user_defined:
        lr = getattr(run.optimizer, "lr", 0.0)
        found.append((f"optimizer.lr={lr / 3:.1g}", "A third of the learning rate."))
    elif outcome.status == "interrupted" and has_checkpoint:
        found.append(("resume=last", "Goes on from the newest checkpoint."))
    return [{"override": override, "why": why} for override, why in found]


def machine_facts() -> dict[str, object]:
    """Returns what the present machine is, for a report."""
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
    """Returns the versions of Python and of the packages that shape a run."""
    found = {"python": platform.python_version()}
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def git_state() -> dict[str, Any]:
    """Returns ``git_commit`` and ``git_dirty`` of the working folder; None where there is none.

    A repository may name a program to run as ``core.fsmonitor``; it is not run.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(  # noqa: S603 (a list of our own words)
                ["git", "-c", "core.fsmonitor=", *arguments],  # noqa: S607 (the git on the PATH is meant)
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}
