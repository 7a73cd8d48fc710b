"""``scalewise status FOLDER...``: progress of runs and sweeps; live on a terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise import regular_files
from scalewise.console import MISSING
from scalewise.errors import ConfigError
from scalewise.launch import job_progress
from scalewise.launch.job_progress import JobProgress
from scalewise.plain_console import get_console, styled_text
from scalewise.tracking.sweep_record import release_reserved
from scalewise.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_SECONDS = 2.0
"""Seconds between two updates."""
SILENT_SECONDS = 60.0
"""Seconds without a heartbeat of a running job after which the output mentions it."""
STYLES = {
    "ok": "green",
    "pruned": "green",
    "running": "cyan",
    "queued": "dim",
    "interrupted": "yellow",
}


def main(arguments: Sequence[str]) -> int:
    """Print a table for each folder; on a terminal, update it until all jobs have ended."""
    if not arguments:
        raise ConfigError.for_key("", "", "no folder given", "scalewise status runs/NAME/TIMESTAMP")
    folders = [regular_files.expand_home(argument) for argument in arguments]
    for folder in folders:
        release_reserved(folder)
    console = get_console()
    if not sys.stdout.isatty():
        console.print(status_tables(folders)[0])
        return 0
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            table, is_active = status_tables(folders)
            live.update(table, refresh=True)
            if not is_active:
                break
            time.sleep(REFRESH_SECONDS)
    return 0


def status_tables(folders: Sequence[Path]) -> tuple[RenderableType, bool]:
    """Build the tables of these folders; also return whether any job is active."""
    from rich.console import Group

    parts: list[RenderableType] = []
    is_active = False
    for folder in folders:
        jobs = job_progress.read_progress(folder)
        is_active = is_active or any(job.is_active for job in jobs)
        counts = Counter(job.state for job in jobs)
        summary = ", ".join(f"{count} {state}" for state, count in counts.items())
        parts += [styled_text(f"{folder}: {summary}"), job_table(jobs)]
    return Group(*parts), is_active


def job_table(jobs: Sequence[JobProgress]) -> RenderableType:
    """Table with one row per job: varied keys, status and progress."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("job", justify="right")
    keys = list(dict.fromkeys(key for job in jobs for key in job.varied))
    for key in keys:
        table.add_column(key, overflow="fold")
    table.add_column("status")
    for name in ("step", "loss", "left"):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold")
    for job in jobs:
        table.add_row(
            MISSING if job.number is None else str(job.number),
            *(job.varied.get(key, "") for key in keys),
            styled_text((job.state, STYLES.get(job.state, "red"))),
            MISSING if job.step is None else f"{job.step}/{job.steps or '?'}",
            MISSING if job.loss is None else f"{job.loss:.4f}",
            MISSING if job.seconds_left is None else format_seconds(job.seconds_left),
            job_remark(job),
        )
    return table


def job_remark(job: JobProgress) -> str:
    """Remark on a job: attempts, silence and failure reason."""
    remarks = [f"attempt {job.attempts}"] if job.attempts > 1 else []
    if job.seconds_silent is not None and job.seconds_silent > SILENT_SECONDS:
        remarks.append(f"silent for {format_seconds(job.seconds_silent)}")
    if job.reason and job.state != "running":
        remarks.append(job.reason)
    return "; ".join(remarks)
