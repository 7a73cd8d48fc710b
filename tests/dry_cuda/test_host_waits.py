"""Calls per step in which the host waits for the device, on fake CUDA tensors.

A wait stops the host from launching the next kernels. Steps that log are excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

TINY = (
    "model=decoder_nano",
    "model.layers=2",
    "model.width=64",
    "model.heads=4",
    "model.kv_heads=2",
    "data=synthetic",
    "data.sequence=128",
    "trainer.micro_batch=2",
    "trainer.global_batch=null",
    "precision=bf16_mixed",
)
WEIGHTS = 20
"""Trained tensors of the model."""
CONTEXT = ("parallelism=context", "parallelism.context=2")
PIPELINE = (
    "parallelism=pipeline",
    "parallelism.pipeline=2",
    "trainer.micro_batch=4",
    "trainer.global_batch=8",
)

PARALLELISM: dict[str, tuple[str, ...]] = {
    "ddp": ("parallelism=ddp", "parallelism.replicas=8"),
    "fsdp": ("parallelism=fsdp", "parallelism.shards=8"),
    "hsdp": ("parallelism=hsdp", "parallelism.shards=4", "parallelism.replicate=2"),
    "tensor": ("parallelism=tensor", "parallelism.tensor=2"),
    "fsdp_tensor": ("parallelism=fsdp", "parallelism.shards=2", "parallelism.tensor=2"),
    "ulysses": CONTEXT,
    "gather": (*CONTEXT, "parallelism.attention=gather"),
    "sequence_warmup": (*CONTEXT, "+trainer.sequence_warmup={a:{until_step:7,sequence:64}}"),
    "pipeline": PIPELINE,
    "interleaved": (*PIPELINE, "model.layers=4", "parallelism.pipeline_schedule=interleaved_1f1b"),
}
WITHOUT_WAITS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "fp32": ("precision=fp32",),
    "bf16_true": ("precision=bf16_true",),
    "stochastic_rounding": ("precision=bf16_true", "precision.stochastic_rounding=true"),
    "fp16_mixed": ("precision=fp16_mixed",),
    "fp8": ("precision=fp8",),
    "accumulation": ("trainer.global_batch=16",),
    "packing": ("data.packing=true",),
    "loss_chunk": ("objective.loss_chunk=64",),
    "lora": ("adapter=lora",),
    "dora": ("adapter=dora",),
    "ia3": ("adapter=ia3",),
    "prefix": ("adapter=prefix",),
    "prompt": ("adapter=prompt",),
    "nf4": ("quantization=nf4", "adapter=lora"),
    "fp4": ("quantization=fp4", "adapter=lora"),
    "qat_int4": ("quantization=qat_int4",),
    "qat_8da4w": ("quantization=qat_8da4w",),
    "muon": ("optimizer=muon",),
    "lion": ("optimizer=lion",),
    "sgd": ("optimizer=sgd",),
    "schedule_free": ("optimizer=schedule_free", "schedule=constant"),
    "clip_percentile": ("trainer.clip_percentile=90", "trainer.rolling_window=2"),
    "in_backward": ("optimizer.in_backward=true", "trainer.clip_norm=null"),
    "checkpoint_full": ("memory=checkpoint_full",),
    "checkpoint_selective": ("memory=checkpoint_selective",),
    "offload_activations": ("memory=offload_activations",),
    "offload_all": ("memory=offload_activations", "memory.recompute=nothing"),
}
WITH_WAITS: dict[str, tuple[tuple[str, ...], int]] = {
    # torch's implementation reads two norms of each weight.
    "adafactor": (("optimizer=adafactor",), 2 * WEIGHTS),
    # The host compares the loss and the gradient norm with those of earlier steps.
    "skip_sigma": (("trainer.skip_sigma=6", "trainer.rolling_window=4"), 1),
    # The host steps a weight when its gradient has arrived.
    "offload": (("optimizer.offload=true",), WEIGHTS),
    # One more copy to the host, the gradient norm, and one back, the clipping factor.
    "cpu_offload": (
        ("parallelism=fsdp", "parallelism.shards=2", "parallelism.cpu_offload=true"),
        WEIGHTS + 2,
    ),
}


def waits_per_step(dry_cuda: Any, overrides: Sequence[str], rank: int = 0) -> dict[str, float]:
    answer = dry_cuda("fit_run", overrides=[*TINY, *overrides], rank=rank)
    waits: dict[str, float] = answer["waits"]
    return waits


@pytest.mark.parametrize("name", WITHOUT_WAITS)
def test_host_never_waits_on_one_device(name: str, dry_cuda: Any) -> None:
    assert waits_per_step(dry_cuda, WITHOUT_WAITS[name]) == {}


@pytest.mark.parametrize("name", PARALLELISM)
def test_host_never_waits_on_several_devices(name: str, dry_cuda: Any) -> None:
    """The first pipeline stage runs before the second, which reads its metadata."""
    waits = [waits_per_step(dry_cuda, PARALLELISM[name], rank) for rank in (0, 1)]
    assert waits == [{}, {}]


@pytest.mark.parametrize("name", WITH_WAITS)
def test_options_add_waits(name: str, dry_cuda: Any) -> None:
    overrides, expected = WITH_WAITS[name]
    waits = waits_per_step(dry_cuda, overrides)
    assert sum(waits.values()) == expected, waits


def test_wait_is_counted(dry_cuda: Any) -> None:
    counted = (
        "trusted_packages=[fixtures]",
        "+callbacks.read._target_=fixtures.faults.ReadLoss",
    )
    waits = waits_per_step(dry_cuda, counted)
    assert sum(waits.values()) == 1, waits
