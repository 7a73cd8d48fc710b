"""``scalewise bench NAME``: benchmarks of this machine and of scalewise on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from scalewise.bench import record
from scalewise.bench.options import BenchOptions, split_options
from scalewise.config.compose import compose
from scalewise.config.run_folders import missing_folders, remove_empty
from scalewise.console import print_lines
from scalewise.errors import ConfigError
from scalewise.launch import signals
from scalewise.launch.job import claim_folder
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json
from scalewise.typed_override import command_line

BENCHMARKS = {
    "all": "cpu_cases",
    "collectives": "collectives",
    "gpu": "gpu_cases",
    "ledger": "memory_accuracy",
    "parallel": "parallel",
    "planner": "compare_published",
    "slow_link": "slow_link",
    "sweep": "sweep",
}
"""Module in ``scalewise.bench`` by benchmark name."""


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark, write its result below runs/ and print the paths; exit code 0."""
    name, *bench_arguments = arguments or [""]
    if name not in BENCHMARKS:
        fix = f"scalewise bench {'|'.join(BENCHMARKS)} [overrides]"
        raise ConfigError.for_key(
            "", "", f"unknown benchmark {name!r}" if name else "no benchmark given", fix
        )
    bench_arguments = _as_overrides(bench_arguments)
    if flags := [argument for argument in bench_arguments if argument.startswith("-")]:
        raise ConfigError.for_key(
            "", "", f"{flags[0]} is not supported: bench accepts overrides only"
        )
    with signals.raise_on_signals("while measuring"):
        benchmark: Any = import_module(f"scalewise.bench.{BENCHMARKS[name]}")
        options, overrides = split_options(bench_arguments, benchmark.OPTIONS)
        runs = {
            label: compose((*benchmark_overrides, *overrides))
            for label, benchmark_overrides in benchmark.RUNS.items()
        }
        planned_runs = getattr(benchmark, "WORLDS", {}).items()
        runs |= {
            label: compose((*benchmark_overrides, *overrides), check_machine=False)
            for label, benchmark_overrides in planned_runs
        }
        hardware = next(iter(runs.values())).hardware
        record_file = record.record_path(name, hardware) if options.record else None
        proposed = Path("runs") / f"bench_{name}" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
        created_folders = missing_folders(proposed)
        folder = claim_folder(proposed)
        paths = (folder / f"{name}.json", *([record_file] if record_file else []))
        try:
            for result in _iter_results(benchmark, runs, options, folder, record_file, overrides):
                content = record.build_record(result, command_line("bench", tuple(arguments)))
                for path in paths:
                    record.write_record(path, content)
        except BaseException:
            if not paths[0].exists():
                shutil.rmtree(folder)
                remove_empty(created_folders)
            raise
        print_lines(*(f"result {path}" for path in paths))
        if record_file:
            compose_any = partial(compose, check_machine=False)
            for document in record.documents(Path()):
                record.update_figures(document, record.RECORDS, compose_any)
    return 0


def _iter_results(
    benchmark: Any,
    runs: Mapping[str, RunConfig],
    options: BenchOptions,
    folder: Path,
    record_file: Path | None,
    overrides: Sequence[str],
) -> Iterator[dict[str, object]]:
    """Measure; yield the only result, or the results of a suite after each of its cases."""
    if not hasattr(benchmark, "SUITE"):
        yield benchmark.measure(runs, options, folder)
        return
    recorded = read_json(record_file).get("cases", {}) if record_file else {}
    yield from benchmark.SUITE.iter_results(options, compose, overrides, folder, recorded)


def _as_overrides(arguments: Sequence[str]) -> list[str]:
    """Rewrite ``--data FILE`` as ``data=FILE``."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "--data":
            joined[-1] = f"data={argument}"
        else:
            joined.append(
                argument.removeprefix("--") if argument.startswith("--data=") else argument
            )
    return joined
