"""Sends what a run's folder holds and Weights & Biases lacks: rows, endings, files, artifacts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from scalewise import regular_files
from scalewise.adapters.target_modules import is_adapter_weight, module_name
from scalewise.errors import ScalewiseError
from scalewise.tracking import tables
from scalewise.tracking.config import ArtifactsKind
from scalewise.tracking.run_files import (
    FACTS,
    read_json,
    read_metrics,
    read_yaml,
    write_json,
)
from scalewise.tracking.wandb_api import WandbServer
from scalewise.tracking.wandb_session import Row, average_window, predicted_metrics, summary_metrics

MARKER = "wandb/published.json"
"""What was sent of a run's folder, and where to."""
FILES = (
    "resolved.yaml",
    "overrides.txt",
    "status.json",
    "plan.json",
    "summary.json",
    "metrics.csv",
    "report.html",
)
"""Files of a run's folder that become files of the W&B run."""

FINISH_WAIT = 60.0
"""Seconds that small files may take."""
SLOWEST = 2e6
"""Bytes/s at which an artifact is given up."""


@dataclass(frozen=True)
class SyncedRun:
    """A run as its folder tells of it."""

    folder: Path
    status: Mapping[str, Any]

    @classmethod
    def from_folder(cls, folder: Path) -> SyncedRun:
        """Returns what ``status.json`` tells; raises ``ScalewiseError`` where it is unreadable."""
        status = read_json(folder / "status.json")
        if not status:
            raise ScalewiseError("it has no readable status.json")
        return cls(folder, status)

    @cached_property
    def wandb(self) -> dict[str, Any]:
        """Returns the facts of its newest W&B run; a run that was killed left them elsewhere."""
        ended: dict[str, Any] = self.status.get("wandb", {})
        return ended if ended.get("id") else read_json(self.folder / FACTS)

    @property
    def outcome(self) -> tuple[str, str, int]:
        """Returns status, reason and exit code; of a run whose process is gone, those of that."""
        exit_code = self.status.get("exit_code")
        if exit_code is None:
            return "failed", "its process is gone, and left no word of how it ended", 1
        status, reason = (self.status.get(key, "") for key in ("status", "reason"))
        return status, reason, exit_code

    @cached_property
    def logs(self) -> list[Path]:
        """Returns the transaction logs of its attempts, the oldest first."""
        found = {path.resolve() for path in self.folder.glob("wandb/*run-*/run-*.wandb")}
        named = self.wandb.get("folder")  # WANDB_DIR may have put it elsewhere
        if named:
            found |= {path.resolve() for path in Path(named).glob("run-*.wandb")}
        return sorted(found, key=lambda path: path.parent.name.removeprefix("offline-"))

    @cached_property
    def tracking(self) -> Mapping[str, Any]:
        """Returns the ``tracking`` part of its configuration."""
        group: Mapping[str, Any] = self._resolved_config.get("tracking", {})
        return group

    @property
    def fully_trained_patterns(self) -> list[str]:
        """Returns the patterns of modules that were trained whole beside an adapter."""
        patterns = self._resolved_config.get("adapter", {}).get("trained")
        return [str(pattern) for pattern in patterns] if isinstance(patterns, list) else []

    @cached_property
    def window(self) -> int:
        """Returns how many steps a row of W&B stands for."""
        steps = self._resolved_config.get("trainer", {}).get("log_every")
        return steps if isinstance(steps, int) and steps > 0 else 1

    @property
    def first_step(self) -> int:
        """Returns the step that it went on from."""
        step = re.search(r"step-(\d+)$", self.wandb.get("resumed_from") or "")
        return int(step[1]) if step else 0

    @cached_property
    def _resolved_config(self) -> Mapping[str, Any]:
        return read_yaml(self.folder / "resolved.yaml")


def deliver_run(server: WandbServer, synced_run: SyncedRun, entity: str, project: str) -> Any:
    """Returns the newest W&B run of a folder as the server has it, its attempts being sent.

    What the server has something of is not sent again. Raises ``ScalewiseError``.
    """
    for log in synced_run.logs:
        run_id = log.stem.removeprefix("run-")
        path = f"{entity}/{project}/{run_id}"
        if server.find_run(path) is None:
            if read_json(synced_run.folder / MARKER).get("path") == f"{server.url}/{path}":
                raise ScalewiseError("it was sent before and is not there any more: deleted?")
            server.sync_log(log, entity, project)
    found = server.find_run(f"{entity}/{project}/{synced_run.wandb['id']}")
    if found is None:
        raise ScalewiseError("the server did not take it; try again later")
    return found


