"""``scalewise status FOLDER...``: the jobs of sweeps and runs as they stand; live on a terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise.console import MISSING, get_console
from scalewise.errors import ConfigError
from scalewise.launch import job_progress
from scalewise.launch.job_progress import JobProgress
from scalewise.tracking.sweep_record import release_reserved
from scalewise.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

PAUSE = 2.0
"""Seconds between two looks."""
SILENCE = 60.0
"""Seconds without a sign of a running job that are worth a word."""
STYLES = {
    "ok": "green",
    "pruned": "green",
    "running": "cyan",
    "queued": "dim",
    "interrupted": "yellow",
}


def main(arguments: Sequence[str]) -> int:
    """Prints a table for each folder, again and again on a terminal until all jobs have ended."""
    if not arguments:
        raise ConfigError.for_key("", "", "no folder given", "scalewise status runs/NAME/TIMESTAMP")
    folders = [Path(argument).expanduser() for argument in arguments]
    for folder in folders:
        release_reserved(folder)
    console = get_console()
    if not sys.stdout.isatty():
        console.print(status_tables(folders)[0])
        return 0
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            table, under_way = status_tables(folders)
            live.update(table, refresh=True)
            if not under_way:
                break
            time.sleep(PAUSE)
    return 0


def status_tables(folders: Sequence[Path]) -> tuple[RenderableType, bool]:
    """Returns the tables of these folders, and whether any of their jobs goes on."""
    from rich.console import Group

    from scalewise.plain_console import styled_text

    parts: list[RenderableType] = []
    under_way = False
    for folder in folders:
        jobs = job_progress.read_progress(folder)
        under_way = under_way or any(job.is_active for job in jobs)
        counts = Counter(job.state for job in jobs)
        said = ", ".join(f"{count} {state}" for state, count in counts.items())
        parts += [styled_text(f"{folder}: {said}"), job_table(jobs)]
    return Group(*parts), under_way


def job_table(jobs: Sequence[JobProgress]) -> RenderableType:
    """Returns one row a job: what it varies, how it stands, how far it is."""
    from rich.table import Table

    from scalewise.plain_console import styled_text

    grid = Table(box=None, pad_edge=False, header_style="dim")
    grid.add_column("job", justify="right")
    keys = list(dict.fromkeys(key for job in jobs for key in job.varied))
    for key in keys:
        grid.add_column(key, overflow="fold")
    grid.add_column("status")
    for name in ("step", "loss", "left"):
        grid.add_column(name, justify="right")
    grid.add_column("", overflow="fold")
    for job in jobs:
        grid.add_row(
            MISSING if job.number is None else str(job.number),
            *(job.varied.get(key, "") for key in keys),
            styled_text((job.state, STYLES.get(job.state, "red"))),
            MISSING if job.step is None else f"{job.step}/{job.steps or '?'}",
            MISSING if job.loss is None else f"{job.loss:.4f}",
            MISSING if job.seconds_left is None else format_seconds(job.seconds_left),
            job_remark(job),
        )
    return grid


def job_remark(job: JobProgress) -> str:
    """Returns what else there is to say of a job."""
    words = [f"attempt {job.attempts}"] if job.attempts > 1 else []
    if job.seconds_silent is not None and job.seconds_silent > SILENCE:
        words.append(f"silent for {format_seconds(job.seconds_silent)}")
    if job.reason and job.state != "running":
        words.append(job.reason)
    return "; ".join(words)
