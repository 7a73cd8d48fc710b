"""``scalewise report PATH...``: the report of a run or a sweep, written again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scalewise.errors import ConfigError
from scalewise.reports import page


def main(arguments: Sequence[str]) -> int:
    """Writes ``report.html`` into each folder given and prints its path."""
    if not arguments:
        raise ConfigError.one("", "", "no folder given", "scalewise report runs/NAME/TIMESTAMP")
    for argument in arguments:
        folder = Path(argument).expanduser()
        if not folder.is_dir():
            raise ConfigError.one("", "", f"{argument} is no folder")
        print(page.write(folder), file=sys.stdout)
    return 0
