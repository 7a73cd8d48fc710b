"""Writes reports in both renderings: ``report.html`` and ``report_spec.json``."""

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
    """Writes the reports of runs and sweeps into their folders; returns the pages' paths.

    Those that W&B has runs of, or will have, get a W&B report as well. A report that cannot be
    written is told of and left out. Raises :class:`scalewise.errors.ScalewiseError` for a folder
    that is neither run nor sweep, before anything is written.
    """
    read = {folder: records.read_record(folder) for folder in folders}
    reports, pages = dict[Path, report_model.ReportModel](), list[Path]()
    for folder, record in read.items():
        with report_errors(f"no report of {folder}"):
            reports[folder] = report_model.build_report(record)
    tracked = [
        folder for folder, report in reports.items() if wandb_report.wandb_run_ids(report.record)
    ]
    with _write_wandb_reports(tracked):
        for folder, report in reports.items():
            with report_errors(f"no report of {folder}"):
                pages.append(page.save_page(report, folder))
    return pages


@contextmanager
def _write_wandb_reports(folders: Sequence[Path]) -> Iterator[None]:
    """Writes the W&B reports meanwhile, in a process of its own: its packages load for a second."""
    if not folders:
        yield
        return
    line = [sys.executable, "-P", "-m", wandb_report.__name__, *map(str, folders)]
    try:
        beside = subprocess.Popen(  # noqa: S603 (a list of our own words)
            line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        print_lines(f"no {wandb_report.FILE}: {describe_exception(error)}")
        yield
        return
    with beside:
        yield
        _, said = beside.communicate()
    if beside.returncode:
        print_lines(f"no {wandb_report.FILE}: {(said.splitlines() or ['no word why'])[-1]}")
