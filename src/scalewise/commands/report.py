"""``scalewise report FOLDER...``: write the reports of runs and sweeps again."""

from __future__ import annotations

from collections.abc import Sequence

from scalewise import regular_files
from scalewise.console import print_lines
from scalewise.errors import EXIT_CODES, ConfigError, ConfigIssue
from scalewise.reports import html_report
from scalewise.tracking.sweep_record import release_reserved


def main(arguments: Sequence[str]) -> int:
    """Write ``report.html`` and ``report_spec.json`` to each folder and print the paths."""
    if not arguments:
        raise ConfigError.for_key("", "", "no folder given", "scalewise report runs/NAME/TIMESTAMP")
    folders = [regular_files.expand_home(argument) for argument in arguments]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise ConfigError(ConfigIssue("", "", f"{name} is not a folder") for name in missing)
    for folder in folders:
        release_reserved(folder)
    pages = html_report.write_reports(folders)
    for path in pages:
        print_lines(path)
    return 0 if len(pages) == len(folders) else EXIT_CODES["failed"]
