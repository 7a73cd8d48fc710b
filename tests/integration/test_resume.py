"""A run that dies and is resumed ends as if nothing had happened: the same weights, bit by bit."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
from collections.abc import Callable

import pytest
from fixtures.doors import UNTRACKED, Doors, Folder, same_weights
from fixtures.jobs import Job

EVERY = "checkpoint.every=2"
IN_SAVE = (
    "trusted_packages=[fixtures]",
    "+callbacks.accident._target_=fixtures.accidents.KillInSave",
)
KINDS = {
    "single": (),
    "ddp": ("parallelism=ddp",),
    "accumulating": ("trainer.micro_batch=2",),
    "dropout": ("model.dropout=0.2",),
    "ddp_dropout": ("parallelism=ddp", "model.dropout=0.2"),
    "bf16_mixed": ("precision=bf16_mixed",),
    "bf16_true": ("precision=bf16_true",),
    "ema": ("callbacks=[guard,ema]", "callbacks.ema.decay=0.9"),
    "sgd": ("optimizer=sgd", "optimizer.lr=0.1"),
    "wsd": ("schedule=wsd",),
}

LONG = pytest.mark.exhaustive
USUAL = ["single", "ddp", "dropout", "bf16_mixed", "ema"]
SELDOM = [pytest.param(kind, marks=LONG) for kind in KINDS if kind not in USUAL]

Reference = Callable[[str], Folder]


@pytest.fixture(scope="module")
def kept() -> dict[str, Folder]:
    return {}


@pytest.fixture
def undisturbed(job: Job, kept: dict[str, Folder]) -> Reference:
    """Returns the uninterrupted run of a kind; each is trained once."""

    def reference(kind: str) -> Folder:
        if kind not in kept:
            kept[kind] = job(*KINDS[kind], at=f"reference-{kind}")
        return kept[kind]

    return reference


def assert_same(run: Folder, reference: Folder) -> None:
    """The same weights, and one row a step that holds the same losses."""
    assert run.status["status"] == "ok"
    assert same_weights(run.weights(8), reference.weights(8))
    assert run.steps == list(range(1, 9))
    for key in ("train/loss", "train/grad_norm", "train/lr", "val/loss"):
        assert run.column(key) == reference.column(key), key
    first = run.summary["metrics"]["train/loss_first"]
    assert first == reference.summary["metrics"]["train/loss_first"]


@pytest.mark.parametrize("kind", USUAL + SELDOM)
def test_a_killed_run_resumes_to_the_same_weights(
    kind: str, job: Job, undisturbed: Reference
) -> None:
    parts = (*KINDS[kind], EVERY)
    job(*parts, "+inject=kill", "callbacks.inject.step=5", status="failed")
    resumed = job(*parts, "resume=last")
    assert resumed.status["resumed_from"].endswith("step-00000004")
    assert_same(resumed, undisturbed(kind))


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("single", 0),
        ("single", 2),
        ("ddp", 7),
        pytest.param("ddp", 1, marks=LONG),
        pytest.param("single", 7, marks=LONG),
    ],
)
def test_auto_goes_on_from_what_there_is(
    kind: str, step: int, job: Job, undisturbed: Reference
) -> None:
    parts = (*KINDS[kind], EVERY, "resume=auto")
    job(*parts, "+inject=kill", f"callbacks.inject.step={step}", status="failed")
    resumed = job(*parts)
    started = resumed.status["resumed_from"]
    assert (started is None) == (step < 2)
    assert_same(resumed, undisturbed(kind))


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("single", "save_file"),
        ("single", "_sync"),
        ("ddp", "_fingerprint"),
        pytest.param("ddp", "save_file", marks=LONG),
        pytest.param("ddp", "_sync", marks=LONG),
    ],
)
def test_a_save_that_dies_midway_costs_that_checkpoint_only(
    kind: str, function: str, job: Job, undisturbed: Reference
) -> None:
    parts = (*KINDS[kind], EVERY)
    killed = job(*parts, *IN_SAVE, f"+callbacks.accident.function={function}", status="failed")
    assert killed.checkpoints == [2]
    resumed = job(*parts, "resume=last")
    assert resumed.status["resumed_from"].endswith("step-00000002")
    assert_same(resumed, undisturbed(kind))


def test_a_run_may_die_twice(job: Job, undisturbed: Reference) -> None:
    for step in (3, 6):
        job(EVERY, "resume=auto", "+inject=kill", f"callbacks.inject.step={step}", status="failed")
    assert_same(job(EVERY, "resume=auto"), undisturbed("single"))


def test_auto_starts_anew_after_a_run_that_finished(job: Job) -> None:
    assert job("resume=auto").status["resumed_from"] is None
    assert job("resume=auto").status["resumed_from"] is None


def test_a_path_may_be_a_run_or_a_checkpoint(job: Job, undisturbed: Reference) -> None:
    first = job("checkpoint.every=3", "checkpoint.keep=0", at="elsewhere")
    assert_same(job(resume=first.checkpoint(3)), undisturbed("single"))
    longer = job("trainer.max_steps=9", "schedule=constant", resume=first.path)
    assert longer.steps == list(range(1, 10))


@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_a_whole_job_killed_from_outside_resumes(
    kind: str, scalewise: Doors, job: Job, undisturbed: Reference
) -> None:
    door = scalewise.start(*UNTRACKED, *KINDS[kind], EVERY, "trainer.log_every=1")
    door.until_step(4)
    door.kill()
    assert door.wait().code == -signal.SIGKILL
    assert door.leftovers() == []
    resumed = scalewise(*UNTRACKED, *KINDS[kind], EVERY, "resume=last").ok()
    assert_same(resumed.newest, undisturbed(kind))


@LONG
@pytest.mark.parametrize("kind", ["single", "ddp", "dropout", "ema"])
@pytest.mark.parametrize("seed", range(5))
def test_a_kill_at_any_moment(
    seed: int, kind: str, scalewise: Doors, job: Job, undisturbed: Reference
) -> None:
    parts = (*UNTRACKED, *KINDS[kind], "checkpoint.every=1", "resume=auto")
    chance = random.Random(seed)
    for _ in range(2):
        door = scalewise.start(*parts)
        door.until_file("runs/*/*/checkpoints")
        with contextlib.suppress(subprocess.TimeoutExpired):
            door.process.wait(chance.random() * 5)
        door.kill()
        door.wait()
    done = scalewise(*parts).ok()
    assert_same(done.newest, undisturbed(kind))
