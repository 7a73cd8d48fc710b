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

from scalewise.reports import markdown, records, report_model
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.reports.report_model import ReportModel
from scalewise.reports.wandb_service import WandbReportService
from scalewise.tracking.run_files import json_text, read_json, write_json, write_text

FILE = "report_spec.json"
PROJECT = "scalewise"
"""Project of a report whose runs name none."""
LONGEST_TITLE = 128
"""Characters of a title that W&B takes."""


def build_wandb_report(folder: Path) -> Path:
    """Writes the W&B report of the run or sweep in ``folder`` and returns its path.

    The same records give the same bytes. Raises :class:`scalewise.errors.ScalewiseError` where
    it holds neither.
    """
    return save_wandb_report(report_model.build_report(records.read_record(folder)), folder)


def save_wandb_report(report: ReportModel, folder: Path) -> Path:
    """Writes ``report`` as a W&B report into ``folder`` and returns its path."""
    content = report_content(report, report_id(folder))
    write_text(folder / FILE, json_text(content, indent=1, ascii_only=False) + "\n")
    return folder / FILE


def report_id(folder: Path) -> str:
    """Returns what tells a run or sweep from all others of a project: ``NAME/TIMESTAMP[/JOB]``."""
    whole = folder.resolve()
    parts = 3 if (whole.parent / "sweep.json").is_file() else 2
    return "/".join(whole.parts[-parts:])


def report_content(report: ReportModel, report_id: str) -> dict[str, object]:
    """Returns the content of ``report_spec.json``.

    ``name`` is the report's name in its project, the same whenever it is made for ``report_id``;
    ``spec`` is what W&B keeps, but for the number of the project that holds the runs.
    """
    import wandb_workspaces.reports.v2 as wr

    from scalewise.reports.wandb_blocks import ReportBlocks, run_set_filter

    group, held = _wandb_group(report.record, report_id), wandb_run_ids(report.record)
    entity, project = (
        _shared_value(report.record, "entity"),
        _shared_value(report.record, "project"),
    )
    # Of a Report without an entity W&B's server is asked; which is not there, or not yet.
    made = wr.Report(
        project=project or PROJECT,
        entity=entity or "-",
        title=report.title[:LONGEST_TITLE],
        description=markdown.to_plain_text(report.verdict),
        blocks=list(ReportBlocks(run_set_filter(group, held)).build(report)),
    )._to_model()
    return {
        "title": made.display_name,
        "description": made.description,
        "name": hashlib.sha256(report_id.encode()).hexdigest()[:12],
        "project": project,
        "entity": entity,
        "group": group,
        "run_ids": held,
        "spec": json.loads(made.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }


def _report_runs(record: RunRecord | SweepRecord) -> tuple[RunRecord, ...]:
    return record.jobs if isinstance(record, SweepRecord) else (record,)


def wandb_run_ids(record: RunRecord | SweepRecord) -> list[str]:
    """Returns the ids of the runs that W&B holds or will hold."""
    return [str(run.wandb["id"]) for run in _report_runs(record) if run.wandb.get("id")]


def _wandb_group(record: RunRecord | SweepRecord, report_id: str) -> str:
    """Returns the group of a sweep's runs; empty where they share none, and of a single run."""
    if isinstance(record, RunRecord) or not wandb_run_ids(record):
        return ""
    groups = {
        str(run.wandb.get("group") or report_id) for run in record.jobs if run.wandb.get("id")
    }
    return groups.pop() if len(groups) == 1 else ""


def _shared_value(record: RunRecord | SweepRecord, key: str) -> str | None:
    """Returns what all tracked runs say of ``key``, if they say the same."""
    said = {str(run.wandb[key]) for run in _report_runs(record) if run.wandb.get(key)}
    return said.pop() if len(said) == 1 else None


def publish_report(folder: Path, *, entity: str | None, project: str) -> str:
    """Saves the report of ``folder`` in a project and returns its address, which it notes there.

    It is built anew. One that the folder or the project knows is updated, so that there is never
    a second. ``entity`` None: the one that its runs name, else the account's. Raises
    :class:`scalewise.errors.ScalewiseError` with what the service said, in one line.
    """
    from wandb_workspaces.reports.v2 import gql

    content = json.loads(build_wandb_report(folder).read_text("utf-8"))
    service = WandbReportService()
    entity = entity or content["entity"] or service.entity
    where = {"name": project, "entityName": entity, "id": service.project(entity, project)}
    for block in content["spec"]["blocks"]:
        for runs in block.get("metadata", {}).get("runSets", ()):
            runs["project"] = where
    known = _noted_report_id(folder, service, entity, project)
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
    ident = service.execute(gql.upsert_view, sent)["upsertView"]["view"]["id"]
    words = re.sub(r"\W+", "-", content["title"]).strip("-") or "report"
    place = "/".join(quote(part) for part in (entity, project, "reports", f"{words}--"))
    url = f"{service.address}/{place}{ident.rstrip('=')}"
    _note_address(folder, url)
    return url


def _existing_report(folder: Path) -> Path:
    sweep = folder / "sweep.json"
    return sweep if sweep.is_file() else folder / "status.json"


def _note_address(folder: Path, url: str) -> None:
    """Writes the report's address into the folder's record, under ``wandb.report``."""
    content = read_json(_existing_report(folder))
    content["wandb"] = {**content.get("wandb", {}), "report": url}
    write_json(_existing_report(folder), content)


def _noted_report_id(
    folder: Path, service: WandbReportService, entity: str, project: str
) -> str | None:
    """Returns the id of the report that the folder notes, if the project still has it."""
    from wandb_workspaces.reports.v2 import gql

    facts = read_json(_existing_report(folder)).get("wandb", {})
    url = facts.get("report") or ""
    ident = url.rpartition("--")[2]
    if not ident:
        return None
    view = service.execute(gql.view_report, {"reportId": ident + "=" * (-len(ident) % 4)}).get(
        "view"
    )
    there = (view or {}).get("project") or {}
    same = (there.get("entityName"), there.get("name")) == (entity, project)
    return str(view["id"]) if view and same else None


if __name__ == "__main__":
    for name in sys.argv[1:]:
        build_wandb_report(Path(name))
