"""W&B report of a run or sweep: ``report_spec.json``, and its publication.

The file is written without an API key or network access; ``scalewise publish`` uploads it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import wandb_workspaces.reports.v2 as wr
from wandb_workspaces.reports.v2 import gql

from scalewise.compat import wandb as compat_wandb
from scalewise.errors import ScalewiseError
from scalewise.reports import records, report_model, report_redaction
from scalewise.reports.html_report import WANDB_REPORT_FILE
from scalewise.reports.records import RunRecord, SweepRecord, report_runs, wandb_run_ids
from scalewise.reports.report_model import ReportModel
from scalewise.reports.wandb_blocks import ReportBlocks, run_set_filter, to_plain_text
from scalewise.run_files import json_text, read_json, write_json, write_text
from scalewise.tracking.connection import wandb_client


class WandbReportService:
    """Authenticated client that sends the same GraphQL queries as W&B's report library.

    Raises the errors of :func:`scalewise.tracking.connection.wandb_client` on creation.
    """

    def __init__(self) -> None:
        self._api = wandb_client()

    def execute(self, query: str, variables: Mapping[str, object]) -> dict[str, Any]:
        """Execute a GraphQL query and return its data."""
        with wandb_errors():
            data: dict[str, Any] = compat_wandb.execute_graphql(self._api, query, variables)
            return data

    @property
    def entity(self) -> str:
        """Default entity of the account."""
        with wandb_errors():
            return str(self._api.default_entity)

    @property
    def address(self) -> str:
        """URL of the web app, without a trailing slash."""
        return str(compat_wandb.get_app_url(self._api)).rstrip("/")

    def project(self, entity: str, name: str) -> str:
        """Internal id of a project, which is created if it does not exist."""
        variables = {"entityName": entity, "projectName": name}
        for attempt in range(2):
            project = self.execute(gql.projectInternalId, variables).get("project")
            if project:
                return str(project["internalId"])
            if attempt == 0:
                with wandb_errors():
                    self._api.create_project(name, entity)
        raise ScalewiseError(f"W&B project {entity}/{name} does not exist and cannot be created")

    def report(self, entity: str, project: str, name: str) -> str | None:
        """Id of the report ``name`` of a project; ``None`` if it does not exist."""
        with wandb_errors():
            views = [
                view for view in self._api.reports(f"{entity}/{project}", name=name)
                if view.name == name
            ]  # fmt: skip
        return str(views[0].id) if views else None


@contextmanager
def wandb_errors() -> Iterator[None]:
    """Convert errors of the client to ``ScalewiseError`` with one redacted line."""
    try:
        yield
    except ScalewiseError:
        raise
    except Exception as error:  # the client raises many types
        text = report_redaction.redact_text(" ".join(str(error).split()))[:300]
        reason = text or type(error).__name__
        raise ScalewiseError(f"W&B request failed: {reason}") from error


PROJECT = "scalewise"
"""Project of a report whose runs have none."""
MAX_TITLE_LENGTH = 128
"""Maximum number of characters of a title."""


def build_wandb_report(folder: Path) -> Path:
    """Write ``report_spec.json`` of the run or sweep in ``folder`` and return its path.

    The file is a function of the records alone. Raises
    :class:`scalewise.errors.ScalewiseError` if ``folder`` holds neither.
    """
    return save_wandb_report(report_model.build_report(records.read_record(folder)), folder)


def save_wandb_report(report: ReportModel, folder: Path) -> Path:
    """Write ``report`` to ``report_spec.json`` in ``folder`` and return its path."""
    content = report_content(report, report_id(folder))
    write_text(folder / WANDB_REPORT_FILE, json_text(content, indent=1, ascii_only=False) + "\n")
    return folder / WANDB_REPORT_FILE


def report_id(folder: Path) -> str:
    """Id of a run or sweep in a project: ``NAME/TIMESTAMP[/JOB]``."""
    path = folder.resolve()
    depth = 3 if (path.parent / "sweep.json").is_file() else 2
    return "/".join(path.parts[-depth:])


def report_content(report: ReportModel, report_id: str) -> dict[str, object]:
    """Content of ``report_spec.json``.

    ``name`` is the name of the report in its project, derived from ``report_id``. ``spec`` is the
    W&B report spec without the internal id of the project.
    """
    group, run_ids = _wandb_group(report.record, report_id), wandb_run_ids(report.record)
    entity, project = (
        _shared_value(report.record, "entity"),
        _shared_value(report.record, "project"),
    )
    # Without an entity, Report would query the server for the default one.
    report_object = wr.Report(
        project=project or PROJECT,
        entity=entity or "-",
        title=report.title[:MAX_TITLE_LENGTH],
        description=to_plain_text(report.summary),
        blocks=list(ReportBlocks(run_set_filter(group, run_ids)).build(report)),
    )
    model = compat_wandb.report_model(report_object)
    return {
        "title": model.display_name,
        "description": model.description,
        "name": hashlib.sha256(report_id.encode()).hexdigest()[:12],
        "project": project,
        "entity": entity,
        "group": group,
        "run_ids": run_ids,
        "spec": json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }


def _wandb_group(record: RunRecord | SweepRecord, report_id: str) -> str:
    """Common group of a sweep's W&B runs; empty if there is none or for a single run."""
    if isinstance(record, RunRecord) or not wandb_run_ids(record):
        return ""
    groups = {
        str(run.wandb.get("group") or report_id) for run in record.jobs if run.wandb.get("id")
    }
    return groups.pop() if len(groups) == 1 else ""


