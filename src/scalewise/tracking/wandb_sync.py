"""Upload of the data in a run folder that W&B lacks: rows, outcome, files and artifacts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from scalewise import regular_files
from scalewise.adapters.target_modules import module_name
from scalewise.checkpoints import store
from scalewise.errors import ScalewiseError
from scalewise.models.base import is_adapter_weight
from scalewise.run_files import (
    WANDB_FACTS,
    read_json,
    read_metrics,
    read_yaml,
    write_json,
)
from scalewise.tracking import tables
from scalewise.tracking.tables import Row, average_window, predicted_metrics, summary_metrics
from scalewise.tracking.wandb_api import WandbServer
from scalewise.tracking_config import ArtifactsKind

PUBLISHED_FILE = "wandb/published.json"
"""Record of the last upload: the W&B run and digests of the files."""
UPLOADED_FILES = (
    "resolved.yaml",
    "overrides.txt",
    "status.json",
    "plan.json",
    "summary.json",
    "metrics.csv",
    "report.html",
)
"""Files of the run folder that are uploaded to the W&B run."""

FINISH_TIMEOUT = 60.0
"""Seconds for small files."""
MIN_UPLOAD_RATE = 2e6
"""Bytes/s below which the upload of an artifact is aborted."""


@dataclass(frozen=True)
class SyncedRun:
    """A run to upload, read from its folder."""

    folder: Path
    """The run folder."""
    status: Mapping[str, Any]
    """Content of ``status.json``."""

    @classmethod
    def from_folder(cls, folder: Path) -> SyncedRun:
        """Read a run folder; raises ``ScalewiseError`` without a readable ``status.json``."""
        status = read_json(folder / "status.json")
        if not status:
            raise ScalewiseError("the run has no readable status.json")
        return cls(folder, status)

    @cached_property
    def wandb(self) -> dict[str, Any]:
        """Facts of the newest W&B run, from ``status.json``, or ``facts.json`` if killed."""
        facts: dict[str, Any] = self.status.get("wandb", {})
        return facts if facts.get("id") else read_json(self.folder / WANDB_FACTS)

    @property
    def outcome(self) -> tuple[str, str, int]:
        """Status, reason and exit code; ``failed`` for a run whose process is gone."""
        exit_code = self.status.get("exit_code")
        if exit_code is None:
            return "failed", "the process is gone without an exit status", 1
        status, reason = (self.status.get(key, "") for key in ("status", "reason"))
        return status, reason, exit_code

    @cached_property
    def logs(self) -> list[Path]:
        """Transaction logs of all attempts, oldest first."""
        paths = {path.resolve() for path in self.folder.glob("wandb/*run-*/run-*.wandb")}
        wandb_folder = self.wandb.get("folder")  # differs from the run folder with WANDB_DIR
        if wandb_folder:
            paths |= {path.resolve() for path in Path(wandb_folder).glob("run-*.wandb")}
        return sorted(paths, key=lambda path: path.parent.name.removeprefix("offline-"))

    @cached_property
    def tracking(self) -> Mapping[str, Any]:
        """The ``tracking`` group of the config."""
        group: Mapping[str, Any] = self._resolved_config.get("tracking", {})
        return group

    @property
    def fully_trained_patterns(self) -> list[str]:
        """Patterns of modules that were fully trained in addition to an adapter."""
        patterns = self._resolved_config.get("adapter", {}).get("trained")
        return [str(pattern) for pattern in patterns] if isinstance(patterns, list) else []

    @cached_property
    def window(self) -> int:
        """Steps per W&B row."""
        steps = self._resolved_config.get("trainer", {}).get("log_every")
        return steps if isinstance(steps, int) and steps > 0 else 1

    @property
    def first_step(self) -> int:
        """Step from which the run resumed; 0 if it did not."""
        step = re.search(r"step-(\d+)$", self.wandb.get("resumed_from") or "")
        return int(step[1]) if step else 0

    @cached_property
    def _resolved_config(self) -> Mapping[str, Any]:
        return read_yaml(self.folder / "resolved.yaml")


def deliver_run(server: WandbServer, synced_run: SyncedRun, entity: str, project: str) -> Any:
    """Upload the attempts that the server lacks and return the newest W&B run.

    Raises ``ScalewiseError``.
    """
    for log in synced_run.logs:
        run_id = log.stem.removeprefix("run-")
        path = f"{entity}/{project}/{run_id}"
        if server.find_run(path) is None:
            if read_json(synced_run.folder / PUBLISHED_FILE).get("path") == f"{server.url}/{path}":
                raise ScalewiseError("the uploaded run was deleted from the server")
            server.sync_log(log, entity, project)
    wandb_run = server.find_run(f"{entity}/{project}/{synced_run.wandb['id']}")
    if wandb_run is None:
        raise ScalewiseError("the server did not accept the run; try again later")
    return wandb_run


def send_missing(server: WandbServer, synced_run: SyncedRun, wandb_run: Any) -> int:
    """Upload the data that ``wandb_run`` lacks and return the number of missing rows.

    The data are rows, the outcome, files and artifacts, and an alert for an online run that failed.
    Does nothing if nothing has changed since the last upload. Raises ``ScalewiseError``.
    """
    entity, project, run_id = wandb_run.path
    files = {name: _file_digest(synced_run.folder / name) for name in _files_to_send(synced_run)}
    record = {"path": f"{server.url}/{entity}/{project}/{run_id}", "files": files}
    missing = _missing_rows(synced_run, wandb_run)
    last_record = read_json(synced_run.folder / PUBLISHED_FILE)
    is_same_run = last_record.get("path") == record["path"]
    uploaded = last_record.get("files", {}) if is_same_run else {}
    if last_record == record and not missing and wandb_run.state != "running":
        return 0
    artifacts = list(_iter_artifacts(synced_run, run_id))
    timeout = FINISH_TIMEOUT + sum(size for _, _, size in artifacts) / MIN_UPLOAD_RATE
    exit_code = synced_run.outcome[2]
    with server.reopen_run(entity, project, run_id, exit_code=exit_code, timeout=timeout) as run:
        for row in missing:
            run.log(row)
        _write_outcome(run, synced_run)
        if not is_same_run and exit_code and synced_run.wandb.get("mode") == "online":
            _send_alert(run, synced_run)
        if artifacts and (origin := _origin_artifact(server, synced_run, entity, project)):
            run.use_artifact(origin)
        for artifact, aliases, _ in artifacts:
            run.log_artifact(artifact, aliases=aliases)
    # Written before the files, so that a failed upload does not repeat the alert.
    write_json(synced_run.folder / PUBLISHED_FILE, {**record, "files": uploaded})
    names = [f"{entity}/{project}/{artifact.name}:{alias[-1]}" for artifact, alias, _ in artifacts]
    server.upload_files(
        wandb_run, synced_run.folder, [n for n in files if files[n] != uploaded.get(n)]
    )
    _verify_arrival(server, synced_run, "/".join(wandb_run.path), names)
    write_json(synced_run.folder / PUBLISHED_FILE, record)
    return len(missing)


def _verify_arrival(
    server: WandbServer, synced_run: SyncedRun, path: str, artifacts: list[str]
) -> None:
    """Check the upload on the server: the client reports success even if it was rejected."""
    wandb_run = server.find_run(path)
    missing_artifacts = [name for name in artifacts if not server.has_artifact(name)]
    if (
        wandb_run is None
        or wandb_run.state == "running"
        or missing_artifacts
        or _missing_rows(synced_run, wandb_run)
    ):
        raise ScalewiseError("the upload is incomplete; try again later")


def _missing_rows(synced_run: SyncedRun, wandb_run: Any) -> list[Row]:
    """Rows that the W&B run lacks, averaged over windows as during training."""
    last_step = max(int(wandb_run.summary.get("step") or 0), synced_run.first_step)
    rows = [
        r
        for r in read_metrics(synced_run.folder / "metrics.csv")
        if cast(int, r["step"]) > last_step
    ]
    windows: list[list[Row]] = [[]]
    for row in rows:
        windows[-1].append(row)
        if cast(int, row["step"]) % synced_run.window == 0 or row.get("val/loss") is not None:
            windows.append([])
    return [average_window(window) for window in windows if window]


def _write_outcome(wandb_run: Any, synced_run: SyncedRun) -> None:
    """Write the outcome and the tables of predicted vs. measured values to the W&B summary."""
    plan, summary = (read_json(synced_run.folder / name) for name in ("plan.json", "summary.json"))
    status, reason, _ = synced_run.outcome
    wandb_run.summary.update({**predicted_metrics(plan), "status": status, "reason": reason})
    metrics = summary.get("metrics", {})
    if metrics:
        wandb_run.summary.update(summary_metrics(summary))
    all_tables = {**tables.predicted_tables(plan), **tables.measured_table(plan, metrics)}
    wandb_run.summary.update({key: _to_media(table) for key, table in all_tables.items()})


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
    return [name for name in UPLOADED_FILES if (synced_run.folder / name).is_file()]


def _file_digest(path: Path) -> str:
    return hashlib.sha256(regular_files.read_bytes(path)).hexdigest()


def _origin_artifact(
    server: WandbServer, synced_run: SyncedRun, entity: str, project: str
) -> str | None:
    """Name of the published checkpoint artifact from which the run resumed, if any."""
    checkpoint = Path(synced_run.wandb.get("resumed_from") or "")
    if not synced_run.first_step:
        return None
    origin: str = read_json(checkpoint.parents[1] / PUBLISHED_FILE).get("path", "")
    run_id = origin.rpartition("/")[2]
    name = f"{entity}/{project}/checkpoint-{run_id}:{checkpoint.name}"
    return name if run_id and server.has_artifact(name) else None


def _iter_artifacts(synced_run: SyncedRun, run_id: str) -> Iterator[tuple[Any, list[str], int]]:
    """Yield each artifact with its aliases and the bytes to upload.

    Artifacts are the last and the best checkpoint and the adapter. Checkpoints are uploaded with
    ``log_artifacts=checkpoints`` and else referenced by path; with ``none``, nothing is uploaded.
    """
    import wandb

    log_artifacts = synced_run.tracking.get("log_artifacts")
    steps = sorted(synced_run.folder.glob("checkpoints/step-*"))
    if log_artifacts == ArtifactsKind.none.value or not steps:
        return
    uploads_checkpoints = log_artifacts == ArtifactsKind.checkpoints.value
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
        if uploads_checkpoints:
            artifact.add_dir(str(path), policy="immutable", skip_cache=True)
        else:
            artifact.add_reference(f"file://{path.resolve()}", checksum=False)
        yield artifact, [*names, path.name], _artifact_bytes(path) if uploads_checkpoints else 0
    if synced_run.status.get("choices", {}).get("adapter", "none") != "none":
        file = synced_run.folder / "wandb" / "adapter.safetensors"
        file.parent.mkdir(exist_ok=True)  # missing for an untracked run
        _write_adapter(steps[-1], synced_run.fully_trained_patterns, file)
        artifact = wandb.Artifact(f"adapter-{run_id}", "adapter")
        artifact.add_file(str(file), policy="mutable")
        yield artifact, ["last", steps[-1].name], file.stat().st_size


def _write_adapter(checkpoint: Path, fully_trained_patterns: Sequence[str], file: Path) -> None:
    """Write the adapter weights and fully trained modules of a checkpoint to ``file``."""
    from safetensors.torch import save_file

    tensors = store.released_weights(checkpoint)
    names = (
        name
        for name in tensors
        if is_adapter_weight(name) or _is_trained(name, fully_trained_patterns)
    )
    save_file({name: tensors[name] for name in names}, file)


def _is_trained(name: str, fully_trained_patterns: Sequence[str]) -> bool:
    module = module_name(name.removeprefix("model."))
    return any(re.fullmatch(pattern, module) for pattern in fully_trained_patterns)


def _artifact_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
