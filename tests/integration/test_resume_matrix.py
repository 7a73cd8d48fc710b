"""Resumed runs are bitwise equal to uninterrupted ones, for every option."""

from __future__ import annotations

import random

import pytest
from fixtures.cli_runner import same_weights
from fixtures.compatibility_matrix import EXTRA_OPTIONS
from fixtures.job_runner import JobRunner
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER, marks

from scalewise import ConfigError, compose
from scalewise.checkpoints import store
from scalewise.config import paths

STEPS = 6
SEED = 23
"""Seed of the steps at which runs are killed; printed with each step."""
SMALL_RUN = (
    *TINY_DECODER,
    *LLAMA,
    f"trainer.max_steps={STEPS}",
    "trainer.global_batch=8",
    "trainer.micro_batch=2",
    "trainer.log_every=1",
    "trainer.validate_every=3",
    "trainer.validation_rows=4",
    "checkpoint.every=1",
    "checkpoint.keep=0",
)
WIDE_MODEL = ("model.width=128", "model.feedforward=384")
"""Matrices that are large enough for low-bit moments, also on two ranks."""
LOW_BIT_OPTIMIZERS = ("adamw_8bit", "adamw_4bit")


def group_options(group: str) -> dict[str, tuple[str, ...]]:
    """Options of a group, with the overrides that each requires."""
    options = {name: (f"{group}={name}",) for name in paths.option_names(group)}
    return {**options, **EXTRA_OPTIONS.get(group, {})}


def run_kinds() -> dict[str, tuple[str, ...]]:
    """Options of these groups on one rank, and all strategies."""
    overrides_by_kind: dict[str, tuple[str, ...]] = {}
    for group in ("optimizer", "adapter", "quantization", "precision"):
        overrides_by_kind |= {
            f"{group}={name}": kind_overrides
            for name, kind_overrides in group_options(group).items()
        }
    overrides_by_kind |= {
        f"parallelism={name}": kind_overrides for name, kind_overrides in STRATEGIES.items()
    }
    for name in LOW_BIT_OPTIMIZERS:
        overrides_by_kind[f"optimizer={name}"] = (*WIDE_MODEL, f"optimizer={name}")
        for strategy in ("ddp", "fsdp", "hsdp", "tensor", "pipeline_one_f_one_b", "fsdp_4"):
            overrides_by_kind[f"{strategy}, {name}"] = (
                *STRATEGIES[strategy],
                *WIDE_MODEL,
                f"optimizer={name}",
            )
    for name in ("muon", "adafactor", "schedule_free", "lion"):
        overrides_by_kind[f"fsdp, {name}"] = (
            *STRATEGIES["fsdp"],
            *group_options("optimizer")[name],
        )
    for name in ("nf4", "int8"):
        overrides_by_kind[f"fsdp, {name}"] = (
            *STRATEGIES["fsdp"],
            *group_options("quantization")[name],
        )
    for strategy in ("deepspeed_zero2_offload", "deepspeed_zero3_offload"):
        overrides_by_kind[f"parallelism={strategy}"] = (f"parallelism={strategy}",)
    del overrides_by_kind["optimizer=module"]  # requires a user-defined class
    return overrides_by_kind


KINDS = run_kinds()
CI_KINDS = ("optimizer=adamw_8bit", "fsdp, adamw_4bit")


def marked_params(kind: str) -> tuple[pytest.MarkDecorator, ...]:
    strategy = kind.removeprefix("parallelism=").split(",")[0]
    return marks(strategy) if kind in CI_KINDS else (*marks(strategy), pytest.mark.exhaustive)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marked_params(kind)) for kind in KINDS])
def test_killed_run_resumes_to_the_same_result(
    kind: str, run_job: JobRunner, request: pytest.FixtureRequest
) -> None:
    kind_overrides = (*SMALL_RUN, *KINDS[kind])
    try:
        compose(kind_overrides)
    except ConfigError as error:
        pytest.skip(str(error))
    if "offload" in kind:
        request.getfixturevalue("compiled_extensions")
    step = random.Random(f"{SEED} {kind}").randint(2, STEPS - 1)
    print(f"{kind}: killed after step {step} (seed {SEED})")
    full_run = run_job.without_defaults(*kind_overrides)
    killed_run = run_job.without_defaults(
        *kind_overrides, "+inject=kill", f"callbacks.inject.step={step}", status="failed"
    )
    assert killed_run.checkpoints
    resumed = run_job.without_defaults(
        *kind_overrides, resume=killed_run.checkpoint(killed_run.checkpoints[-1])
    )
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert resumed.column(key) == full_run.column(key), key
    for state_kind in ("model", "optimizer"):
        final_tensors = [
            store.full_tensors(run.checkpoint(STEPS), state_kind) for run in (resumed, full_run)
        ]
        assert same_weights(*final_tensors), state_kind
