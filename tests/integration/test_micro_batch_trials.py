"""``trainer.micro_batch=auto`` under an enforced memory limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner

from scalewise.launch import memory_probe_run
from scalewise.planner.auto_settings import choose_by_probes, micro_batch_variants
from scalewise.planner.fit_check import FitStatus, RunVariant
from scalewise.run_config import RunConfig

Compose = Callable[..., RunConfig]
LARGE_RUN = (
    *UNTRACKED,
    "hardware=cpu",
    "model.layers=4",
    "model.width=256",
    "model.feedforward=1024",
    "data.megabytes=2",
    "data.sequence=128",
    "checkpoint=none",
    "trainer.global_batch=64",
    "trainer.micro_batch=auto",
    "trainer.validate_every=null",
)
"""Activations of 1 GB with 64 samples, much larger than a process."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["single", "fsdp", "deepspeed_zero2"])
def test_micro_batch_trials_step_down_below_an_unknown_limit(
    strategy: str, compose: Compose
) -> None:
    run = compose(*LARGE_RUN, f"parallelism={strategy}")
    assert {variant.fit.status for variant in micro_batch_variants(RunVariant(run))} == {
        FitStatus.fits
    }

    def limited(probed_run: RunConfig) -> str:
        return memory_probe_run.probe_status(
            replace(probed_run, launch=replace(probed_run.launch, memory_limit_gib=0.5))
        )

    choice = choose_by_probes(run, limited)
    statuses = {probe.micro_batch: probe.status for probe in choice.probes}
    largest = 64 // run.parallelism.data_parallel_size
    assert [*statuses] == [largest >> step for step in range(len(statuses))]
    assert set(statuses.values()) == {"out_of_memory", "ok"}
    assert statuses[choice.micro_batch] == "ok"
    assert choice.micro_batch == min(statuses)


@pytest.mark.exhaustive
def test_train_uses_and_records_the_tried_micro_batch(run_cli: CliRunner) -> None:
    result = run_cli(*LARGE_RUN, "launch.memory_limit_gib=0.75")
    result.assert_ok()
    micro_batch = result.folder.status["micro_batch"]
    size = result.folder.resolved["trainer"]["micro_batch"]
    assert micro_batch["rows"] == size < 64
    assert {trial["rows"]: trial["status"] for trial in micro_batch["trials"]}[size] == "ok"
    assert f"trainer.micro_batch=auto: {size} (predicted:" in result.out
    assert micro_batch["how"] in (result.folder.path / "report.html").read_text("utf-8")
    assert result.folder.resolved["trainer"]["global_batch"] == 64
