"""``scalewise plan`` as a user types it."""

from __future__ import annotations

import pytest
from fixtures.doors import UNTRACKED, Doors
from fixtures.layouts import LLAMA_8B

from scalewise.units import GIB


def test_what_does_not_fit_is_told_with_its_cure(scalewise: Doors) -> None:
    ended = scalewise(*LLAMA_8B, "trainer.micro_batch=8", verb="plan")
    assert ended.code == 3, ended.said
    assert "Out of memory: " in ended.out
    (line,) = [line for line in ended.out.splitlines() if line.startswith("scalewise train")]
    again = scalewise(*line.split()[2:], verb="plan").ok()
    assert "Fits: " in again.out
    assert "tok/s" in again.out
    assert not (scalewise.cwd / "runs").exists()


def test_a_grid_is_one_table(scalewise: Doors) -> None:
    axes = ("precision=fp32,bf16_mixed", "memory=none,checkpoint_full")
    rest = [part for part in LLAMA_8B if not part.startswith("precision")]
    ended = scalewise("-m", *rest, *axes, "trainer.micro_batch=1", verb="plan")
    assert ended.code == 3  # of the first row
    head, *rows, _, summed = ended.out.splitlines()
    assert head.split()[:3] == ["precision", "memory", "fit"]
    assert [row.split()[:2] for row in rows] == [
        [precision, memory]
        for precision in ("fp32", "bf16_mixed")
        for memory in ("none", "checkpoint_full")
    ]
    assert summed.startswith("4 jobs; 1 does not fit (skipped with launch.refuse_unfit=true); ")
    assert "in sequence; $" in summed
    assert not (scalewise.cwd / "runs").exists()


def test_a_trace_asks_the_code_itself(scalewise: Doors) -> None:
    line = (*LLAMA_8B, "trainer.micro_batch=1", "plan.method=trace")
    ended = scalewise(*line, verb="plan").ok()
    told = "Traced rank 0 with 4 and 6 layers: "
    (line_of_trace,) = [line for line in ended.out.splitlines() if line.startswith(told)]
    assert "0.0% (CPU operators)" in line_of_trace
    ended = scalewise(*UNTRACKED, "parallelism=ddp", "plan.method=trace", verb="plan").ok()
    assert "Analytic prediction only, no trace: ddp requires real memory" in ended.out


def test_a_search_ends_in_a_line_that_trains(scalewise: Doors) -> None:
    line = ("model=llama_160m", "hardware=h100", "data=synthetic", "trainer.global_batch=8")
    ended = scalewise(*line, "plan.search=memory", verb="plan").ok()
    assert "Alternatives that differ in one choice" in ended.out
    (line,) = [line for line in ended.out.splitlines() if line.startswith("scalewise train")]
    assert "Fits: " in scalewise(*line.split()[2:], verb="plan").ok().out
    assert not (scalewise.cwd / "runs").exists()


def test_a_search_that_finds_nothing_says_what_comes_nearest(scalewise: Doors) -> None:
    line = ("model=llama3_70b", "hardware=rtx4090", "data=synthetic", "plan.search=memory")
    ended = scalewise(*line, verb="plan")
    assert ended.code == 3, ended.said
    assert "Nothing fits" in ended.out
    assert "it needs" in ended.out


def test_a_table_shows_the_best_of_each_job(scalewise: Doors) -> None:
    models = "model=llama_160m,tinyllama_1b"
    line = ("-m", models, "hardware=h100", "data=synthetic", "plan.search=memory")
    head, *rows, blank, told = scalewise(*line, verb="plan").ok().out.splitlines()
    assert "overrides" in head
    assert blank == ""
    assert told.startswith("2 jobs")
    assert len(rows) == 2
    assert all("trainer.micro_batch=" in row for row in rows)


@pytest.mark.parametrize(
    "line", [(), pytest.param(("-m", "seed=1,2"), marks=pytest.mark.exhaustive)]
)
def test_train_makes_a_run_fit(line: tuple[str, ...], scalewise: Doors) -> None:
    small = ("trainer.micro_batch=16", "hardware.memory_gib=0.0025", "plan.fit=auto")
    ended = scalewise(*line, *UNTRACKED, *small).ok()
    assert "plan.fit=auto: trainer.micro_batch=" in ended.out
    (folder,) = ended.folders
    for job in folder.jobs if line else [folder]:
        assert job.resolved["trainer"]["micro_batch"] < 16
        assert job.json("plan.json")["plan/peak_bytes"] < 0.0025 * GIB


def test_train_does_not_start_what_nothing_makes_fit(scalewise: Doors) -> None:
    line = (*UNTRACKED, "hardware.memory_gib=0.0001", "plan.fit=auto")
    scalewise(*line).refused("plan.fit=auto", "of 104.86 KiB")
    scalewise("-m", "seed=1,2", *line).refused("plan.fit=auto", "job 0:", "job 1:")
    assert not (scalewise.cwd / "runs").exists()


def test_a_table_in_which_nothing_fits_says_so_at_its_end(scalewise: Doors) -> None:
    line = ("-m", "experiment=smoke", "hardware.memory_gib=0.001,0.002")
    assert scalewise(*line, verb="plan").code == 3


def test_a_line_that_train_refuses_is_refused(scalewise: Doors) -> None:
    scalewise("modle=x", verb="plan").refused("did you mean model?")
    scalewise(*LLAMA_8B, "trainer.micro_batch=0", verb="plan").refused("trainer.micro_batch=0")
    assert not (scalewise.cwd / "runs").exists()
