"""``scalewise train experiment=smoke parallelism=OPTION`` for every option."""

from __future__ import annotations

import pytest
from fixtures.job_runner import JobRunner

from scalewise import ConfigError, compose
from scalewise.config import paths

SHORT_RUN = (
    "experiment=smoke",
    "tracking=none",
    "trainer.max_steps=4",
    "trainer.validate_every=4",
    "schedule.warmup_steps=1",
)


CI_STRATEGIES = ("single", "ddp", "fsdp", "pipeline", "deepspeed_zero3")
"""Strategies that CI starts on the command line; numerics tests train the others."""


@pytest.mark.usefixtures("compiled_extensions")
@pytest.mark.parametrize(
    "option",
    [
        pytest.param(option, marks=() if option in CI_STRATEGIES else pytest.mark.exhaustive)
        for option in paths.option_names("parallelism")
    ],
)
def test_parallelism_option_trains(option: str, run_job: JobRunner) -> None:
    try:
        compose([*SHORT_RUN, f"parallelism={option}"])
    except ConfigError as error:
        if not all("install" in issue.fix for issue in error.issues):
            raise
        pytest.skip(str(error))
    run = run_job.without_defaults(*SHORT_RUN, f"parallelism={option}", "launch.isolation=process")
    assert run.steps == [1, 2, 3, 4]
    assert run.column("val/loss")[-1] < 9
