"""Predicted peak memory of runs on an H100, compared with a trace of CUDA's operators."""

from __future__ import annotations

from typing import Any

import pytest

BASE = (
    "model=tinyllama_1b",
    "data=synthetic",
    "data.sequence=2048",
    "trainer.micro_batch=4",
    "trainer.global_batch=null",
    "precision=bf16_mixed",
)
TOLERANCE = 0.05
FSDP = ("parallelism=fsdp", "parallelism.shards=8")
TENSOR = ("parallelism=tensor", "parallelism.tensor=2")
PIPELINE = (
    "parallelism=pipeline",
    "parallelism.pipeline=2",
    "trainer.micro_batch=4",
    "trainer.global_batch=8",
)

EXPERTS = ("model.experts=8", "model.expert_dim=512")
CONFIGS: dict[str, tuple[str, ...]] = {
    "single": (),
    "bf16_true": ("precision=bf16_true",),
    "fp32": ("precision=fp32",),
    "fp16_mixed": ("precision=fp16_mixed",),
    "fp8": ("precision=fp8",),
    "full": ("memory=checkpoint_full",),
    "selective": ("memory=checkpoint_selective",),
    "offload": ("memory=offload_activations",),
    "offload_all": ("memory=offload_activations", "memory.recompute=nothing"),
    "offload_all_bf16_true": (
        "memory=offload_activations",
        "memory.recompute=nothing",
        "precision=bf16_true",
    ),
    "offload_lora": (
        "memory=offload_activations",
        "memory.recompute=nothing",
        "adapter=lora",
    ),
    "fsdp_offload": (*FSDP, "memory=offload_activations", "memory.recompute=nothing"),
    "pipeline_offload": (*PIPELINE, "memory=offload_activations", "memory.recompute=nothing"),
    "every_n": ("memory=checkpoint_every_n",),
    "fp8_selective": ("precision=fp8", "memory=checkpoint_selective"),
    "bf16_true_full": ("precision=bf16_true", "memory=checkpoint_full"),
    "loss_chunk": ("objective.loss_chunk=1024",),
    "loss_chunk_full": ("objective.loss_chunk=1024", "memory=checkpoint_full"),
    "packing": ("data.packing=true",),
    "packing_full": ("data.packing=true", "memory=checkpoint_full"),
    "lora": ("adapter=lora",),
    "lora_full": ("adapter=lora", "memory=checkpoint_full"),
    "dora": ("adapter=dora",),
    "ia3": ("adapter=ia3",),
    "prefix": ("adapter=prefix", "data.sequence=2032"),
    "prompt": ("adapter=prompt", "data.sequence=2032"),
    "qat_int4": ("quantization=qat_int4",),
    "adafactor": ("optimizer=adafactor",),
    "adamw_8bit": ("optimizer=adamw_8bit",),
    "adamw_4bit": ("optimizer=adamw_4bit",),
    "sgd": ("optimizer=sgd",),
    "lion": ("optimizer=lion",),
    "muon": ("optimizer=muon",),
    "unfused": ("optimizer.fused=false",),
    "in_backward": ("optimizer.in_backward=true", "trainer.clip_norm=null"),
    "no_clip": ("trainer.clip_norm=null",),
    "accumulation": ("trainer.global_batch=16",),
    "long": ("model.context=8192", "data.sequence=8192", "trainer.micro_batch=1"),
    "gpt2": ("model=gpt2_124m", "data.sequence=256"),
    "llama3_8b_fsdp_full": ("model=llama3_8b", *FSDP, "memory=checkpoint_full"),
    "fsdp_fp32": (*FSDP, "precision=fp32"),
    "fsdp": FSDP,
    "fsdp_lora": (*FSDP, "adapter=lora"),
    "fsdp_full": (*FSDP, "memory=checkpoint_full"),
    "fsdp_selective": (*FSDP, "memory=checkpoint_selective"),
    "fsdp_fp8_selective": (*FSDP, "precision=fp8", "memory=checkpoint_selective"),
    "tensor": TENSOR,
    "tensor_full": (*TENSOR, "memory=checkpoint_full"),
    "fsdp_tensor": ("parallelism=fsdp", "parallelism.shards=4", "parallelism.tensor=2"),
    "hsdp": ("parallelism=hsdp", "parallelism.shards=4", "parallelism.replicate=2"),
    "ulysses": ("parallelism=context", "parallelism.context=2"),
    "gather": ("parallelism=context", "parallelism.context=2", "parallelism.attention=gather"),
    "pipeline": PIPELINE,
    "experts": EXPERTS,
    "fsdp_experts": (*FSDP, *EXPERTS),
    "expert_parallel": (*FSDP, *EXPERTS, "parallelism.expert=2", "memory=checkpoint_selective"),
}
CHECKED_SELDOM = {
    *("accumulation", "adamw_4bit", "bf16_true_full", "every_n", "fp16_mixed", "fp8_selective"),
    *("fsdp_offload", "ia3", "lora_full", "offload_all_bf16_true", "offload_lora"),
    *("packing_full", "pipeline_offload", "tensor_full"),
}
"""Options that others cover one by one."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in CHECKED_SELDOM else ())
        for name in CONFIGS
    ],
)
def test_predicted_peak_equals_that_of_cuda_operators(name: str, dry_cuda: Any) -> None:
    answer = dry_cuda("trace_memory", overrides=[*BASE, *CONFIGS[name]])
    assert answer["planned"] == pytest.approx(answer["traced"], rel=TOLERANCE), answer["backends"]


def test_plan_and_trace_include_the_matmul_workspaces(dry_cuda: Any) -> None:
    overrides = ["model=gpt2_124m", "data=synthetic", "data.sequence=256"]
    with_them, without = (
        dry_cuda("trace_memory", overrides=[*overrides, f"hardware.matmul_workspace_mib={mib}"])
        for mib in (64, 0)
    )
    for method in ("planned", "traced"):
        assert with_them[method] - without[method] == 64 * 2**20, method


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("memory.recompute=nothing",),
        ("memory.recompute=nothing", "adapter=lora"),
        ("trainer.global_batch=16",),
    ],
)
def test_predicted_pinned_memory_equals_that_of_a_trace(
    overrides: tuple[str, ...], dry_cuda: Any
) -> None:
    offload = ("memory=offload_activations", "model.layers=4")
    answer = dry_cuda("trace_pinned_memory", overrides=[*BASE, *offload, *overrides])
    assert answer["planned"] == answer["traced"]
