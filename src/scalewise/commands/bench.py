"""``scalewise bench NAME``: measures this machine, or the suite on it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import cast

from scalewise.bench import readme_figures, record
from scalewise.bench.options import Benchmark, split_options
from scalewise.config.compose import compose
from scalewise.config.new_folders import missing_folders, remove_empty
from scalewise.console import print_lines
from scalewise.errors import ConfigError
from scalewise.launch import signals
from scalewise.launch.job import claim_folder
from scalewise.typed_override import command_line

BENCHMARKS = {
    "collectives": "collectives",
    "ledger": "memory_accuracy",
    "parallel": "parallel",
    "planner": "compare_published",
    "slow_link": "slow_link",
    "sweep": "sweep",
}
"""Module of each benchmark in ``scalewise.bench``, by the name that users type."""


def main(arguments: Sequence[str]) -> int:
    """Runs one benchmark into a folder under runs/ and prints what it found; exit code 0."""
    name, *words = arguments or [""]
    if name not in BENCHMARKS:
        fix = f"scalewise bench {'|'.join(BENCHMARKS)} [overrides]"
        raise ConfigError.for_key("", "", f"no benchmark {name!r}" if name else "no benchmark", fix)
    words = _as_overrides(words)
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError.for_key("", "", f"bench takes overrides, not {flags[0]}")
    with signals.raise_on_signals("while measuring"):
        benchmark = cast(Benchmark, import_module(f"scalewise.bench.{BENCHMARKS[name]}"))
        options, overrides = split_options(words, benchmark.OPTIONS)
        runs = {of: compose((*own, *overrides)) for of, own in benchmark.RUNS.items()}
        worlds = getattr(benchmark, "WORLDS", {}).items()
        runs |= {of: compose((*own, *overrides), here=False) for of, own in worlds}
        hardware = next(iter(runs.values())).hardware
        kept = record.record_path(name, hardware) if options.record else None
        planned = Path("runs") / f"bench_{name}" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
        absent = missing_folders(planned)
        folder = claim_folder(planned)
        try:
            result = benchmark.measure(runs, options, folder)
        except BaseException:
            shutil.rmtree(folder)
            remove_empty(absent)
            raise
        content = record.build_record(result, command_line("bench", tuple(arguments)))
        for path in (folder / f"{name}.json", *([kept] if kept else [])):
            record.write_record(path, content)
            print_lines(f"result {path}")
        if kept:
            for document in readme_figures.documents(Path()):
                readme_figures.update_figures(document, record.RECORDS)
    return 0


def _as_overrides(arguments: Sequence[str]) -> list[str]:
    """Returns ``--data FILE``, as many type it, as ``data=FILE``."""
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] == "--data":
            joined[-1] = f"data={word}"
        else:
            joined.append(word.removeprefix("--") if word.startswith("--data=") else word)
    return joined
