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

EVERY_TWO_STEPS = "checkpoint.every=2"
KILL_IN_SAVE, KILL_AT_END = (
    ("trusted_packages=[fixtures]", f"+callbacks.fault._target_=fixtures.faults.{fault}")
    for fault in ("KillInSave", "KillAtEnd")
)
ROUNDING = ("precision=bf16_true", "precision.stochastic_rounding=true")
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
    "stochastic_rounding": ROUNDING,
    "stochastic_rounding_fsdp": (*ROUNDING, "parallelism=fsdp"),
    "stochastic_rounding_ddp": (*ROUNDING, "parallelism=ddp", "optimizer=adafactor"),
    "stochastic_rounding_sgd": (*ROUNDING, "optimizer=sgd", "optimizer.lr=0.1"),
    "ema": ("callbacks=[guard,ema]", "callbacks.ema.decay=0.9"),
    "dropout_uneven_ema": (
        "model.dropout=0.2",
        "trainer.micro_batch=3",
        "callbacks=[guard,ema]",
        "callbacks.ema.decay=0.9",
    ),
    "statistics": (
        *("trainer.skip_sigma=0.5", "trainer.clip_percentile=60", "trainer.rolling_window=2"),
        *("optimizer=sgd", "optimizer.lr=0.1", "trainer.max_skipped_steps=8"),
    ),
    "sgd": ("optimizer=sgd", "optimizer.lr=0.1"),
    "preferences": ("objective=dpo", "data=corpus_pairs", "data.megabytes=2"),
    "wsd": ("schedule=wsd",),
    "batch_warmup": (
        "+trainer.batch_warmup={first:{until_step:3,global_batch:4},"
        "second:{until_step:7,global_batch:8}}",
        *("trainer.global_batch=16", "trainer.micro_batch=2", "model.dropout=0.2"),
    ),
    "sequence_warmup": (
        "+trainer.sequence_warmup={first:{until_step:3,sequence:8},"
        "second:{until_step:7,sequence:16}}",
        *("trainer.micro_batch=2", "model.dropout=0.2"),
    ),
}

EXHAUSTIVE = pytest.mark.exhaustive
CI_KINDS = [
    "batch_warmup",
    "sequence_warmup",
    "dropout_uneven_ema",
    "statistics",
    "stochastic_rounding_fsdp",
]
EXHAUSTIVE_KINDS = [pytest.param(kind, marks=EXHAUSTIVE) for kind in KINDS if kind not in CI_KINDS]

Reference = Callable[[str], RunDir]


@pytest.fixture(scope="module")
def reference_runs() -> dict[str, RunDir]:
    return {}


@pytest.fixture
def uninterrupted(run_job: JobRunner, reference_runs: dict[str, RunDir]) -> Reference:
    """Function that returns the uninterrupted run of a kind, trained once."""

    def reference(kind: str) -> RunDir:
        if kind not in reference_runs:
            reference_runs[kind] = run_job(*KINDS[kind], at=f"reference-{kind}")
        return reference_runs[kind]

    return reference


def assert_same(run: RunDir, reference: RunDir) -> None:
    """Assert equal weights, and one row per step with equal losses."""
    assert run.status["status"] == "ok"
    assert same_weights(run.weights(8), reference.weights(8))
    assert run.steps == list(range(1, 9))
    for key in ("train/loss", "train/grad_norm", "train/skipped_steps", "train/lr", "val/loss"):
        assert run.column(key) == reference.column(key), key
    first = run.summary["metrics"]["train/loss_first"]
    assert first == reference.summary["metrics"]["train/loss_first"]


