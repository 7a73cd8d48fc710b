"""What only a CUDA device can show; run by ``make gpu``."""

from pathlib import Path

import pytest
import torch

import scalewise
from scalewise.measure.steptime import StepClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SMOKE = ("experiment=smoke", "tracking=none", "hardware=auto", "trainer.validate_every=null")


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_true", "fp16_mixed"])
def test_a_run_trains_and_measures(precision: str, tmp_path: Path) -> None:
    run = scalewise.compose([*SMOKE, f"precision={precision}"])
    result = scalewise.train(run, tmp_path / "run")
    metrics = result.summary["metrics"]
    assert result.status == "ok", result.reason
    assert metrics["train/loss"] < metrics["train/loss_first"]
    assert metrics["memory/peak_bytes"] >= metrics["memory/parameters_bytes"]
    assert metrics["memory/activations_bytes"] > 0
    assert metrics["time/step_s"] > 0


def test_fp32_losses_equal_those_of_the_cpu(tmp_path: Path) -> None:
    losses = []
    for hardware in ("cpu", "auto"):
        run = scalewise.compose([*SMOKE, f"hardware={hardware}"])
        summary = scalewise.train(run, tmp_path / hardware).summary
        losses.append(summary["metrics"]["train/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_memory_of_state_is_what_the_census_says(tmp_path: Path) -> None:
    run = scalewise.compose(SMOKE)
    metrics = scalewise.train(run, tmp_path / "run").summary["metrics"]
    weights = 4 * run.model.parameters
    assert metrics["memory/gradients_bytes"] == pytest.approx(weights, rel=0.02)
    assert metrics["memory/optimizer_bytes"] == pytest.approx(2 * weights, rel=0.02)


def test_the_clock_reads_the_device_and_not_the_host() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    clock = StepClock(device)
    for phase in ("data", "forward", "backward", "optimizer"):
        clock.mark(phase)
        if phase == "forward":
            for _ in range(20):
                matrix = matrix @ matrix / 64
    clock.end_step()
    (seconds,) = clock.drain()
    assert seconds["forward"] > 10 * seconds["backward"]
