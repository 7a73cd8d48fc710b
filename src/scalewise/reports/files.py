"""Writes reports in both renderings: ``report.html`` and ``report_spec.json``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scalewise.failures import describe, survived
from scalewise.output import print_lines
from scalewise.reports import outline, page, records, wandb_report


def write(folders: Sequence[Path]) -> list[Path]:
    """Writes the reports of runs and sweeps into their folders; returns the pages' paths.

    Those that W&B has runs of, or will have, get a W&B report as well. A report that cannot be
    written is told of and left out. Raises :class:`scalewise.errors.ScalewiseError` for a folder
    that is neither run nor sweep, before anything is written.
    """
    read = {folder: records.read(folder) for folder in folders}
    reports, pages = dict[Path, outline.Outline](), list[Path]()
    for folder, record in read.items():
        with survived(f"no report of {folder}"):
            reports[folder] = outline.of(record)
    tracked = [folder for folder, report in reports.items() if wandb_report.ids(report.record)]
    with _wandb_reports(tracked):
        for folder, report in reports.items():
            with survived(f"no report of {folder}"):
                pages.append(page.save(report, folder))
    return pages


@contextmanager
def _wandb_reports(folders: Sequence[Path]) -> Iterator[None]:
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
        print_lines(f"no {wandb_report.FILE}: {describe(error)}")
        yield
        return
    with beside:
        yield
        _, said = beside.communicate()
    if beside.returncode:
        print_lines(f"no {wandb_report.FILE}: {(said.splitlines() or ['no word why'])[-1]}")
