"""GRPO runs: rewards, resume and evaluation."""

from __future__ import annotations

import json

import pytest
from fixtures.cli_runner import CliRunner

from scalewise import cli

TINY = "experiment=finetune/grpo_tiny"
SHORT_RUN = (
    TINY,
    "tracking=none",
    "trainer.max_steps=4",
    "trainer.micro_batch=4",
    "trainer.validate_every=2",
    "trainer.validation_rows=7",
    "objective.answers=3",
    "schedule.warmup_steps=1",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", [(), ("adapter=lora", "objective.beta=0.1")], ids=["no_kl", "kl"])
def test_grpo_evaluation_equals_last_validation(mode: tuple[str, ...], run_cli: CliRunner) -> None:
    run = run_cli(*SHORT_RUN, *mode).assert_ok().folder
    rewards = run.column("val/reward")
    metrics = run.summary["metrics"]
    assert cli.main(["evaluate", str(run.path)]) == 0
    assert cli.main(["evaluate", str(run.path), "step=0"]) == 0
    record = json.loads((run.path / "evaluation.json").read_text("utf-8"))
    assert record["4"]["reward"] == pytest.approx(rewards[-1], abs=1e-6)
    assert record["0"]["reward"] == pytest.approx(metrics["val/reward_first"], abs=1e-6)


@pytest.mark.exhaustive
def test_grpo_resume_draws_the_same_completions(run_cli: CliRunner) -> None:
    full_run = run_cli(*SHORT_RUN, "checkpoint.every=2", "name=whole").assert_ok().folder
    resumed_run = (
        run_cli(*SHORT_RUN, f"resume={full_run.checkpoint(2)}", "name=rest").assert_ok().newest
    )
    for key in ("train/reward", "train/loss", "val/reward"):
        assert resumed_run.column(key) == full_run.column(key), key


@pytest.mark.exhaustive
def test_grpo_experiment_reverses_held_out_digits(run_cli: CliRunner) -> None:
    result = run_cli(TINY, "tracking=none").assert_ok()
    assert result.seconds < 120
    metrics = result.folder.summary["metrics"]
    assert metrics["val/reward_first"] < 0.25  # of ten digits one is right by chance
    assert metrics["val/reward"] > 0.9
    page = (result.folder.path / "report.html").read_text("utf-8")
    assert f"Validation reward is {metrics['val/reward']:.3f}" in page
