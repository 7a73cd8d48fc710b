"""Jobs that go wrong: the sweep goes on, each status says what happened, nothing stays behind."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fixtures.doors import TINY, UNTRACKED, Doors, Ended, Opened, same_weights
from fixtures.jobs import Job

ACCIDENTS = {
    "none": ("ok", 0, ""),
    "raise": ("failed", 1, "RuntimeError: injected: this job raises on purpose"),
    "oom": ("out_of_memory", 3, ""),
    "hang": ("timeout", 4, "ran longer than launch.timeout=10 s"),
    "kill": ("failed", 1, "was killed by SIGKILL"),
}
LONG = pytest.mark.exhaustive
LIMIT = "launch.timeout=10"


@pytest.fixture(scope="module")
def sweep(doors_in: Callable[[str], Doors]) -> tuple[Ended, Opened]:
    """Five jobs, four accidents, W&B offline."""
    doors = doors_in("faults")
    door = doors.start("-m", *TINY, "trainer.max_steps=5", LIMIT, f"+inject={','.join(ACCIDENTS)}")
    return door.wait(), door


def test_every_job_has_its_status(sweep: tuple[Ended, Opened]) -> None:
    ended, _ = sweep
    for job, (status, code, reason) in zip(ended.folder.jobs, ACCIDENTS.values(), strict=True):
        said = job.status
        assert (said["status"], said["exit_code"]) == (status, code), said["reason"]
        assert reason in said["reason"]
        assert not (job.path / ".ranks").exists()
        assert (job.path / "report.html").is_file()


def test_the_sweep_says_so_too(sweep: tuple[Ended, Opened]) -> None:
    ended, _ = sweep
    record = ended.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == [s for s, _, _ in ACCIDENTS.values()]
    assert record["varying"] == {"inject": list(ACCIDENTS)}
    assert record["ended"] is not None
    assert ended.folder.path.joinpath("report.html").is_file()


def test_the_door_closes_with_failure_and_without_a_traceback(
    sweep: tuple[Ended, Opened],
) -> None:
    ended, _ = sweep
    assert ended.code == 1
    assert "Traceback" not in ended.said
    assert "job 2 out_of_memory" in ended.out


def test_no_process_is_left(sweep: tuple[Ended, Opened]) -> None:
    _, door = sweep
    assert door.leftovers(within=2) == []


def test_a_failed_rank_keeps_its_last_lines(sweep: tuple[Ended, Opened]) -> None:
    ended, _ = sweep
    assert any("inject.py" in line for line in ended.folder.jobs[1].status["log_tail"])


@pytest.mark.parametrize(
    ("accident", "status", "reason"),
    [
        ("raise", "failed", "RuntimeError: injected"),
        ("kill", "failed", "rank 1 was killed by SIGKILL"),
        ("hang", "timeout", "ran longer than launch.timeout=8 s"),
        ("oom", "out_of_memory", ""),
    ],
)
def test_an_accident_of_one_rank_ends_the_others(
    accident: str, status: str, reason: str, job: Job
) -> None:
    job("parallelism=ddp")  # warm
    began = time.monotonic()
    where = ["parallelism=ddp", f"+inject={accident}", "callbacks.inject.rank=1"]
    noticed = 8 if accident == "hang" else 0  # seconds: nothing but the clock tells of it
    if noticed:
        where.append(f"launch.timeout={noticed}")
    said = job(*where, status=status).status
    assert time.monotonic() - began < noticed + 15
    assert reason in said["reason"]
    assert said["rank"] == (1 if accident != "hang" else None)
    if accident == "hang":  # both stand still; the stacks tell which waits for the other
        assert any("rank 1: " in line and "in happen" in line for line in said["log_tail"])


@pytest.mark.parametrize(
    ("layout", "accident"),
    [("single", "raise"), ("ddp", "kill"), pytest.param("single", "hang", marks=LONG)],
)
def test_a_restart_mends_what_happens_once(layout: str, accident: str, job: Job) -> None:
    parts = (f"parallelism={layout}", "checkpoint.every=2")
    undisturbed = job(*parts)
    once = (f"+inject={accident}", "+callbacks.inject.once=true", "callbacks.inject.step=5")
    mended = job(*parts, *once, "launch.max_restarts=1", "launch.timeout=8")
    assert mended.status["attempts"] == 2
    assert mended.steps == list(range(1, 9))
    assert mended.column("val/loss") == undisturbed.column("val/loss")
    assert same_weights(mended.weights(8), undisturbed.weights(8))


def test_restarts_are_counted(job: Job) -> None:
    said = job("+inject=raise", "launch.max_restarts=2", status="failed").status
    assert said["attempts"] == 3


def test_an_address_space_that_is_too_small(job: Job) -> None:
    wide = ("model.width=2048", "model.feedforward=16384", "launch.memory_limit_gib=2")
    said = job(*wide, status="out_of_memory").status
    assert "launch.memory_limit_gib=null" in [cure["override"] for cure in said["cures"]]


def test_a_callback_that_cannot_be_made_is_refused(job: Job) -> None:
    bad = "callbacks.guard.factor=0.5"
    assert "callbacks.guard" in job(bad, status="refused").status["reason"]


def test_data_refused_within_a_sweep_stops_nobody(scalewise: Doors) -> None:
    (scalewise.cwd / "empty.txt").write_text("")
    small = [part for part in UNTRACKED if "megabytes" not in part]
    for name in ("full.txt", "more.txt"):
        (scalewise.cwd / name).write_text("word after word " * 4000)
    ended = scalewise(
        "-m", *small, "data=text", "data.vocabulary=300",
        "data.paths=[empty.txt],[full.txt,more.txt]", "trainer.max_steps=3",
    )  # fmt: skip
    record = ended.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["refused", "ok"], ended.said
    assert ended.code == 2