@pytest.mark.parametrize("kind", CI_KINDS + EXHAUSTIVE_KINDS)
def test_killed_run_resumes_to_the_same_weights(
    kind: str, run_job: JobRunner, uninterrupted: Reference
) -> None:
    overrides = (*KINDS[kind], EVERY_TWO_STEPS)
    run_job(*overrides, "+inject=kill", "callbacks.inject.step=7", status="failed")
    resumed = run_job(*overrides, "resume=last")
    assert resumed.status["resumed_from"].endswith("step-00000006")  # validations are after 4 and 8
    assert_same(resumed, uninterrupted(kind))


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        pytest.param("single", 0, marks=EXHAUSTIVE),
        pytest.param("single", 2, marks=EXHAUSTIVE),
        ("ddp", 7),
        pytest.param("ddp", 1, marks=EXHAUSTIVE),
        pytest.param("single", 7, marks=EXHAUSTIVE),
    ],
)
def test_resume_auto_continues_the_newest_run(
    kind: str, step: int, run_job: JobRunner, uninterrupted: Reference
) -> None:
    overrides = (*KINDS[kind], EVERY_TWO_STEPS, "resume=auto")
    run_job(*overrides, "+inject=kill", f"callbacks.inject.step={step}", status="failed")
    resumed = run_job(*overrides)
    resumed_from = resumed.status["resumed_from"]
    assert (resumed_from is None) == (step < 2)
    assert_same(resumed, uninterrupted(kind))


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        pytest.param("single", "_write_tensors", marks=EXHAUSTIVE),
        pytest.param("single", "_fingerprint_files", marks=EXHAUSTIVE),
        pytest.param("ddp", "_fingerprint_files", marks=EXHAUSTIVE),
        ("fsdp", "_complete_save"),
        pytest.param("fsdp", "_begin_save", marks=EXHAUSTIVE),
        pytest.param("ddp", "_write_tensors", marks=EXHAUSTIVE),
        pytest.param("ddp", "_complete_save", marks=EXHAUSTIVE),
    ],
)
def test_interrupted_save_loses_only_that_checkpoint(
    kind: str, function: str, run_job: JobRunner, uninterrupted: Reference
) -> None:
    overrides = (*KINDS[kind], EVERY_TWO_STEPS)
    killed_run = run_job(
        *overrides, *KILL_IN_SAVE, f"+callbacks.fault.function={function}", status="failed"
    )
    assert killed_run.checkpoints == [2]
    resumed = run_job(*overrides, "resume=last")
    assert resumed.status["resumed_from"].endswith("step-00000002")
    assert_same(resumed, uninterrupted(kind))


@pytest.mark.parametrize(
    ("first_strategy", "resumes"),
    [
        ((), ("parallelism=ddp",)),
        pytest.param(("parallelism=ddp",), ("trainer.micro_batch=3",), marks=EXHAUSTIVE),
        (("trainer.micro_batch=2",), ("parallelism=fsdp",)),
        pytest.param(("parallelism=fsdp",), ("trainer.micro_batch=8",), marks=EXHAUSTIVE),
        pytest.param(("parallelism=ddp",), ("parallelism=fsdp",), marks=EXHAUSTIVE),
    ],
    ids=lambda overrides: " ".join(overrides) or "single",
)
def test_resume_under_another_strategy_keeps_the_data_order(
    first_strategy: tuple[str, ...],
    resumes: tuple[str, ...],
    run_job: JobRunner,
    uninterrupted: Reference,
) -> None:
    first = run_job(*first_strategy, "checkpoint.every=3", "checkpoint.keep=0")
    resumed, reference = run_job(*resumes, resume=first.checkpoint(3)), uninterrupted("single")
    assert_same_order(resumed, reference)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=EXHAUSTIVE)])
def test_resume_within_a_batch_warmup_under_another_strategy(
    strategy: str, run_job: JobRunner
) -> None:
    warmup = [it for it in KINDS["batch_warmup"] if not it.startswith("model.dropout")]
    first = run_job(*warmup, "checkpoint.every=5", "checkpoint.keep=0", at="first")
    other = (f"parallelism={strategy}", "trainer.micro_batch=1")
    resumed = run_job(*warmup, *other, resume=first.checkpoint(5))
    assert resumed.column("train/tokens")[4] == 32 * (3 * 4 + 2 * 8)
    assert_same_order(resumed, first)


