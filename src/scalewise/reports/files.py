"""Report files of a folder: ``report.html`` and ``report_spec.json``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scalewise.console import print_lines
from scalewise.failures import describe_exception, report_errors
from scalewise.reports import page, records, report_model, wandb_report


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
    tracked = [
        folder for folder, report in reports.items() if wandb_report.wandb_run_ids(report.record)
    ]
    with _write_wandb_reports(tracked):
        for folder, report in reports.items():
            with report_errors(f"cannot write the report of {folder}"):
                pages.append(page.save_page(report, folder))
    return pages


@contextmanager
def _write_wandb_reports(folders: Sequence[Path]) -> Iterator[None]:
    """Write the W&B reports in a subprocess meanwhile: importing their packages takes a second."""
    if not folders:
        yield
        return
    command = [sys.executable, "-P", "-m", wandb_report.__name__, *map(str, folders)]
    try:
        process = subprocess.Popen(  # noqa: S603 (no shell)
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        print_lines(f"cannot write {wandb_report.FILE}: {describe_exception(error)}")
        yield
        return
    with process:
        yield
        _, stderr = process.communicate()
    if process.returncode:
        reason = (stderr.splitlines() or [f"exit code {process.returncode}"])[-1]
        print_lines(f"cannot write {wandb_report.FILE}: {reason}")
