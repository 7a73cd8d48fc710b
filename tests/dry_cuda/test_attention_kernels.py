"""Attention kernels on an H100: with cuDNN before 9.15 (CUDA 12 wheels) and after (CUDA 13)."""

from __future__ import annotations

from typing import Any

import pytest

GROUPED = (
    "model=decoder_nano",
    "model.layers=2",
    "model.width=128",
    "model.heads=4",
    "model.kv_heads=2",
    "data=synthetic",
    "data.sequence=128",
    "trainer.micro_batch=2",
    "trainer.global_batch=null",
)
CONTEXT = ("parallelism=context", "parallelism.context=2")
OPTIONS: dict[str, tuple[str, ...]] = {
    "fp32": ("precision=fp32",),
    "bf16": ("precision=bf16_mixed",),
    "fp16": ("precision=fp16_mixed",),
    "bf16_true": ("precision=bf16_true",),
    "fp8": ("precision=fp8",),
    "dropout": ("precision=bf16_mixed", "model.dropout=0.125"),
    "packing": ("precision=bf16_mixed", "data.packing=true"),
    "packing_fp32": ("precision=fp32", "data.packing=true"),
    "prefix": ("precision=bf16_mixed", "adapter=prefix", "data.sequence=112"),
    "prompt": ("precision=bf16_mixed", "adapter=prompt", "data.sequence=112"),
    "lora": ("precision=bf16_mixed", "adapter=lora"),
    "fsdp": ("precision=bf16_mixed", "parallelism=fsdp", "parallelism.shards=2"),
    "tensor": ("precision=bf16_mixed", "parallelism=tensor", "parallelism.tensor=2"),
    "ulysses": ("precision=bf16_mixed", *CONTEXT),
    "gather": ("precision=bf16_mixed", *CONTEXT, "parallelism.attention=gather"),
    "gather_fp32": ("precision=fp32", *CONTEXT, "parallelism.attention=gather"),
    "selective": ("precision=bf16_mixed", "memory=checkpoint_selective"),
}


@pytest.mark.parametrize("prefer_cudnn", [False, True], ids=["cuda12", "cuda13"])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_never_computes_all_scores(name: str, prefer_cudnn: bool, dry_cuda: Any) -> None:
    """The math kernel stores a score for each pair of tokens; a fused kernel exists for each."""
    overrides = [*GROUPED, *OPTIONS[name]]
    kernels = dry_cuda("fit_run", overrides=overrides, prefer_cudnn=prefer_cudnn)["backends"]
    assert "math" not in kernels
    if name == "bf16":
        assert kernels.keys() == {"cudnn" if prefer_cudnn else "flash"}
    if name == "fp32":
        assert kernels.keys() == {"efficient"}