def send_missing(server: WandbServer, synced_run: SyncedRun, wandb_run: Any) -> int:
    """Sends what the run ``wandb_run`` lacks of its folder; returns the rows that it lacked.

    Those are rows, how it ended, an alert where it ended badly while online, files and artifacts.
    Nothing is opened where nothing has changed since the last time. Raises ``ScalewiseError``.
    """
    entity, project, run_id = wandb_run.path
    files = {name: _file_digest(synced_run.folder / name) for name in _files_to_send(synced_run)}
    marker = {"path": f"{server.url}/{entity}/{project}/{run_id}", "files": files}
    rest = _missing_rows(synced_run, wandb_run)
    before = read_json(synced_run.folder / MARKER)
    alerted = before.get("path") == marker["path"]
    there = before.get("files", {}) if alerted else {}
    if before == marker and not rest and wandb_run.state != "running":
        return 0
    artifacts = list(_iter_artifacts(synced_run, run_id))
    wait = FINISH_WAIT + sum(size for _, _, size in artifacts) / SLOWEST
    exit_code = synced_run.outcome[2]
    with server.reopen_run(entity, project, run_id, exit_code=exit_code, timeout=wait) as run:
        for row in rest:
            run.log(row)
        _write_outcome(run, synced_run)
        if not alerted and exit_code and synced_run.wandb.get("mode") == "online":
            _send_alert(run, synced_run)
        if artifacts and (used := _origin_artifact(server, synced_run, entity, project)):
            run.use_artifact(used)
        for artifact, aliases, _ in artifacts:
            run.log_artifact(artifact, aliases=aliases)
    write_json(synced_run.folder / MARKER, {**marker, "files": there})  # the alert is not for twice
    names = [f"{entity}/{project}/{artifact.name}:{alias[-1]}" for artifact, alias, _ in artifacts]
    server.upload_files(
        wandb_run, synced_run.folder, [n for n in files if files[n] != there.get(n)]
    )
    _verify_arrival(server, synced_run, "/".join(wandb_run.path), names)
    write_json(synced_run.folder / MARKER, marker)
    return len(rest)


def _verify_arrival(
    server: WandbServer, synced_run: SyncedRun, path: str, artifacts: list[str]
) -> None:
    """Asks whether all arrived: the client ends well even where the server took nothing."""
    found = server.find_run(path)
    lacking = [name for name in artifacts if not server.has_artifact(name)]
    if found is None or found.state == "running" or lacking or _missing_rows(synced_run, found):
        raise ScalewiseError("not all of it arrived; try again later")


def _missing_rows(synced_run: SyncedRun, wandb_run: Any) -> list[Row]:
    """Returns the rows that a run lacks at the server, in windows as training sends them."""
    after = max(int(wandb_run.summary.get("step") or 0), synced_run.first_step)
    rows = [
        r for r in read_metrics(synced_run.folder / "metrics.csv") if cast(int, r["step"]) > after
    ]
    windows: list[list[Row]] = [[]]
    for row in rows:
        windows[-1].append(row)
        if cast(int, row["step"]) % synced_run.window == 0 or row.get("val/loss") is not None:
            windows.append([])
    return [average_window(window) for window in windows if window]


def _write_outcome(wandb_run: Any, synced_run: SyncedRun) -> None:
    """Writes into the summary how the run ended, and what was foreseen beside what was measured."""
    plan, summary = (read_json(synced_run.folder / name) for name in ("plan.json", "summary.json"))
    status, reason, _ = synced_run.outcome
    wandb_run.summary.update({**predicted_metrics(plan), "status": status, "reason": reason})
    metrics = summary.get("metrics", {})
    if metrics:
        wandb_run.summary.update(summary_metrics(summary))
    named = {**tables.predicted_tables(plan), **tables.measured_table(plan, metrics)}
    wandb_run.summary.update({key: _to_media(table) for key, table in named.items()})


