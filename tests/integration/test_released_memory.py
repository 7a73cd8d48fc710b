"""Finished runs release their model: runs of one process do not add up in memory."""

import gc
from pathlib import Path

import pytest
from torch import nn

import scalewise

SMOKE = (
    *("experiment=smoke", "tracking=none", "trainer.validate_every=null", "trainer.max_steps=2"),
    *("schedule.warmup_steps=0", "trainer.global_batch=null"),
)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer.in_backward=true", "trainer.clip_norm=null"),
        ("optimizer.offload=true",),
        ("optimizer=muon",),
        ("memory=checkpoint_full",),
        ("memory=offload_activations",),
        ("adapter=lora",),
        ("callbacks=ema",),
    ],
    ids=" ".join,
)
def test_finished_run_leaves_no_parameters_in_memory(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    def count_parameters() -> int:
        gc.collect()
        return sum(type(each) is nn.Parameter for each in gc.get_objects())

    before = count_parameters()
    result = scalewise.train(scalewise.compose([*SMOKE, *overrides]), tmp_path / "run")
    assert result.status == "ok", result.reason
    assert count_parameters() == before
