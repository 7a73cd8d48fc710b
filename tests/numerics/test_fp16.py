"""fp16 with gradient scaling, in CPU emulation, against fp32."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.quiet_trainer import QUIET_TRAINER
from fixtures.strategies import LLAMA, TINY_DECODER
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from scalewise import compose
from scalewise.checkpoints import store
from scalewise.launch.job import JobSpec, execute
from scalewise.precision import FloatFormat, Precision
from scalewise.training.fp16_precision import FP16Precision
from scalewise.training.trainer import silence_lightning

FP16 = Precision(compute=FloatFormat.fp16)
CLIPPED = ("trainer.global_batch=12", "trainer.micro_batch=6", "trainer.clip_norm=0.1")
STEPS = ("trainer.max_steps=2", "trainer.log_every=1", "schedule.warmup_steps=0")


def train(precision: Precision, folder: Path, cache: Path, *overrides: str) -> RunDir:
    """Also in fp16, which a config rejects on the CPU."""
    run = compose([*TINY_DECODER, *LLAMA, *CLIPPED, *STEPS, *overrides])
    with mock.patch.dict(os.environ, SCALEWISE_CACHE=str(cache)):
        result = execute(JobSpec(replace(run, precision=precision)), folder)
    assert result.status == "ok", result.reason
    return RunDir(result.folder)


@pytest.mark.parametrize(
    "overrides",
    [(), ("optimizer.fused=false",), ("optimizer=muon",), ("optimizer=sgd",)],
    ids=" ".join,
)
def test_fp16_gradients_are_unscaled_before_clipping(
    overrides: tuple[str, ...], tmp_path: Path, shared_cache: Path
) -> None:
    """Norm, moments and weights are those of fp32 up to the rounding of fp16."""
    fp32, fp16 = (
        train(precision, tmp_path / precision.compute, shared_cache, *overrides)
        for precision in (Precision(), FP16)
    )
    for key in ("train/loss", "train/grad_norm"):
        assert fp16.column(key) == pytest.approx(fp32.column(key), rel=2e-3), key
    moments, expected = (store.full_tensors(run.checkpoint(2), "optimizer") for run in (fp32, fp16))
    assert moments.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = float((moments[name] - tensor).norm())
        assert difference <= 0.02 * float(tensor.norm()), name


class FusedModule(LightningModule):
    """User-defined module with a fused optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 0.01 * self.layer(batch).float().square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if gradients:
            self.norms.append(float(nn.utils.get_total_norm(gradients)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)


def test_lightning_clips_fused_optimizers_in_fp16(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = FusedModule()
    with silence_lightning():
        trainer = Trainer(
            **QUIET_TRAINER,
            plugins=[LightningEnvironment(), FP16Precision("cpu")],
            gradient_clip_val=0.001,
            max_steps=3,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
    assert module.norms == pytest.approx([0.001] * len(module.norms), rel=1e-3)
    assert module.norms
