"""Optimizers on a CUDA device; run by ``make gpu``."""

from pathlib import Path

import pytest

import scalewise
from scalewise.hardware import DeviceKind

pytestmark = pytest.mark.gpu

SMOKE = (
    *("experiment=smoke", "tracking=none", "hardware=auto", "trainer.validate_every=null"),
    "compile=none",  # compilation takes longer than these runs
)


@pytest.mark.parametrize(
    "optimizer_overrides",
    [
        (),
        ("optimizer.fused=false",),
        ("optimizer=muon",),
        ("optimizer=muon", "compile=block"),
        ("optimizer=adafactor",),
        ("optimizer=adamw_8bit",),
        ("optimizer=adamw_paged",),
        ("optimizer.offload=true",),
        ("precision=bf16_true",),
        ("precision=bf16_true", "optimizer=adafactor"),
    ],
    ids=" ".join,
)
def test_cuda_run_resumes_with_the_same_losses(
    optimizer_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    overrides = [*SMOKE, *optimizer_overrides, "checkpoint.every=2", "trainer.max_steps=6"]
    losses = []
    for name in ("uninterrupted", "resumed"):
        run = scalewise.compose(overrides)
        assert run.hardware.device is DeviceKind.cuda
        result = scalewise.train(run, tmp_path / name)
        assert result.status == "ok", result.reason
        losses.append(result.summary["metrics"]["train/loss"])
        (checkpoint,) = (tmp_path / "uninterrupted").glob("checkpoints/*4")
        overrides = [*overrides, f"resume={checkpoint}"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_cuda_fp16_gradient_norm_equals_fp32(tmp_path: Path) -> None:
    norms = []
    for precision in ("fp32", "fp16_mixed"):
        run = scalewise.compose([*SMOKE, f"precision={precision}"])
        assert run.hardware.device is DeviceKind.cuda
        result = scalewise.train(run, tmp_path / precision)
        assert result.status == "ok", result.reason
        norms.append(result.summary["metrics"]["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
