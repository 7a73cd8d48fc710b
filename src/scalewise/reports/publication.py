"""Sends a run or a sweep to Weights & Biases, with its report; no run stops the others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scalewise.console import print_lines
from scalewise.errors import ScalewiseError
from scalewise.reports import page, wandb_report
from scalewise.tracking import sweep_record
from scalewise.tracking.connection import server_error_text
from scalewise.tracking.run_files import load_json, read_json, write_json
from scalewise.tracking.wandb_api import WandbServer
from scalewise.tracking.wandb_sync import SyncedRun, deliver_run, send_missing


class ReportPublication:
    """One run or sweep on its way to the server."""

    def __init__(
        self, server: WandbServer, folder: Path, entity: str | None, project: str | None
    ) -> None:
        """``entity`` and ``project`` are those that the environment asks for."""
        self._server, self._folder = server, folder
        self._entity, self._project = entity, project
        jobs = load_json(folder / "sweep.json").get("jobs", [])
        listed = sorted(jobs, key=lambda job: job["number"])
        inside = [folder / job["folder"] for job in listed]
        inside = [own for own in inside if own.resolve().is_relative_to(folder.resolve())]
        self._folders = inside or [folder]
        self._count, self._complete = len(self._folders), True

    def publish(self) -> bool:
        """Returns whether all of it is at the server now; says what is not."""
        there = [(told, run) for told in self._iter_tracked_runs() if (run := self._deliver(told))]
        if there:
            _, newest = there[-1]
            self._publish_report(str(newest.entity), str(newest.project))
        for told, run in there:
            self._send_missing(told.folder, run)
        if there and self._folder not in self._folders:
            self._rewrite_page(self._folder)
        return self._complete

    def _iter_tracked_runs(self) -> Iterable[SyncedRun]:
        """Yields the runs that have something to send."""
        for folder in self._folders:
            try:
                told = SyncedRun.from_folder(folder)
            except ScalewiseError as error:
                self._print_status(folder, f"left out: {error}")
                continue
            if not told.wandb.get("id"):
                self._print_status(folder, "left out: it was not tracked")
            elif sweep_record.is_running(told.status):
                self._print_status(folder, "left out: it still runs; publish it when it has ended")
                self._complete = False
            else:
                yield told

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
            _print_note(synced_run.folder / "status.json", facts)
        except Exception as error:  # a server, a disk, a damaged file
            self._record_failure(synced_run.folder, _failure_reason(error, synced_run.folder))
            return None
        self._print_status(synced_run.folder, str(run.url))
        return run

    def _publish_report(self, entity: str, project: str) -> None:
        """Publishes the report of the whole, which notes where it is; a job's is its sweep's."""
        if (self._folder.parent / "sweep.json").is_file():
            return
        try:
            url = wandb_report.publish_report(self._folder, entity=entity, project=project)
        except Exception as error:  # the client raises many kinds
            self._record_failure(self._folder, f"its report: {server_error_text(error)}")
        else:
            print_lines(f"W&B report {url}")

    def _send_missing(self, folder: Path, run: Any) -> None:
        try:
            self._rewrite_page(folder)
            send_missing(self._server, SyncedRun.from_folder(folder), run)
        except Exception as error:  # as above
            self._record_failure(folder, _failure_reason(error, folder))

    def _rewrite_page(self, folder: Path) -> None:
        """Writes a folder's page again, which knows now where W&B has it."""
        try:
            page.write_page(folder)
        except OSError as error:  # a full disk costs the page and nothing else
            self._record_failure(folder, f"its page: {error}")

    def _record_failure(self, folder: Path, error: object) -> None:
        self._complete = False
        self._print_status(folder, f"not sent: {error}")
        self._server.require_answer()

    def _print_status(self, folder: Path, message: str) -> None:
        listed = self._count > 1 and folder in self._folders
        place = f"{self._folders.index(folder) + 1}/{self._count} " if listed else ""
        print_lines(f"{place}{_short_text(folder)}  {message}")


def _failure_reason(error: Exception, folder: Path) -> str:
    """Returns what went wrong, in one line; most other errors are of a file in the folder."""
    if isinstance(error, ScalewiseError | OSError):
        return " ".join(str(error).split())
    kind = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"a file in {folder} is damaged ({kind}); put a copy of the folder back"


def _print_note(path: Path, facts: dict[str, object]) -> None:
    record = read_json(path)
    if record.get("wandb") != facts:
        write_json(path, {**record, "wandb": facts})


def _short_text(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
