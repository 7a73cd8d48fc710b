"""Stepping in backward is stepping after it: the same numbers, without gradients in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.doors import same_weights
from fixtures.jobs import Job
from fixtures.layouts import LAYOUTS, LLAMA, SHAPE
from fixtures.steps import TOLERANCE, Reference, assert_close, steps_of

IN_BACKWARD = "optimizer.in_backward=true"
SUM_LATE = ("ddp", "deepspeed", "pipeline")
EVERY = {"single": ("parallelism=single",), **LAYOUTS}
USUAL = ("fsdp", "tensor")
ADAMW = (
    *SHAPE,
    *LLAMA,
    "trainer.clip_norm=null",
    "trainer.max_steps=4",
    "trainer.micro_batch=4",
    "trainer.log_every=1",
    "schedule.warmup_steps=1",
)


@pytest.fixture
def job(tmp_path: Path, shared_cache: Path) -> Job:
    return Job(tmp_path, shared_cache)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive)
        for name in EVERY
        if not (name.startswith(SUM_LATE) or "offload" in name)  # which is refused
    ],
)
def test_a_layout_takes_the_steps_of_one_device(layout: str, alone: Reference, job: Job) -> None:
    run, reference = steps_of(EVERY[layout], "one_pass", job, IN_BACKWARD), alone("one_pass")
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert run.column(key) == pytest.approx(reference.column(key), rel=TOLERANCE), key
    assert_close(run.weights(), reference.weights(), "weights")
    assert run.summary["metrics"]["memory/gradients_bytes"] == 0


@pytest.mark.parametrize(
    "name",
    [
        "adamw_8bit",
        *(
            pytest.param(n, marks=pytest.mark.exhaustive)
            for n in ("adafactor", "adamw", "lion", "muon", "sgd")
        ),
    ],
)
def test_an_optimizer_steps_alike(name: str, job: Job) -> None:
    late, early = (
        job.of(*ADAMW, f"optimizer={name}", f"optimizer.in_backward={way}")
        for way in ("false", "true")
    )
    assert early.column("train/loss") == late.column("train/loss")
    assert same_weights(early.weights(), late.weights())


def test_a_checkpoint_of_one_way_goes_on_in_the_other(job: Job) -> None:
    whole = job.of(*ADAMW, "checkpoint.every=2")
    resumed = job.of(*ADAMW, IN_BACKWARD, resume=whole.checkpoint(2))
    assert resumed.column("train/loss") == whole.column("train/loss")
    assert same_weights(resumed.weights(), whole.weights())
