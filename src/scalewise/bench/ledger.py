"""The planner's ledger beside what small runs hold here, and beside a trace of large ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scalewise.bench import ledger_lines as lines
from scalewise.bench import ledger_worlds as worlds
from scalewise.bench import options
from scalewise.bench.planner import summary
from scalewise.errors import Interrupted, ScalewiseError
from scalewise.launch.job import Order, execute
from scalewise.output import print_lines
from scalewise.plan import memory
from scalewise.run import Run
from scalewise.units import bytes_text


def _named(name: str, base: lines.Line, further: Iterable[lines.Line]) -> dict[str, lines.Line]:
    return {" ".join((name, *line)): (*base, *line) for line in further}


_TRAINED = _named("small", lines.SMALL, (*lines.TRAINED, *lines.TRAINED_SELDOM))
_ZERO = _named("small", lines.SMALL, lines.ZERO if find_spec("deepspeed") else ())
RUNS: Mapping[str, tuple[str, ...]] = _TRAINED | _ZERO
WORLDS: Mapping[str, tuple[str, ...]] = _named(
    "large", worlds.LARGE, (*worlds.TRACED, *worlds.TRACED_SELDOM)
)


@dataclass(frozen=True)
class Options(options.Options):
    """What can be chosen."""

    traced: bool = True
    """Whether large runs are traced as well, which takes some minutes."""


@dataclass(frozen=True)
class Row:
    """One run: the most that a rank holds, foreseen and found, bytes."""

    line: str
    foreseen: int
    found: int
    fullest: str
    """The moment of a step at which the ledger has the most."""

    @property
    def error(self) -> float:
        """Returns how much too high the ledger is, as a share of what was found."""
        return self.foreseen / self.found - 1


def measure(runs: Mapping[str, Run], options: Options, folder: Path) -> dict[str, object]:
    """Trains the small runs, traces the large ones, prints each and returns all."""
    result: dict[str, object] = {}
    for title, names in (("trained", _TRAINED), ("deepspeed", _ZERO)):
        if names:
            chosen = {name: runs[name] for name in names}
            result[title] = _told(title, _trained(chosen, folder))
    if options.traced:
        result["traced"] = _told("traced", _traced({name: runs[name] for name in WORLDS}))
    return result


def _trained(runs: Mapping[str, Run], folder: Path) -> Iterator[Row]:
    for name, run in runs.items():
        foreseen = memory.worst(run)
        yield Row(name, foreseen.peak, _found(name, run, folder), foreseen.fullest)


def _found(name: str, run: Run, folder: Path) -> int:
    """Returns the most that a rank held, bytes."""
    result = execute(Order(run), folder / "run")
    if result.status == "interrupted":
        raise Interrupted(result.exit_code - 128, f"{result.reason}; nothing was written")
    if result.status != "ok":
        raise ScalewiseError(f"{name}: {result.status}: {result.reason}")
    shutil.rmtree(result.folder)
    return int(result.summary["metrics"]["memory/peak_bytes"])


def _traced(runs: Mapping[str, Run]) -> Iterator[Row]:
    from scalewise.training.trace import on_cpu, traced

    for name, run in runs.items():
        foreseen = memory.worst(on_cpu(run))
        yield Row(name, foreseen.peak, traced(run).peak, foreseen.fullest)


def _told(title: str, rows: Iterator[Row]) -> dict[str, object]:
    """Prints the rows as they come, and returns them with what their errors are together."""
    print_lines(f"{title}:", f"{'foreseen':>11}{'found':>11}{'error':>9}  line")
    kept = []
    for row in rows:
        kept.append(row)
        foreseen, found = bytes_text(row.foreseen), bytes_text(row.found)
        print_lines(f"{foreseen:>11}{found:>11}{row.error:>+9.2%}  {row.line}")
    errors = summary([abs(row.error) for row in kept])
    print_lines("{rows} rows: median {median:.2%}, worst {worst:.2%}".format(**errors), "")
    return {"errors": errors, "rows": [vars(row) | {"error": row.error} for row in kept]}
