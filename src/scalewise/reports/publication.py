"""Sends a run or a sweep to Weights & Biases, with its report; no run stops the others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scalewise.errors import ScalewiseError
from scalewise.output import print_lines
from scalewise.reports import page, wandb_report
from scalewise.tracking import recorded
from scalewise.tracking.connection import said
from scalewise.tracking.delivery import Told, deliver, settle
from scalewise.tracking.files import read_json, write_json
from scalewise.tracking.server import Server


class Publication:
    """One run or sweep on its way to the server."""

    def __init__(
        self, server: Server, folder: Path, entity: str | None, project: str | None
    ) -> None:
        """``entity`` and ``project`` are those that the environment asks for."""
        self._server, self._folder = server, folder
        self._entity, self._project = entity, project
        sweep = read_json(folder / "sweep.json")
        listed = sorted(recorded.jobs(folder, sweep), key=lambda job: int(job["number"]))
        inside = [folder / str(job["folder"]) for job in listed]
        inside = [own for own in inside if own.resolve().is_relative_to(folder.resolve())]
        self._folders = inside or [folder]
        self._count, self._whole = len(self._folders), True

    def publish(self) -> bool:
        """Returns whether all of it is at the server now; says what is not."""
        there = [(told, run) for told in self._tracked() if (run := self._delivered(told))]
        if there:
            _, newest = there[-1]
            self._report(str(newest.entity), str(newest.project))
        for told, run in there:
            self._settle(told.folder, run)
        if there and self._folder not in self._folders:
            self._link(self._folder)
        return self._whole

    def _tracked(self) -> Iterable[Told]:
        """Yields the runs that have something to send."""
        for folder in self._folders:
            try:
                told = Told.of(folder)
            except ScalewiseError as error:
                self._say(folder, f"left out: {error}")
                continue
            if not told.wandb.get("id"):
                self._say(folder, "left out: it was not tracked")
            elif recorded.is_at_work(told.status):
                self._say(folder, "left out: it still runs; publish it when it has ended")
                self._whole = False
            else:
                yield told

    def _delivered(self, told: Told) -> Any:
        entity = self._entity or str(told.wandb.get("entity") or self._server.account)
        project = self._project or str(told.wandb["project"])
        try:
            run = deliver(self._server, told, entity, project)
            facts = {**told.wandb, "entity": run.entity, "project": run.project, "url": run.url}
            _note(told.folder / "status.json", facts)
        except Exception as error:  # a server, a disk, a damaged file
            self._lost(told.folder, _reason(error, told.folder))
            return None
        self._say(told.folder, str(run.url))
        return run

    def _report(self, entity: str, project: str) -> None:
        """Publishes the report of the whole, which notes where it is; a job's is its sweep's."""
        if (self._folder.parent / "sweep.json").is_file():
            return
        try:
            url = wandb_report.publish(self._folder, entity=entity, project=project)
        except Exception as error:  # the client raises many kinds
            self._lost(self._folder, f"its report: {said(error)}")
        else:
            print_lines(f"W&B report {url}")

    def _settle(self, folder: Path, run: Any) -> None:
        try:
            self._link(folder)
            settle(self._server, Told.of(folder), run)
        except Exception as error:  # as above
            self._lost(folder, _reason(error, folder))

    def _link(self, folder: Path) -> None:
        """Writes a folder's page again, which knows now where W&B has it."""
        try:
            page.write(folder)
        except OSError as error:  # a full disk costs the page and nothing else
            self._lost(folder, f"its page: {error}")

    def _lost(self, folder: Path, error: object) -> None:
        self._whole = False
        self._say(folder, f"not sent: {error}")
        self._server.must_answer()

    def _say(self, folder: Path, what: str) -> None:
        listed = self._count > 1 and folder in self._folders
        place = f"{self._folders.index(folder) + 1}/{self._count} " if listed else ""
        print_lines(f"{place}{_short(folder)}  {what}")


def _reason(error: Exception, folder: Path) -> str:
    """Returns what went wrong, in one line; most other errors are of a file in the folder."""
    if isinstance(error, ScalewiseError | OSError):
        return " ".join(str(error).split())
    kind = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"a file in {folder} is damaged ({kind}); put a copy of the folder back"


def _note(path: Path, facts: dict[str, object]) -> None:
    record = read_json(path)
    if record.get("wandb") != facts:
        write_json(path, {**record, "wandb": facts})


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
