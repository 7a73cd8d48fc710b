"""Killed runs that resume end with bitwise equal weights."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
from collections.abc import Callable

import pytest
import torch
from fixtures.cli_runner import UNTRACKED, CliRunner, RunDir, same_weights
from fixtures.job_runner import JobRunner

EVERY = "checkpoint.every=2"
IN_SAVE, AT_END = (
    ("trusted_packages=[fixtures]", f"+callbacks.fault._target_=fixtures.faults.{fault}")
    for fault in ("KillInSave", "KillAtEnd")
)
KINDS = {
    "single": (),
    "ddp": ("parallelism=ddp",),
    "fsdp": ("parallelism=fsdp",),
    "uneven": ("trainer.micro_batch=3",),
    "accumulating": ("trainer.micro_batch=2",),
    "dropout": ("model.dropout=0.2",),
    "ddp_dropout": ("parallelism=ddp", "model.dropout=0.2"),
    "bf16_mixed": ("precision=bf16_mixed",),
    "bf16_true": ("precision=bf16_true",),
    "ema": ("callbacks=[guard,ema]", "callbacks.ema.decay=0.9"),
    "dropout_uneven_ema": (
        "model.dropout=0.2",
        "trainer.micro_batch=3",
        "callbacks=[guard,ema]",
        "callbacks.ema.decay=0.9",
    ),
    "sgd": ("optimizer=sgd", "optimizer.lr=0.1"),
    "preferences": ("objective=dpo", "data=corpus_pairs", "data.megabytes=2"),
    "wsd": ("schedule=wsd",),
}

LONG = pytest.mark.exhaustive
USUAL = ["dropout_uneven_ema"]
SELDOM = [pytest.param(kind, marks=LONG) for kind in KINDS if kind not in USUAL]

Reference = Callable[[str], RunDir]


@pytest.fixture(scope="module")
def reference_runs() -> dict[str, RunDir]:
    return {}


@pytest.fixture
def uninterrupted(run_job: JobRunner, reference_runs: dict[str, RunDir]) -> Reference:
    """The uninterrupted run of a kind; each is trained once."""

    def reference(kind: str) -> RunDir:
        if kind not in reference_runs:
            reference_runs[kind] = run_job(*KINDS[kind], at=f"reference-{kind}")
        return reference_runs[kind]

    return reference


def assert_same(run: RunDir, reference: RunDir) -> None:
    """The same weights, and one row a step that holds the same losses."""
    assert run.status["status"] == "ok"
    assert same_weights(run.weights(8), reference.weights(8))
    assert run.steps == list(range(1, 9))
    for key in ("train/loss", "train/grad_norm", "train/lr", "val/loss"):
        assert run.column(key) == reference.column(key), key
    first = run.summary["metrics"]["train/loss_first"]
    assert first == reference.summary["metrics"]["train/loss_first"]


@pytest.mark.parametrize("kind", USUAL + SELDOM)
def test_killed_run_resumes_to_the_same_weights(
    kind: str, run_job: JobRunner, uninterrupted: Reference
) -> None:
    parts = (*KINDS[kind], EVERY)
    run_job(*parts, "+inject=kill", "callbacks.inject.step=7", status="failed")
    resumed = run_job(*parts, "resume=last")
    assert resumed.status["resumed_from"].endswith("step-00000006")  # validations are after 4 and 8
    assert_same(resumed, uninterrupted(kind))


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        pytest.param("single", 0, marks=LONG),
        pytest.param("single", 2, marks=LONG),
        ("ddp", 7),
        pytest.param("ddp", 1, marks=LONG),
        pytest.param("single", 7, marks=LONG),
    ],
)
def test_resume_auto_continues_the_newest_run(
    kind: str, step: int, run_job: JobRunner, uninterrupted: Reference
) -> None:
    parts = (*KINDS[kind], EVERY, "resume=auto")
    run_job(*parts, "+inject=kill", f"callbacks.inject.step={step}", status="failed")
    resumed = run_job(*parts)
    started = resumed.status["resumed_from"]
    assert (started is None) == (step < 2)
    assert_same(resumed, uninterrupted(kind))


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        pytest.param("single", "_write_tensors", marks=LONG),
        pytest.param("single", "_sync", marks=LONG),
        pytest.param("ddp", "_fingerprint", marks=LONG),
        ("fsdp", "_complete_save"),
        pytest.param("fsdp", "_begin_save", marks=LONG),
        pytest.param("ddp", "_write_tensors", marks=LONG),
        pytest.param("ddp", "_sync", marks=LONG),
    ],
)
def test_interrupted_save_loses_only_that_checkpoint(
    kind: str, function: str, run_job: JobRunner, uninterrupted: Reference
) -> None:
    parts = (*KINDS[kind], EVERY)
    killed = run_job(*parts, *IN_SAVE, f"+callbacks.fault.function={function}", status="failed")
    assert killed.checkpoints == [2]
    resumed = run_job(*parts, "resume=last")
    assert resumed.status["resumed_from"].endswith("step-00000002")
    assert_same(resumed, uninterrupted(kind))


@pytest.mark.parametrize(
    ("wrote", "resumes"),
    [
        ((), ("parallelism=ddp",)),
        pytest.param(("parallelism=ddp",), ("trainer.micro_batch=3",), marks=LONG),
        (("trainer.micro_batch=2",), ("parallelism=fsdp",)),
        pytest.param(("parallelism=fsdp",), ("trainer.micro_batch=8",), marks=LONG),
        pytest.param(("parallelism=ddp",), ("parallelism=fsdp",), marks=LONG),
    ],
    ids=lambda parts: " ".join(parts) or "single",
)
def test_resume_under_another_strategy_keeps_the_data_order(
    wrote: tuple[str, ...], resumes: tuple[str, ...], run_job: JobRunner, uninterrupted: Reference
) -> None:
    first = run_job(*wrote, "checkpoint.every=3", "checkpoint.keep=0")
    resumed, reference = run_job(*resumes, resume=first.checkpoint(3)), uninterrupted("single")
    assert resumed.steps == reference.steps
    assert resumed.column("train/lr") == reference.column("train/lr")
    assert resumed.column("train/tokens") == reference.column("train/tokens")
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert resumed.column(key) == pytest.approx(reference.column(key), rel=1e-4), key


@LONG
def test_resume_uses_the_new_learning_rate(run_job: JobRunner) -> None:
    first = run_job("optimizer.lr=1e-3", "checkpoint.every=4", "checkpoint.keep=0")
    slow, fast = run_job("optimizer.lr=1e-3"), run_job("optimizer.lr=2e-3")
    resumed = run_job("optimizer.lr=2e-3", resume=first.checkpoint(4))
    assert resumed.column("train/lr") == [
        *slow.column("train/lr")[:4],
        *fast.column("train/lr")[4:],
    ]
    assert resumed.column("train/loss")[:5] == slow.column("train/loss")[:5]
    assert resumed.column("train/loss")[6:] != slow.column("train/loss")[6:]


@LONG
def test_resume_uses_the_new_weight_decay(run_job: JobRunner) -> None:
    """One step on, two decays leave weights that differ by what AdamW says: lr x decay x weight."""
    plain = ("schedule=constant", "schedule.warmup_steps=0", "optimizer.lr=0.01")
    first = run_job(*plain, "optimizer.weight_decay=0.1", "trainer.max_steps=4")
    before = first.weights(4)
    without, much = (
        run_job(*plain, f"optimizer.weight_decay={decay}", "trainer.max_steps=5",
            resume=first.checkpoint(4)).weights(5)
        for decay in (0.0, 0.5)
    )  # fmt: skip
    for name, weight in before.items():
        decayed = 0.01 * 0.5 * weight if weight.ndim > 1 else torch.zeros_like(weight)
        torch.testing.assert_close(without[name] - much[name], decayed, rtol=1e-3, atol=1e-6)


@LONG
def test_resume_uses_the_new_momentum(
    run_job: JobRunner,
) -> None:
    """SGD without momentum forgets what the momentum before had gathered."""
    plain = ("optimizer=sgd", "optimizer.lr=0.1", "schedule=constant")
    first = run_job(*plain, "checkpoint.every=4", "checkpoint.keep=0")
    with_it = run_job(*plain, resume=first.checkpoint(4))
    without = run_job(*plain, "optimizer.momentum=0", resume=first.checkpoint(4))
    assert same_weights(with_it.weights(8), first.weights(8))
    assert without.column("train/loss")[:5] == first.column("train/loss")[:5]
    assert without.column("train/loss")[5:] != first.column("train/loss")[5:]


def test_run_killed_twice_resumes(run_job: JobRunner, uninterrupted: Reference) -> None:
    for step in (3, 6):
        run_job(
            EVERY, "resume=auto", "+inject=kill", f"callbacks.inject.step={step}", status="failed"
        )
    assert_same(run_job(EVERY, "resume=auto"), uninterrupted("single"))


@pytest.mark.parametrize("kind", ["single", pytest.param("ddp", marks=LONG)])
def test_run_killed_after_its_last_step_repeats_none(
    kind: str, run_job: JobRunner, uninterrupted: Reference
) -> None:
    killed = run_job(*KINDS[kind], *AT_END, status="failed")
    ended = run_job(*KINDS[kind], "resume=auto")
    assert ended.status["resumed_from"] == str(killed.checkpoint(8))
    assert_same(ended, uninterrupted(kind))
    restarted = run_job(*KINDS[kind], *AT_END, "launch.max_restarts=1")
    assert restarted.status["attempts"] == 2
    assert_same(restarted, uninterrupted(kind))


def test_resume_auto_starts_from_scratch_after_a_finished_run(run_job: JobRunner) -> None:
    assert run_job("resume=auto").status["resumed_from"] is None
    assert run_job("resume=auto").status["resumed_from"] is None


def test_resume_accepts_a_run_or_checkpoint_path(
    run_job: JobRunner, uninterrupted: Reference
) -> None:
    first = run_job("checkpoint.every=3", "checkpoint.keep=0", at="elsewhere")
    assert_same(run_job(resume=first.checkpoint(3)), uninterrupted("single"))
    longer = run_job("trainer.max_steps=9", "schedule=constant", resume=first.path)
    assert longer.steps == list(range(1, 10))


@pytest.mark.parametrize("kind", [pytest.param("single", marks=LONG), "ddp"])
def test_job_killed_from_outside_resumes(
    kind: str, run_cli: CliRunner, run_job: JobRunner, uninterrupted: Reference
) -> None:
    process = run_cli.start(*UNTRACKED, *KINDS[kind], EVERY, "trainer.log_every=1")
    process.wait_for_step(4)
    process.kill()
    assert process.wait().code == -signal.SIGKILL
    assert process.remaining_processes() == []
    resumed = run_cli(*UNTRACKED, *KINDS[kind], EVERY, "resume=last").assert_ok()
    assert_same(resumed.newest, uninterrupted(kind))


@LONG
@pytest.mark.parametrize("kind", ["single", "ddp", "dropout", "ema"])
@pytest.mark.parametrize("seed", range(5))
def test_run_killed_at_a_random_time_resumes(
    seed: int, kind: str, run_cli: CliRunner, run_job: JobRunner, uninterrupted: Reference
) -> None:
    parts = (*UNTRACKED, *KINDS[kind], "checkpoint.every=1", "resume=auto")
    chance = random.Random(seed)
    for _ in range(2):
        process = run_cli.start(*parts)
        process.wait_for_file("runs/*/*/checkpoints")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(chance.random() * 0.4)
        process.kill()
        done = process.wait()
        if done.code == 0:  # it was quicker than the moment
            break
    else:
        done = run_cli(*parts).assert_ok()
    assert_same(done.newest, uninterrupted(kind))


def test_resume_under_another_strategy_records_its_own_costs(run_job: JobRunner) -> None:
    """Two steps are left: too few to measure memory again."""
    first = run_job(EVERY)
    known = first.summary["metrics"]["memory/peak_bytes"]
    again, other = (
        run_job(*parts, resume=first.checkpoint(6)).summary["metrics"]
        for parts in ((), ("parallelism=ddp",))
    )
    assert again["memory/peak_bytes"] == known
    assert other.get("memory/peak_bytes") is None
    assert other["time/step_s"] > 0
