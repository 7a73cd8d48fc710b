"""Writes ``report_spec.json``, the W&B report of a run or a sweep, and publishes it.

The file is made without a key and without a network; ``publish`` sends what it says.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from scalewise.reports import markdown, outline, records
from scalewise.reports.outline import Outline
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.tracking.files import write_text

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
    write_text(folder / FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
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
        "spec": made.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        build(Path(name))