def _to_media(table: tables.TextTable) -> Any:
    import wandb

    return wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])


def _send_alert(wandb_run: Any, synced_run: SyncedRun) -> None:
    status, reason, _ = synced_run.outcome
    level = "WARN" if status == "interrupted" else "ERROR"
    text = f"{reason}\n\n{synced_run.status.get('command')}\n{synced_run.folder}"
    wandb_run.alert(f"{status}: {synced_run.status.get('name')}"[:63], text, level=level)


def _files_to_send(synced_run: SyncedRun) -> list[str]:
    if synced_run.tracking.get("log_artifacts") == ArtifactsKind.none.value:
        return []
    return [name for name in FILES if (synced_run.folder / name).is_file()]


def _file_digest(path: Path) -> str:
    return hashlib.sha256(regular_files.read_bytes(path)).hexdigest()


def _origin_artifact(
    server: WandbServer, synced_run: SyncedRun, entity: str, project: str
) -> str | None:
    """Returns the name of the checkpoint artifact that a run went on from, if it is published."""
    checkpoint = Path(synced_run.wandb.get("resumed_from") or "")
    if not synced_run.first_step:
        return None
    earlier: str = read_json(checkpoint.parents[1] / MARKER).get("path", "")
    run_id = earlier.rpartition("/")[2]
    name = f"{entity}/{project}/checkpoint-{run_id}:{checkpoint.name}"
    return name if run_id and server.has_artifact(name) else None


def _iter_artifacts(synced_run: SyncedRun, run_id: str) -> Iterator[tuple[Any, list[str], int]]:
    """Yields artifacts with their aliases and the bytes to send: last and best, and an adapter.

    A checkpoint stays on the disk, and its artifact says where, unless ``log_artifacts`` asks for
    its bytes; an adapter is small and always sent.
    """
    import wandb

    asked = synced_run.tracking.get("log_artifacts")
    steps = sorted(synced_run.folder.glob("checkpoints/step-*"))
    if asked == ArtifactsKind.none.value or not steps:
        return
    whole = asked == ArtifactsKind.checkpoints.value
    best = read_json(synced_run.folder / "checkpoints" / "best.json").get("step")
    aliases = {
        path: ["last"] * (path == steps[-1]) + ["best"] * (int(path.name[5:]) == best)
        for path in steps
    }
    for path, names in aliases.items():
        if not names:
            continue
        facts = {"step": int(path.name[5:]), "folder": str(path.resolve())}
        artifact = wandb.Artifact(f"checkpoint-{run_id}", "checkpoint", metadata=facts)
        if whole:
            artifact.add_dir(str(path), policy="immutable", skip_cache=True)
        else:
            artifact.add_reference(f"file://{path.resolve()}", checksum=False)
        yield artifact, [*names, path.name], _artifact_bytes(path) if whole else 0
    if synced_run.status.get("choices", {}).get("adapter", "none") != "none":
        file = synced_run.folder / "wandb" / "adapter.safetensors"
        file.parent.mkdir(exist_ok=True)  # a run without a tracker has none
        _write_adapter(steps[-1], synced_run.fully_trained_patterns, file)
        artifact = wandb.Artifact(f"adapter-{run_id}", "adapter")
        artifact.add_file(str(file), policy="mutable")
        yield artifact, ["last", steps[-1].name], file.stat().st_size


def _write_adapter(checkpoint: Path, fully_trained_patterns: Sequence[str], file: Path) -> None:
    """Writes what was trained of a checkpoint alone; ``fully_trained_patterns``: patterns of the
    model's modules."""
    from safetensors.torch import save_file

    from scalewise.checkpoints import store

    tensors = store.released_weights(checkpoint)
    kept = (
        name
        for name in tensors
        if is_adapter_weight(name) or _is_trained(name, fully_trained_patterns)
    )
    save_file({name: tensors[name] for name in kept}, file)


def _is_trained(name: str, fully_trained_patterns: Sequence[str]) -> bool:
    module = module_name(name.removeprefix("model."))
    return any(re.fullmatch(pattern, module) for pattern in fully_trained_patterns)


def _artifact_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
