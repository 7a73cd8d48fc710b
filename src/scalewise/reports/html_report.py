"""Report files of a folder: ``report.html`` and ``report_spec.json``.

The page is reproducible and loads nothing from the network.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scalewise.failures import describe_exception, report_errors
from scalewise.reports import records, report_model, summary_sentences, summary_tables
from scalewise.reports.report_model import ReportModel
from scalewise.run_files import write_text

logger = logging.getLogger(__name__)

PAGE_FILE, WANDB_REPORT_FILE = "report.html", "report_spec.json"
_WANDB_REPORT_MODULE = "scalewise.reports.wandb_report"
_TEMPLATES = Path(__file__).parent / "templates"


def write_reports(folders: Sequence[Path]) -> list[Path]:
    """Write the reports of runs and sweeps into their folders and return the paths of the pages.

    Folders with W&B runs, synced or offline, get a W&B report as well. A report that cannot be
    written is reported on the terminal and skipped. Raises
    :class:`scalewise.errors.ScalewiseError` for a folder that is neither a run nor a sweep, before
    anything is written.
    """
    folder_records = {folder: records.read_record(folder) for folder in folders}
    reports, pages = dict[Path, report_model.ReportModel](), list[Path]()
    for folder, record in folder_records.items():
        with report_errors(f"cannot write the report of {folder}"):
            reports[folder] = report_model.build_report(record)
    tracked = [folder for folder, report in reports.items() if records.wandb_run_ids(report.record)]
    with _write_wandb_reports(tracked):
        for folder, report in reports.items():
            with report_errors(f"cannot write the report of {folder}"):
                pages.append(save_page(report, folder))
    return pages


@contextmanager
def _write_wandb_reports(folders: Sequence[Path]) -> Iterator[None]:
    """Write the W&B reports in a subprocess meanwhile: importing their packages takes a second."""
    if not folders:
        yield
        return
    command = [sys.executable, "-P", "-m", _WANDB_REPORT_MODULE, *map(str, folders)]
    try:
        process = subprocess.Popen(  # noqa: S603 (no shell)
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        logger.info(f"cannot write {WANDB_REPORT_FILE}: {describe_exception(error)}")
        yield
        return
    with process:
        yield
        _, stderr = process.communicate()
    if process.returncode:
        reason = (stderr.splitlines() or [f"exit code {process.returncode}"])[-1]
        logger.info(f"cannot write {WANDB_REPORT_FILE}: {reason}")


def write_page(folder: Path) -> Path:
    """Write ``report.html`` of the run or sweep in ``folder`` and return its path.

    Raises :class:`scalewise.errors.ScalewiseError` if ``folder`` holds neither.
    """
    return save_page(report_model.build_report(records.read_record(folder)), folder)


def save_page(report: ReportModel, folder: Path) -> Path:
    """Write ``report`` to ``report.html`` in ``folder`` atomically and return its path."""
    path = folder / PAGE_FILE
    write_text(path, build_page(report))
    return path


def build_page(report: ReportModel) -> str:
    """Render ``report`` as HTML."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        status_word=summary_sentences.status_word, glyph=summary_tables.status_glyph
    )
    return str(environment.get_template("page.html.j2").render(report=report))
