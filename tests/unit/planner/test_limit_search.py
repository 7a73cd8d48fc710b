"""Limits of a run: the largest micro-batch, the longest sequence, the fewest devices, the GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scalewise.cli import main
from scalewise.commands import show_limits
from scalewise.errors import ConfigError
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.limit_search import limit_rows
from scalewise.planner.plan import Plan
from scalewise.run_config import RunConfig
from scalewise.typed_override import replace_overrides

Compose = Callable[..., RunConfig]
PlanOf = Callable[..., Plan]

ADAPTED = (
    "model=llama3_8b",
    "hardware=h100",
    "precision=bf16_true",
    "adapter=lora",
    "data=synthetic",
    "data.sequence=2048",
    "trainer.micro_batch=1",
)
SHARDED = ("parallelism=fsdp", "parallelism.shards=8", "hardware=h100_8", "model=llama3_8b")
SHARDED += ("precision=bf16_mixed", "data=synthetic", "data.sequence=4096", "trainer.micro_batch=1")
PIPELINE = ("parallelism=mesh", "parallelism.pipeline=2", "parallelism.pipeline_micro_batches=4")


def limit(compose: Compose, search: str, *overrides: str) -> tuple[RunConfig, str, Plan]:
    run = compose(f"plan.search={search}", *overrides, check_machine=False)
    row = show_limits.find_limit(run)[1]
    assert row is not None
    return run, row.value, row.plan


@pytest.mark.parametrize(
    ("overrides", "unit"), [(ADAPTED, 1), (SHARDED, 1), ((*ADAPTED[:-1], *PIPELINE), 4)]
)
def test_largest_micro_batch_fits_and_the_next_does_not(
    overrides: tuple[str, ...], unit: int, compose: Compose, plan_of: PlanOf
) -> None:
    size = "trainer.micro_batch=4"
    run, value, plan = limit(compose, "micro_batch", *overrides, *[size] * (unit == 4))
    assert int(value) % unit == 0
    assert int(value) >= 2 * unit
    for micro_batch, fits in ((int(value), True), (int(value) + unit, False)):
        batch = micro_batch * run.parallelism.data_parallel_size
        sizes = (f"trainer.micro_batch={micro_batch}", f"trainer.global_batch={batch}")
        other = plan_of(*replace_overrides(run.overrides, sizes))
        assert (other.fit.status is FitStatus.fits) == fits, micro_batch
        if fits:
            assert other.fit.breakdown.peak == plan.fit.breakdown.peak
            assert other.step_time == plan.step_time


def test_longest_sequence_fits_and_the_next_does_not(compose: Compose, plan_of: PlanOf) -> None:
    run, value, _ = limit(compose, "sequence", *ADAPTED, "trainer.micro_batch=2")
    for tokens, fits in ((int(value), True), (int(value) + 128, False)):
        other = plan_of(*replace_overrides(run.overrides, (f"data.sequence={tokens}",)))
        assert (other.fit.status is FitStatus.fits) == fits, tokens


def test_longest_sequence_is_that_without_a_warmup(compose: Compose) -> None:
    stage = "+trainer.sequence_warmup={a:{until_step:10,sequence:1024}}"
    _, value, plan = limit(compose, "sequence", *ADAPTED, stage)
    assert value == limit(compose, "sequence", *ADAPTED)[1]
    assert plan.run.sequence_per_step.stages == ()


def test_longest_sequence_is_at_most_the_context(
    compose: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    run = compose("plan.search=sequence", *SHARDED, "memory=checkpoint_full", check_machine=False)
    assert show_limits.print_limit(run) is not None
    printed = capsys.readouterr().out
    assert printed.startswith("Longest sequence that fits: 8,192 tokens, the context of the model")
    assert "data.sequence=8192" in printed


def test_fewest_devices_have_a_layout_that_fits(compose: Compose, plan_of: PlanOf) -> None:
    overrides = ("model=llama3_8b", "hardware=h100", "precision=bf16_mixed", "data=synthetic")
    overrides += ("data.sequence=2048", "trainer.global_batch=8")
    run, value, plan = limit(compose, "devices", *overrides)
    assert plan.run.world_size == int(value) == 2
    devices = ("hardware.devices_per_node=2", *plan.overrides)
    assert plan_of(*replace_overrides(run.overrides, devices)).fit.status is FitStatus.fits
    counts = [int(row.value) for row in limit_rows(run)]
    assert counts == [1, 2, 4]


def test_hardware_search_lists_profiles_by_price(
    compose: Compose, plan_of: PlanOf, capsys: pytest.CaptureFixture[str]
) -> None:
    run = compose("plan.search=hardware", *ADAPTED, check_machine=False)
    rows, cheapest = show_limits.find_limit(run)
    names = [row.value for row in rows]
    assert {"h100", "a100_80g", "l40s", "rtx4090", "mi300x"} <= {*names}
    assert not {"t4", "v100", "cpu", "auto"} & {*names}  # no bf16, no CUDA device
    fitting = [row for row in rows if row.fits]
    assert fitting == rows[: len(fitting)]
    prices = [row.plan.dollars_for(1e9) for row in fitting]
    assert prices == sorted(price for price in prices if price is not None)
    assert cheapest is rows[0]
    other = plan_of(*replace_overrides(run.overrides, cheapest.plan.overrides))
    assert other.fit.breakdown.peak == cheapest.plan.fit.breakdown.peak
    assert show_limits.print_limit(run) is not None
    assert f"cheapest: {cheapest.value}" in capsys.readouterr().out


def test_limit_of_a_run_that_never_fits(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["model=llama3_70b", "hardware=rtx4090", "data=synthetic", "data.sequence=1024"]
    assert main(["plan", "plan.search=micro_batch", *overrides]) == 3
    assert capsys.readouterr().out.startswith("Nothing fits")


def test_limits_are_rejected_where_train_needs_a_run(compose: Compose) -> None:
    with pytest.raises(ConfigError, match=r"plan\.fit=auto: chooses no run"):
        compose("plan.search=devices", "plan.fit=auto")


def test_sweep_plans_the_limit_of_each_job(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "-m", "plan.search=micro_batch", *ADAPTED[:-2], "data.sequence=512,1024"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    sizes = [
        int(part.split("=")[1]) for part in printed.split() if part.startswith("trainer.micro")
    ]
    assert len(sizes) == 2
    assert sizes[0] > sizes[1] > 1
