"""Rules between a mixture of experts and the other parts of a run."""

from __future__ import annotations

import pytest

from scalewise import ConfigError, compose
from scalewise.models.decoder.config import DecoderConfig
from scalewise.optimizers.config import MuonConfig

EXPERTS = ("model=moe_nano", "data=synthetic", "model.balance_rate=0")
TENSOR_EXPERTS = ("parallelism=tensor", "parallelism.shards=2", "model.shared_experts=1")
FSDP_ON_H100 = ("hardware=h100", "parallelism=fsdp", "parallelism.shards=8")


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (
            ("parallelism=tensor", "parallelism.shards=12", "parallelism.expert=4"),
            "parallelism.shards",
            "set parallelism.shards=4",
        ),
        (
            (*TENSOR_EXPERTS, "adapter=dora", "adapter.targets=[.*]"),
            "adapter.targets",
            "set adapter=lora, or parallelism=fsdp parallelism.tensor=1",
        ),
        (
            (*TENSOR_EXPERTS, "adapter=ia3", "adapter.targets=[.*down]"),
            "adapter.targets",
            "set adapter=lora, or parallelism=fsdp parallelism.tensor=1",
        ),
        (
            (*TENSOR_EXPERTS, "adapter=lora", "adapter.targets=[.*]", "adapter.rank=5"),
            "adapter.rank",
            "set adapter.rank=6",
        ),
        (
            ("parallelism=tensor", "parallelism.tensor=2", "hardware=h100", "compile=block"),
            "compile",
            "set compile=none, or parallelism=fsdp parallelism.tensor=1",
        ),
        (
            ("parallelism=tensor", "model.expert_dim=33"),
            "parallelism.tensor",
            "set parallelism.tensor=1",
        ),
        (
            ("parallelism=tensor", "parallelism.shards=3"),
            "parallelism.shards",
            "set parallelism.shards=1",
        ),
        ((*FSDP_ON_H100, "precision=fp8"), "precision", "set precision=bf16_mixed"),
        (("quantization=nf4", "adapter=lora"), "quantization", "set quantization=none"),
        (("quantization=qat_int4",), "quantization", "set quantization=none"),
        (
            ("parallelism=deepspeed_zero2", "model.aux_loss=0.01"),
            "model.aux_loss",
            "set model.aux_loss=0, or parallelism=fsdp",
        ),
        (
            ("hardware=h100", "precision=fp16_mixed", "model.router_z_loss=0.01"),
            "model.router_z_loss",
            "set model.router_z_loss=0, or precision=bf16_mixed",
        ),
        (
            ("parallelism=context", "model.aux_loss=0.01"),
            "model.aux_loss",
            "set model.aux_loss=0 model.balance_rate=0.001",
        ),
        (
            ("precision=bf16_true", "model.balance_rate=0.001"),
            "model.balance_rate",
            "set precision=bf16_mixed, or model.balance_rate=0",
        ),
        (
            ("trainer.micro_batch=4", "trainer.global_batch=6", "model.aux_loss=0.01"),
            "trainer.global_batch",
            "set trainer.global_batch=8",
        ),
        (
            ("trainer.micro_batch=4", "trainer.global_batch=6", "model.capacity_factor=1.25"),
            "trainer.global_batch",
            "set trainer.global_batch=8",
        ),
        (
            ("parallelism=fsdp", "parallelism.shards=3", "parallelism.expert=3"),
            "parallelism.expert",
            "set model.experts=9",
        ),
        (
            ("adapter=lora", "adapter.targets=[.*]", "adapter.dropout=0.1"),
            "adapter.dropout",
            "set adapter.dropout=0",
        ),
        (
            ("adapter=dora", "adapter.targets=[feedforward.experts.up]"),
            "adapter.targets",
            "set adapter=lora",
        ),
        (
            ("adapter=lora", "adapter.targets=[feedforward.experts.uq]"),
            "adapter.targets",
            "did you mean feedforward.experts.up?",
        ),
        (
            ("model=decoder_nano", "parallelism=fsdp", "parallelism.expert=2"),
            "parallelism.expert",
            "set parallelism.expert=1",
        ),
        (
            ("parallelism=fsdp", "parallelism.shards=3", "parallelism.expert=2"),
            "parallelism.expert",
            "set parallelism.expert=1, or parallelism.shards=2",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_unsupported_parts_are_rejected(overrides: tuple[str, ...], key: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose((*EXPERTS, *overrides), check_machine=False)
    assert (key, fix) in [(issue.key, issue.fix) for issue in error.value.issues]


@pytest.mark.parametrize(
    ("adapter", "targets", "roles"),
    [
        ("lora", "auto", {"attention"}),
        ("lora", ".*", {"attention", "experts"}),
        ("rslora", "feedforward.experts.*", {"experts"}),
        ("dora", ".*", {"attention", "scale"}),
        ("pissa", ".*", {"attention"}),
        ("ia3", ".*", {"scale"}),
    ],
)
def test_lora_and_rslora_adapt_experts(adapter: str, targets: str, roles: set[str]) -> None:
    overrides = (*EXPERTS, f"adapter={adapter}", f"adapter.targets=[{targets}]")
    run = compose(overrides, check_machine=False)
    trained = [weight for weight in run.weight_census() if weight.trainable]
    assert {weight.role for weight in trained} == roles
    experts = sum(weight.numel for weight in trained if weight.role == "experts")
    assert isinstance(run.model, DecoderConfig)
    sizes = run.model.width + run.model.hidden_dim
    expected = run.model.layers * 3 * run.model.routed_experts * run.adapter.rank * sizes
    assert experts == expected * ("experts" in roles)


@pytest.mark.parametrize(
    "adapter",
    [
        ("adapter=lora", "adapter.targets=[.*]"),
        (
            "adapter=lora",
            "adapter.rank=5",
            "adapter.targets=[attention.*,feedforward.experts.down]",
        ),
        ("adapter=pissa", "adapter.targets=[.*]"),
        ("adapter=dora", "adapter.targets=[.*up]"),
        ("adapter=ia3",),
        ("adapter=prefix", "data.sequence=32"),
        ("adapter=prompt", "data.sequence=32"),
    ],
    ids=" ".join,
)
def test_adapters_support_tensor_parallel_experts(adapter: tuple[str, ...]) -> None:
    compose((*EXPERTS, *TENSOR_EXPERTS, *adapter), check_machine=False)


def test_muon_updates_experts_by_adamw() -> None:
    run = compose((*EXPERTS, "optimizer=muon"), check_machine=False)
    assert isinstance(run.optimizer, MuonConfig)
    hidden = {w.role for w in run.weight_census() if run.optimizer.is_hidden(w)}
    assert hidden == {"attention"}


def test_blocks_with_tensor_parallel_experts_are_not_compiled_by_default() -> None:
    on_h100 = (*EXPERTS, "hardware=h100", "hardware.devices_per_node=2")
    sharded = compose([*on_h100, "parallelism=tensor"], check_machine=False)
    whole = compose([*on_h100, "parallelism=fsdp"], check_machine=False)
    assert (sharded.is_compiled, whole.is_compiled) == (False, True)
