"""Writes ``report_spec.json``, the W&B report of a run or a sweep, and publishes it.

The file is made without a key and without a network; ``publish`` sends what it says.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from urllib.parse import quote

from scalewise.reports import markdown, outline, records
from scalewise.reports.outline import Outline
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.reports.service import Service
from scalewise.tracking.files import json_text, read_json, write_json, write_text

FILE = "report_spec.json"
PROJECT = "scalewise"
"""Project of a report whose runs name none."""
LONGEST_TITLE = 128
"""Characters of a title that W&B takes."""


def build(folder: Path) -> Path:
    """Writes the W&B report of the run or sweep in ``folder`` and returns its path.

    The same records give the same bytes. Raises :class:`scalewise.errors.ScalewiseError` where
    it holds neither.
    """
    return save(outline.of(records.read(folder)), folder)


def save(report: Outline, folder: Path) -> Path:
    """Writes ``report`` as a W&B report into ``folder`` and returns its path."""
    content = content_of(report, place_of(folder))
    write_text(folder / FILE, json_text(content, indent=1, ascii_only=False) + "\n")
    return folder / FILE


def place_of(folder: Path) -> str:
    """Returns what tells a run or sweep from all others of a project: ``NAME/TIMESTAMP[/JOB]``."""
    whole = folder.resolve()
    parts = 3 if (whole.parent / "sweep.json").is_file() else 2
    return "/".join(whole.parts[-parts:])


def content_of(report: Outline, place: str) -> dict[str, object]:
    """Returns the content of ``report_spec.json``.

    ``name`` is the report's name in its project, the same whenever it is made for ``place``;
    ``spec`` is what W&B keeps, but for the number of the project that holds the runs.
    """
    import wandb_workspaces.reports.v2 as wr

    from scalewise.reports.wandb_blocks import Blocks, runs_of

    group, held = _group(report.record, place), ids(report.record)
    entity, project = _shared(report.record, "entity"), _shared(report.record, "project")
    # Of a Report without an entity W&B's server is asked; which is not there, or not yet.
    made = wr.Report(
        project=project or PROJECT,
        entity=entity or "-",
        title=report.title[:LONGEST_TITLE],
        description=markdown.plain(report.verdict),
        blocks=list(Blocks(runs_of(group, held)).of(report)),
    )._to_model()
    return {
        "title": made.display_name,
        "description": made.description,
        "name": hashlib.sha256(place.encode()).hexdigest()[:12],
        "project": project,
        "entity": entity,
        "group": group,
        "run_ids": held,
        "spec": json.loads(made.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }


def _runs(record: RunRecord | SweepRecord) -> tuple[RunRecord, ...]:
    return record.jobs if isinstance(record, SweepRecord) else (record,)


def ids(record: RunRecord | SweepRecord) -> list[str]:
    """Returns the ids of the runs that W&B holds or will hold."""
    return [str(run.wandb["id"]) for run in _runs(record) if run.wandb.get("id")]


def _group(record: RunRecord | SweepRecord, place: str) -> str:
    """Returns the group of a sweep's runs; empty where they share none, and of a single run."""
    if isinstance(record, RunRecord) or not ids(record):
        return ""
    groups = {str(run.wandb.get("group") or place) for run in record.jobs if run.wandb.get("id")}
    return groups.pop() if len(groups) == 1 else ""


def _shared(record: RunRecord | SweepRecord, key: str) -> str | None:
    """Returns what all tracked runs say of ``key``, if they say the same."""
    said = {str(run.wandb[key]) for run in _runs(record) if run.wandb.get(key)}
    return said.pop() if len(said) == 1 else None


def publish(folder: Path, *, entity: str | None, project: str) -> str:
    """Saves the report of ``folder`` in a project and returns its address, which it notes there.

    It is built anew. One that the folder or the project knows is updated, so that there is never
    a second. ``entity`` None: the one that its runs name, else the account's. Raises
    :class:`scalewise.errors.ScalewiseError` with what the service said, in one line.
    """
    from wandb_workspaces.reports.v2 import gql

    content = json.loads(build(folder).read_text("utf-8"))
    service = Service()
    entity = entity or content["entity"] or service.entity
    where = {"name": project, "entityName": entity, "id": service.project(entity, project)}
    for block in content["spec"]["blocks"]:
        for runs in block.get("metadata", {}).get("runSets", ()):
            runs["project"] = where
    known = _noted(folder, service, entity, project)
    known = known or service.report(entity, project, content["name"])
    sent = {
        "id": known,
        "name": content["name"],
        "entityName": entity,
        "projectName": project,
        "description": content["description"],
        "displayName": content["title"],
        "type": "runs",
        "spec": json_text(content["spec"]),
    }
    ident = service.ask(gql.upsert_view, sent)["upsertView"]["view"]["id"]
    words = re.sub(r"\W+", "-", content["title"]).strip("-") or "report"
    place = "/".join(quote(part) for part in (entity, project, "reports", f"{words}--"))
    url = f"{service.address}/{place}{ident.rstrip('=')}"
    _note(folder, url)
    return url


def _kept_in(folder: Path) -> Path:
    sweep = folder / "sweep.json"
    return sweep if sweep.is_file() else folder / "status.json"


def _note(folder: Path, url: str) -> None:
    """Writes the report's address into the folder's record, under ``wandb.report``."""
    content = read_json(_kept_in(folder))
    facts = content.get("wandb")
    content["wandb"] = {**(facts if isinstance(facts, dict) else {}), "report": url}
    write_json(_kept_in(folder), content)


def _noted(folder: Path, service: Service, entity: str, project: str) -> str | None:
    """Returns the id of the report that the folder notes, if the project still has it."""
    from wandb_workspaces.reports.v2 import gql

    facts = read_json(_kept_in(folder)).get("wandb")
    url = str(facts.get("report") or "") if isinstance(facts, dict) else ""
    ident = url.rpartition("--")[2]
    if not ident:
        return None
    view = service.ask(gql.view_report, {"reportId": ident + "=" * (-len(ident) % 4)}).get("view")
    there = (view or {}).get("project") or {}
    same = (there.get("entityName"), there.get("name")) == (entity, project)
    return str(view["id"]) if view and same else None


if __name__ == "__main__":
    for name in sys.argv[1:]:
        build(Path(name))
