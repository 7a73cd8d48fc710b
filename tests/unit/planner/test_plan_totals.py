"""Totals of a planned sweep, and jobs that are rejected before they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fixtures.strategies import LLAMA_8B

from scalewise.commands.plan_json import plan_content
from scalewise.commands.show_plan import NO_TIME, print_plan, print_totals
from scalewise.errors import ConfigError
from scalewise.planner.fit_check import reject_unfit
from scalewise.planner.plan import Plan, build_plan, sum_plans
from scalewise.run_config import RunConfig

Compose = Callable[..., RunConfig]
H100 = ("hardware=h100", "data=synthetic", "trainer.max_steps=1000")
UNKNOWN_RATE = ("hardware=h100", "hardware.memory_gb_per_s=null")


def test_sweep_totals_count_jobs_that_may_fit(compose: Compose) -> None:
    overrides = (("model=llama_160m",), ("model=llama_160m", "seed=2"), ("model=llama3_70b",))
    plans = [
        build_plan(compose(*H100, *job_overrides, check_machine=False))
        for job_overrides in overrides
    ]
    totals = sum_plans(plans)
    assert (totals.jobs, totals.unfit, totals.untimed) == (3, 1, 0)
    step = plans[0].step_time
    assert step is not None
    assert totals.seconds == pytest.approx(2 * 1000 * step.seconds)
    price = plans[0].run.hardware.dollars_per_hour
    assert price is not None
    assert totals.dollars == pytest.approx(totals.seconds / 3600 * price)


def test_totals_count_the_steps_of_a_batch_warmup_with_their_batch(compose: Compose) -> None:
    run = (*H100, "model=llama_160m", "trainer.micro_batch=8")
    stages = (
        "+trainer.batch_warmup={a:{until_step:100,global_batch:8},"
        "b:{until_step:300,global_batch:32}}"
    )
    plans = {
        batch: build_plan(
            compose(*run, f"trainer.global_batch={batch}", *extra, check_machine=False)
        )
        for batch, extra in ((8, ()), (32, ()), (64, (stages,)))
    }
    seconds = {batch: plan.step_time.seconds for batch, plan in plans.items() if plan.step_time}
    assert seconds[8] < seconds[32] < seconds[64]
    plan = plans[64]
    expected = 100 * seconds[8] + 200 * seconds[32] + 700 * seconds[64]
    totals = sum_plans([plan])
    assert totals.seconds == pytest.approx(expected)
    price = plan.run.hardware.dollars_per_hour
    assert price is not None
    assert totals.dollars == pytest.approx(expected / 3600 * price)
    constant = build_plan(compose(*run, "trainer.global_batch=64", check_machine=False))
    assert plan.fit == constant.fit
    assert plan.step_time == constant.step_time


def test_totals_count_the_steps_of_a_sequence_warmup_with_their_length(compose: Compose) -> None:
    run = (*H100, "model=llama_160m", "trainer.micro_batch=8")
    lengths = (
        "+trainer.sequence_warmup={a:{until_step:100,sequence:256},b:{until_step:300,sequence:512}}"
    )
    batches = "+trainer.batch_warmup={a:{until_step:200,global_batch:8}}"

    def plan(samples: int, length: int, *stages: str) -> Plan:
        sizes = (f"trainer.global_batch={samples}", f"data.sequence={length}")
        return build_plan(compose(*run, *sizes, *stages, check_machine=False))

    steps = {(8, 256): 100, (8, 512): 100, (16, 512): 100, (16, 1024): 700}
    seconds, tokens = 0.0, 0
    for (samples, length), count in steps.items():
        constant = plan(samples, length)
        assert constant.step_time is not None
        seconds += count * constant.step_time.seconds
        tokens += count * samples * length
    planned = plan(16, 1024, lengths, batches)
    totals = sum_plans([planned])
    assert totals.seconds == pytest.approx(seconds)
    price = planned.run.hardware.dollars_per_hour
    assert price is not None
    assert totals.dollars == pytest.approx(seconds / 3600 * price)
    assert planned.run.tokens_in_step.before(1000) == tokens
    assert planned.fit == plan(16, 1024).fit
    assert planned.step_time == plan(16, 1024).step_time
    content = plan_content(planned)
    assert content["sequence_warmup"] == [
        {"until_step": 100, "sequence": 256, "step_s": plan_seconds(plan(8, 256))},
        {"until_step": 300, "sequence": 512, "step_s": plan_seconds(plan(16, 512))},
    ]
    assert content["batch_warmup"] == [
        {"until_step": 200, "global_batch": 8, "step_s": plan_seconds(plan(8, 512))}
    ]


def plan_seconds(plan: Plan) -> float | None:
    return None if plan.step_time is None else plan.step_time.seconds


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [(1, 1), (129, 2), (384, 3), (385, 4), (704, 4), (705, 5)],  # 128 in three steps, then 320
)
def test_training_length_counts_the_tokens_of_each_step(
    tokens: int, steps: int, compose: Compose
) -> None:
    stage = "+trainer.batch_warmup={first:{until_step:3,global_batch:4}}"
    batch = ("trainer.global_batch=10", "trainer.micro_batch=2", "data.sequence=32")
    run = compose(*batch, stage)
    run = replace(run, trainer=replace(run.trainer, max_steps=None, max_tokens=tokens))
    assert run.num_steps(samples=0) == steps


def test_sweep_totals_count_unknown_jobs(compose: Compose) -> None:
    epochs = ("trainer.max_steps=null", "trainer.max_epochs=2")
    overrides = (H100, (*H100, *epochs), UNKNOWN_RATE)
    totals = sum_plans(
        [build_plan(compose(*job_overrides, check_machine=False)) for job_overrides in overrides]
    )
    assert (totals.jobs, totals.unfit, totals.untimed, totals.unrated) == (3, 0, 2, 1)
    assert totals.seconds > 0
    unrated = build_plan(compose(*UNKNOWN_RATE, check_machine=False))
    assert sum_plans([unrated]).dollars is None


@pytest.mark.parametrize(
    ("hardware", "expects_hint"), [(UNKNOWN_RATE, True), (("hardware=h100",), False)]
)
def test_sweep_table_hints_at_missing_rates(
    hardware: tuple[str, ...],
    expects_hint: bool,
    compose: Compose,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ("trainer.max_steps=null", "trainer.max_epochs=2", *hardware)
    print_totals(sum_plans([build_plan(compose(*overrides, check_machine=False))]), None)
    stdout = capsys.readouterr().out
    assert "; 1 without a predicted time" in stdout
    assert (NO_TIME in stdout) == expects_hint


def test_training_time_of_epochs_is_not_that_of_a_step(
    compose: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = ("trainer.max_steps=null", "trainer.max_epochs=2")
    print_plan(build_plan(compose(*H100, *epochs, check_machine=False)))
    stdout = capsys.readouterr().out
    reason = "the steps of trainer.max_epochs=2 depend on the data"
    assert f"Training time not predicted: {reason}" in " ".join(stdout.split())
    assert "per billion tokens" in stdout


def test_rejected_job_shows_the_memory_breakdown(compose: Compose) -> None:
    reject_unfit(compose("launch.refuse_unfit=true", "hardware=cpu"))
    with pytest.raises(ConfigError) as excinfo:
        reject_unfit(compose("model=llama3_70b", *H100, check_machine=False))
    (issue,) = excinfo.value.issues
    assert issue.key == "launch.refuse_unfit"
    assert issue.reason.startswith("out_of_memory: 1.03 TiB of 80.00 GiB (optimizer state 52")
    fitting_overrides = (
        "trainer.micro_batch=1",
        "memory=checkpoint_full",
        "hardware.context_gib=1",
    )
    node = ("parallelism.cpu_offload=true", "hardware.host_memory_gib=64")
    with pytest.raises(ConfigError, match=r"host_out_of_memory: .* of 64.00 GiB \(offloaded"):
        reject_unfit(compose(*LLAMA_8B, *fitting_overrides, *node, check_machine=False))