@EXHAUSTIVE
@pytest.mark.parametrize("strategy", ["context", "fsdp", "tensor"])
def test_resume_within_a_sequence_warmup_under_another_strategy(
    strategy: str, run_job: JobRunner
) -> None:
    warmup = KINDS["sequence_warmup"][:1]
    first = run_job(*warmup, "checkpoint.every=5", "checkpoint.keep=0", at="first")
    resumed = run_job(*warmup, f"parallelism={strategy}", resume=first.checkpoint(5))
    assert resumed.column("train/tokens")[4] == 8 * (3 * 8 + 2 * 16)
    assert_same_order(resumed, first)


def assert_same_order(resumed: RunDir, reference: RunDir) -> None:
    assert resumed.steps == reference.steps
    assert resumed.column("train/lr") == reference.column("train/lr")
    assert resumed.column("train/tokens") == reference.column("train/tokens")
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert resumed.column(key) == pytest.approx(reference.column(key), rel=1e-4), key


@EXHAUSTIVE
def test_resume_uses_the_new_learning_rate(run_job: JobRunner) -> None:
    first = run_job("optimizer.lr=1e-3", "checkpoint.every=4", "checkpoint.keep=0")
    slow_run, fast_run = run_job("optimizer.lr=1e-3"), run_job("optimizer.lr=2e-3")
    resumed = run_job("optimizer.lr=2e-3", resume=first.checkpoint(4))
    assert resumed.column("train/lr") == [
        *slow_run.column("train/lr")[:4],
        *fast_run.column("train/lr")[4:],
    ]
    assert resumed.column("train/loss")[:5] == slow_run.column("train/loss")[:5]
    assert resumed.column("train/loss")[6:] != slow_run.column("train/loss")[6:]


def test_resume_warms_the_learning_rate_up_again(run_job: JobRunner) -> None:
    """A resume within the warm-up continues it, to the same weights; a later one repeats it."""
    first = run_job(EVERY_TWO_STEPS, "checkpoint.keep=0")
    rewarmup = (EVERY_TWO_STEPS, "checkpoint.keep=0", "schedule.rewarmup_steps=3")
    resumed = run_job(*rewarmup, resume=first.checkpoint(2))
    factors = [1, 1, 1 / 4, 1 / 2, 3 / 4, 1, 1, 1]
    scheduled = first.column("train/lr")
    assert resumed.column("train/lr") == pytest.approx(
        [factor * rate for factor, rate in zip(factors, scheduled, strict=True)]
    )
    again = run_job(*rewarmup, resume=resumed.checkpoint(4))
    assert_same(again, resumed)
    factors[6:] = [1 / 4, 1 / 2]
    later = run_job(*rewarmup, resume=resumed.checkpoint(6))
    assert later.column("train/lr")[5:] == pytest.approx(
        [factor * rate for factor, rate in zip(factors[5:], scheduled[5:], strict=True)]
    )


@EXHAUSTIVE
def test_resume_uses_the_new_weight_decay(run_job: JobRunner) -> None:
    """After one step, weights differ by lr x decay difference x weight."""
    constant_schedule = ("schedule=constant", "schedule.warmup_steps=0", "optimizer.lr=0.01")
    first = run_job(*constant_schedule, "optimizer.weight_decay=0.1", "trainer.max_steps=4")
    before = first.weights(4)
    undecayed_run, decayed_run = (
        run_job(*constant_schedule, f"optimizer.weight_decay={decay}", "trainer.max_steps=5",
            resume=first.checkpoint(4)).weights(5)
        for decay in (0.0, 0.5)
    )  # fmt: skip
    for name, weight in before.items():
        decayed = 0.01 * 0.5 * weight if weight.ndim > 1 else torch.zeros_like(weight)
        torch.testing.assert_close(
            undecayed_run[name] - decayed_run[name], decayed, rtol=1e-3, atol=1e-6
        )


