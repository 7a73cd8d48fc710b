"""``sweep.json`` of a sweep in which no job could start."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scalewise.errors import ConfigError, Interrupted
from scalewise.launch.executor import StartCallback, SweepTask
from scalewise.launch.job import JobSpec, Result
from scalewise.launch.sweep_runner import execute_all
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json, write_json
from scalewise.sweep_question import SweepQuestion

NO_CALLBACKS: dict[str, Any] = {"on_start": lambda *_: None, "on_end": lambda *_: None}


class EndsAtOnce:
    """Executor that stops before its first job starts."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        self._end()
        raise AssertionError("it continues")
        yield  # a generator, as in executors


def refuse() -> None:
    raise ConfigError.for_key("hydra/launcher", "slurm", "no such partition")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def tasks(compose: Callable[..., RunConfig], tmp_path: Path) -> list[SweepTask]:
    return [
        SweepTask(number, JobSpec(compose(f"seed={number + 1}"), varied={}), tmp_path / str(number))
        for number in range(2)
    ]


def test_rejected_sweep_leaves_no_record(tasks: list[SweepTask], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        execute_all(
            tasks,
            tmp_path,
            EndsAtOnce(refuse),
            command="",
            question=SweepQuestion(""),
            **NO_CALLBACKS,
        )
    assert not (tmp_path / "sweep.json").exists()


def test_resumed_sweep_keeps_its_record(tasks: list[SweepTask], tmp_path: Path) -> None:
    before = {"jobs": [], "process": {}, "question": "Why?"}
    write_json(tmp_path / "sweep.json", before)
    with pytest.raises(ConfigError):
        execute_all(
            tasks,
            tmp_path,
            EndsAtOnce(refuse),
            command="",
            question=SweepQuestion(""),
            **NO_CALLBACKS,
        )
    assert read_json(tmp_path / "sweep.json") == before


def test_signal_before_the_first_job_is_recorded(tasks: list[SweepTask], tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="SIGINT between the jobs of the sweep"):
        execute_all(
            tasks,
            tmp_path,
            EndsAtOnce(interrupt),
            command="",
            question=SweepQuestion(""),
            **NO_CALLBACKS,
        )
    record = read_json(tmp_path / "sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["interrupted"] * 2  # type: ignore[attr-defined]  # JSON
