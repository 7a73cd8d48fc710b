"""Suites of benchmark cases: chosen by name, within a time limit, resumed case by case."""

from __future__ import annotations

import gc
import hashlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from scalewise.bench.options import BenchOptions
from scalewise.bench.suite_table import Aim, aims_table
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ConfigIssue, Interrupted, ScalewiseError
from scalewise.hardware import DeviceKind
from scalewise.launch.outcomes import outcome_of_exception
from scalewise.launch.status_file import git_state, machine_facts
from scalewise.run_config import RunConfig

Entry = dict[str, Any]
"""Result of one case in a record: status, figures and versions."""
Compose = Callable[[Sequence[str]], RunConfig]
"""Function that composes a run from overrides."""

MIN_TIMEOUT_SECONDS = 120.0
TIMEOUT_FACTOR = 5.0
"""Time after which a case is stopped, relative to its estimated duration."""


class Case(Protocol):
    """Measurement of a suite."""

    @property
    def name(self) -> str:
        """Name in records, ``GROUP/CASE``."""

    @property
    def seconds(self) -> float:
        """Estimated duration, in seconds."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that define the case."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Measure the composed run in ``folder``, a new folder, and return the figures.

        Raises:
            CaseError: The case is skipped, or its run failed.
        """

    def describe(self, entry: Entry) -> str:
        """Figures of a successful case in one line."""