@EXHAUSTIVE
def test_resume_uses_the_new_momentum(
    run_job: JobRunner,
) -> None:
    """SGD without momentum drops the momentum state."""
    sgd_overrides = ("optimizer=sgd", "optimizer.lr=0.1", "schedule=constant")
    first = run_job(*sgd_overrides, "checkpoint.every=4", "checkpoint.keep=0")
    momentum_run = run_job(*sgd_overrides, resume=first.checkpoint(4))
    run_without_momentum = run_job(
        *sgd_overrides, "optimizer.momentum=0", resume=first.checkpoint(4)
    )
    assert same_weights(momentum_run.weights(8), first.weights(8))
    assert run_without_momentum.column("train/loss")[:5] == first.column("train/loss")[:5]
    assert run_without_momentum.column("train/loss")[5:] != first.column("train/loss")[5:]


def test_run_killed_twice_resumes(run_job: JobRunner, uninterrupted: Reference) -> None:
    for step in (3, 6):
        run_job(
            EVERY_TWO_STEPS,
            "resume=auto",
            "+inject=kill",
            f"callbacks.inject.step={step}",
            status="failed",
        )
    assert_same(run_job(EVERY_TWO_STEPS, "resume=auto"), uninterrupted("single"))


@pytest.mark.parametrize("kind", ["single", pytest.param("ddp", marks=EXHAUSTIVE)])
def test_run_killed_after_its_last_step_repeats_none(
    kind: str, run_job: JobRunner, uninterrupted: Reference
) -> None:
    killed_run = run_job(*KINDS[kind], *KILL_AT_END, status="failed")
    resumed_run = run_job(*KINDS[kind], "resume=auto")
    assert resumed_run.status["resumed_from"] == str(killed_run.checkpoint(8))
    assert_same(resumed_run, uninterrupted(kind))
    restarted = run_job(*KINDS[kind], *KILL_AT_END, "launch.max_restarts=1")
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
    longer_run = run_job("trainer.max_steps=9", "schedule=constant", resume=first.path)
    assert longer_run.steps == list(range(1, 10))


@pytest.mark.parametrize("kind", [pytest.param("single", marks=EXHAUSTIVE), "ddp"])
def test_job_killed_from_outside_resumes(
    kind: str, run_cli: CliRunner, run_job: JobRunner, uninterrupted: Reference
) -> None:
    process = run_cli.start(*UNTRACKED, *KINDS[kind], EVERY_TWO_STEPS, "trainer.log_every=1")
    process.wait_for_step(4)
    process.kill()
    assert process.wait().code == -signal.SIGKILL
    assert process.remaining_processes() == []
    resumed = run_cli(*UNTRACKED, *KINDS[kind], EVERY_TWO_STEPS, "resume=last").assert_ok()
    assert_same(resumed.newest, uninterrupted(kind))


@EXHAUSTIVE
@pytest.mark.parametrize("kind", ["single", "ddp", "dropout", "ema"])
@pytest.mark.parametrize("seed", range(5))
def test_run_killed_at_a_random_time_resumes(
    seed: int, kind: str, run_cli: CliRunner, run_job: JobRunner, uninterrupted: Reference
) -> None:
    overrides = (*UNTRACKED, *KINDS[kind], "checkpoint.every=1", "resume=auto")
    rng = random.Random(seed)
    for _ in range(2):
        process = run_cli.start(*overrides)
        process.wait_for_file("runs/*/*/checkpoints")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(rng.random() * 0.4)
        process.kill()
        result = process.wait()
        if result.code == 0:  # the run ended before the kill
            break
    else:
        result = run_cli(*overrides).assert_ok()
    assert_same(result.newest, uninterrupted(kind))


def test_resume_under_another_strategy_records_its_own_costs(run_job: JobRunner) -> None:
    """The two remaining steps are too few to measure memory."""
    first = run_job(EVERY_TWO_STEPS)
    peak_bytes = first.summary["metrics"]["memory/peak_bytes"]
    same_strategy_metrics, other_strategy_metrics = (
        run_job(*overrides, resume=first.checkpoint(6)).summary["metrics"]
        for overrides in ((), ("parallelism=ddp",))
    )
    assert same_strategy_metrics["memory/peak_bytes"] == peak_bytes
    assert other_strategy_metrics.get("memory/peak_bytes") is None
    assert other_strategy_metrics["time/step_s"] > 0