def _shared_value(record: RunRecord | SweepRecord, key: str) -> str | None:
    """Value of ``key`` that all tracked runs share; ``None`` if they differ."""
    values = {str(run.wandb[key]) for run in report_runs(record) if run.wandb.get(key)}
    return values.pop() if len(values) == 1 else None


def publish_report(folder: Path, *, entity: str | None, project: str) -> str:
    """Publish the report of ``folder`` to a project and return its URL.

    The report is built again from the records. A report that the folder or the project already has
    is updated, not duplicated. The URL is written to the folder's record. With ``entity=None``, the
    entity of the runs is used, else the default entity of the account. Raises
    :class:`scalewise.errors.ScalewiseError` with the error of the service in one line.
    """
    content = json.loads(build_wandb_report(folder).read_text("utf-8"))
    service = WandbReportService()
    entity = entity or content["entity"] or service.entity
    project_fields = {
        "name": project,
        "entityName": entity,
        "id": service.project(entity, project),
    }
    for block in content["spec"]["blocks"]:
        for runs in block.get("metadata", {}).get("runSets", ()):
            runs["project"] = project_fields
    existing = _recorded_report_id(folder, service, entity, project)
    existing = existing or service.report(entity, project, content["name"])
    variables = {
        "id": existing,
        "name": content["name"],
        "entityName": entity,
        "projectName": project,
        "description": content["description"],
        "displayName": content["title"],
        "type": "runs",
        "spec": json_text(content["spec"]),
    }
    view_id = service.execute(gql.upsert_view, variables)["upsertView"]["view"]["id"]
    words = re.sub(r"\W+", "-", content["title"]).strip("-") or "report"
    path = "/".join(quote(part) for part in (entity, project, "reports", f"{words}--"))
    url = f"{service.address}/{path}{view_id.rstrip('=')}"
    _write_url(folder, url)
    return url


def _record_file(folder: Path) -> Path:
    sweep = folder / "sweep.json"
    return sweep if sweep.is_file() else folder / "status.json"


def _write_url(folder: Path, url: str) -> None:
    """Write the report's URL to the folder's record, as ``wandb.report``."""
    content = read_json(_record_file(folder))
    content["wandb"] = {**content.get("wandb", {}), "report": url}
    write_json(_record_file(folder), content)


def _recorded_report_id(
    folder: Path, service: WandbReportService, entity: str, project: str
) -> str | None:
    """Id of the report in the folder's record, if the project still has it."""
    facts = read_json(_record_file(folder)).get("wandb", {})
    url = facts.get("report") or ""
    view_id = url.rpartition("--")[2]
    if not view_id:
        return None
    view = service.execute(gql.view_report, {"reportId": view_id + "=" * (-len(view_id) % 4)}).get(
        "view"
    )
    view_project = (view or {}).get("project") or {}
    is_same = (view_project.get("entityName"), view_project.get("name")) == (entity, project)
    return str(view["id"]) if view and is_same else None


if __name__ == "__main__":
    for name in sys.argv[1:]:
        build_wandb_report(Path(name))