class CaseError(ScalewiseError):
    """A case without a result.

    Args:
        status: ``skipped``, or the status of the failed run.
        reason: Reason of the status.
        log_tail: Last lines of the traceback.
    """

    def __init__(self, status: str, reason: str, log_tail: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.status, self.reason, self.log_tail = status, reason, tuple(log_tail)


@dataclass(frozen=True)
class SuiteOptions(BenchOptions):
    """Options of a suite."""

    record: bool = True
    """Whether results are written to ``experiments/records``, from which the suite resumes."""
    cases: str = "*"
    """Names of the cases to measure: glob patterns, separated by commas."""
    minutes: float | None = None
    """Time limit, in minutes: cases that are expected to exceed it are left for the next call."""
    rerun: bool = False
    """Whether cases are measured again that the record contains."""
    changed: bool = True
    """Whether successful cases are measured again after a change of code, torch or device."""


def select_cases(cases: Sequence[Case], patterns: str) -> list[Case]:
    """Cases whose name matches one of the patterns, in the order of the suite.

    Raises:
        ConfigError: A pattern matches no case.
    """
    globs = patterns.split(",")
    unmatched = [glob for glob in globs if not any(fnmatch(case.name, glob) for case in cases)]
    if unmatched:
        fix = "use names of " + ", ".join(case.name for case in cases)
        raise ConfigError(
            [ConfigIssue("cases", glob, "matches no case", fix) for glob in unmatched]
        )
    return [case for case in cases if any(fnmatch(case.name, glob) for glob in globs)]


@dataclass(frozen=True)
class Suite:
    """Cases, the aims of their figures, and the table that shows them."""

    cases: Sequence[Case]
    """Cases in the order in which they are measured."""
    aims: Sequence[Aim]
    """Bounds of figures."""
    table: Callable[[Mapping[str, Entry]], Sequence[str]]
    """Function that renders the entries as lines."""
    device: DeviceKind | None = None
    """Device that the cases require; None: any."""

    def iter_results(
        self,
        options: SuiteOptions,
        compose: Compose,
        overrides: Sequence[str],
        folder: Path,
        recorded: Mapping[str, Entry],
    ) -> Iterator[dict[str, object]]:
        """Measure the cases; yield entries and aims after each, and print the tables at the end.

        A failed case does not stop the others. Entries of ``recorded`` are kept until their case
        is measured again.

        Args:
            options: Options of the suite.
            compose: Function that composes a run from overrides.
            overrides: Overrides of all cases, after their own.
            folder: Folder of the runs.
            recorded: Entries of earlier calls by name.

        Raises:
            ConfigError: No case has such a name, or the device is not that of the suite.
            Interrupted: A signal stopped a case, which is not recorded.
            ScalewiseError: The device cannot be used after a failed case.
        """
        self._check_device(compose(["tracking=none", *overrides]).hardware.device)
        entries, environment, start = dict(recorded), current_environment(), time.monotonic()
        chosen = [
            (case, [*case.overrides, *overrides])
            for case in select_cases(self.cases, options.cases)
        ]
        pending = [
            (case, case_overrides)
            for case, case_overrides in chosen
            if not _is_recorded(entries.get(case.name, {}), case_overrides, environment, options)
        ]
        if done := len(chosen) - len(pending):
            print_lines(f"{done} of {len(chosen)} cases are recorded; rerun=true repeats them")
        for number, (case, case_overrides) in enumerate(pending, 1):
            elapsed = time.monotonic() - start
            head = f"[{elapsed:4.0f} s] {number}/{len(pending)} {case.name}"
            estimate = f"about {case.seconds:.0f} s"
            if options.minutes is not None and elapsed + case.seconds > 60 * options.minutes:
                print_lines(f"{head}: not started, {estimate} exceed the time limit")
                continue
            print_lines(f"{head}: {estimate}")
            entry = _measure_case(case, case_overrides, compose, folder) | environment
            text = case.describe(entry) if entry["status"] == "ok" else entry["reason"]
            print_lines(f"  {entry['status']} in {entry['case_s']:.0f} s: {text}")
            entries |= {case.name: entry}
            yield self._record(entries)
            _release_memory(case)
        record = self._record(entries)
        yield record
        print_lines("", *self.table(record["cases"]))
        if self.aims:
            print_lines("", *aims_table(record["aims"]))

    def _record(self, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """Entries in the order of the suite, and the aims with their figures."""
        names = [case.name for case in self.cases]
        ordered = {name: entries[name] for name in names if name in entries}
        return {"cases": ordered, "aims": [aim.evaluate(ordered) for aim in self.aims]}

    def _check_device(self, device: DeviceKind) -> None:
        if self.device not in (None, device):
            fix = "run it on a machine with such a device; see `scalewise doctor`"
            raise ConfigError.for_key("hardware", device, f"requires {self.device}", fix)


def _is_recorded(
    entry: Entry, overrides: Sequence[str], environment: Entry, options: SuiteOptions
) -> bool:
    """Whether the recorded entry of a case makes its measurement unnecessary."""
    is_noisy = entry.get("status") == "noisy"
    if options.rerun or is_noisy or entry.get("overrides") != overrides:
        return False
    if not options.changed and entry["status"] == "ok":
        return True
    return all(entry.get(key) == environment[key] for key in ("source", "torch", "device"))


def _measure_case(case: Case, overrides: Sequence[str], compose: Compose, folder: Path) -> Entry:
    start, date = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    try:
        run = compose(overrides)
        with _time_limit(max(MIN_TIMEOUT_SECONDS, TIMEOUT_FACTOR * case.seconds)):
            result = {"status": "ok", **case.measure(run, folder / case.name)}
    except Interrupted:
        raise
    except CaseError as error:
        result = {"status": error.status, "reason": error.reason, "log_tail": error.log_tail}
    except Exception as error:  # recorded
        outcome = outcome_of_exception(error, None)
        result = {"status": outcome.status, "reason": outcome.reason, "log_tail": outcome.log_tail}
    return {**result, "overrides": overrides, "case_s": time.monotonic() - start, "date": date}


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise ``CaseError`` in the block after ``seconds``, in Python code of this thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise CaseError("timeout", f"stopped after {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def _release_memory(case: Case) -> None:
    """Free the memory and the compiled code of a case."""
    gc.collect()
    torch.compiler.reset()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    except RuntimeError as error:
        reason = f"the device cannot be used after {case.name} ({error}); run the command again"
        raise ScalewiseError(reason) from error


def current_environment() -> Entry:
    """Code, torch and device of this process, which an entry records."""
    on_cuda = torch.cuda.is_available()
    return {
        "source": source_hash(Path(__file__).parents[1]),
        "git_commit": git_state()["git_commit"],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_cuda else machine_facts()["processor"],
    }


def source_hash(package: Path) -> str:
    """Hash of the code and of the config files, which also identifies a copy without git."""
    files = (*package.rglob("*.py"), *package.rglob("*.yaml"))
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((*files, *(package.parents[1] / "conf").rglob("*.yaml"))):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
