"""Upload of a run or sweep to Weights & Biases, with its report; a failed run is skipped."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scalewise.errors import ScalewiseError
from scalewise.path_lock import PathLock
from scalewise.reports import html_report, wandb_report
from scalewise.run_files import load_json, read_json, write_json
from scalewise.tracking import sweep_record
from scalewise.tracking.connection import server_error_text
from scalewise.tracking.wandb_api import WandbServer
from scalewise.tracking.wandb_sync import SyncedRun, deliver_run, send_missing

logger = logging.getLogger(__name__)


class ReportPublication:
    """Upload of one run or sweep.

    Args:
        server: The W&B server.
        folder: Folder of the run or sweep.
        entity: Entity from the environment; ``None`` for that of the run.
        project: Project from the environment; ``None`` for that of the run.
    """

    def __init__(
        self, server: WandbServer, folder: Path, entity: str | None, project: str | None
    ) -> None:
        self._server, self._folder = server, folder
        self._entity, self._project = entity, project
        jobs = load_json(folder / "sweep.json").get("jobs", [])
        job_folders = [
            folder / job["folder"] for job in sorted(jobs, key=lambda job: job["number"])
        ]
        root = folder.resolve()
        job_folders = [path for path in job_folders if path.resolve().is_relative_to(root)]
        self._folders = job_folders or [folder]
        self._count, self._complete = len(self._folders), True

    def publish(self) -> bool:
        """Upload everything, print failures, and return whether nothing failed."""
        try:
            with PathLock(self._folder):  # two uploads would create two reports
                return self._publish()
        except BlockingIOError:
            self._print_status(self._folder, "skipped: another process publishes it")
            return False

    def _publish(self) -> bool:
        uploaded = [
            (synced_run, run)
            for synced_run in self._iter_tracked_runs()
            if (run := self._deliver(synced_run))
        ]
        if uploaded:
            _, newest = uploaded[-1]
            self._publish_report(str(newest.entity), str(newest.project))
        for synced_run, run in uploaded:
            self._send_missing(synced_run.folder, run)
        if uploaded and self._folder not in self._folders:
            self._rewrite_page(self._folder)
        return self._complete

    def _iter_tracked_runs(self) -> Iterable[SyncedRun]:
        """Yield the runs that can be uploaded, and print why the others are skipped."""
        for folder in self._folders:
            try:
                synced_run = SyncedRun.from_folder(folder)
            except ScalewiseError as error:
                self._print_status(folder, f"skipped: {error}")
                continue
            if not synced_run.wandb.get("id"):
                self._print_status(folder, "skipped: the run was not tracked")
            elif sweep_record.is_running(synced_run.status):
                self._print_status(
                    folder, "skipped: the run is in progress; publish it when it has ended"
                )
                self._complete = False
            else:
                yield synced_run

    def _deliver(self, synced_run: SyncedRun) -> Any:
        entity = self._entity or str(synced_run.wandb.get("entity") or self._server.account)
        project = self._project or str(synced_run.wandb["project"])
        try:
            run = deliver_run(self._server, synced_run, entity, project)
            facts = {
                **synced_run.wandb,
                "entity": run.entity,
                "project": run.project,
                "url": run.url,
            }
            _write_wandb_facts(synced_run.folder / "status.json", facts)
        except Exception as error:  # server errors, full disks and damaged files
            self._record_failure(synced_run.folder, _failure_reason(error, synced_run.folder))
            return None
        self._print_status(synced_run.folder, str(run.url))
        return run

    def _publish_report(self, entity: str, project: str) -> None:
        """Publish the report, unless the folder is a job of a sweep, which has its own report."""
        if (self._folder.parent / "sweep.json").is_file():
            return
        try:
            url = wandb_report.publish_report(self._folder, entity=entity, project=project)
        except Exception as error:  # the client raises many types
            self._record_failure(self._folder, f"W&B report: {server_error_text(error)}")
        else:
            logger.info(f"W&B report {url}")

    def _send_missing(self, folder: Path, run: Any) -> None:
        try:
            self._rewrite_page(folder)
            send_missing(self._server, SyncedRun.from_folder(folder), run)
        except Exception as error:  # as above
            self._record_failure(folder, _failure_reason(error, folder))

    def _rewrite_page(self, folder: Path) -> None:
        """Write ``report.html`` again, with the W&B URLs."""
        try:
            html_report.write_page(folder)
        except OSError as error:  # a full disk does not stop the upload
            self._record_failure(folder, f"report.html: {error}")

    def _record_failure(self, folder: Path, error: object) -> None:
        self._complete = False
        self._print_status(folder, f"not uploaded: {error}")
        self._server.require_answer()

    def _print_status(self, folder: Path, message: str) -> None:
        is_job = self._count > 1 and folder in self._folders
        position = f"{self._folders.index(folder) + 1}/{self._count} " if is_job else ""
        logger.info(f"{position}{_display_path(folder)}  {message}")


def _failure_reason(error: Exception, folder: Path) -> str:
    """One line on ``error``; unexpected types are caused by damaged files in the folder."""
    if isinstance(error, ScalewiseError | OSError):
        return " ".join(str(error).split())
    kind = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"a file in {folder} is damaged ({kind}); restore the folder from a copy"


def _write_wandb_facts(path: Path, facts: dict[str, object]) -> None:
    record = read_json(path)
    if record.get("wandb") != facts:
        write_json(path, {**record, "wandb": facts})


def _display_path(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
