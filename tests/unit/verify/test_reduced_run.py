"""Sizes of the runs of ``scalewise verify``."""

from __future__ import annotations

import pytest
from fixtures.compatibility_matrix import EXPERTS
from fixtures.strategies import TINY_DECODER

from scalewise import ConfigError, compose
from scalewise.hardware import DeviceKind
from scalewise.models.decoder.config import DecoderConfig
from scalewise.optimizers.lr_transfer import LRTransfer
from scalewise.parallelism.mesh import MeshConfig
from scalewise.verify.reduced_run import in_fp32, is_fp32, reduce_run, reference_run

LLAMA_3D = (
    "model=llama3_8b",
    "data=synthetic",
    "data.sequence=8192",
    "hardware=cpu",
    "precision=bf16_mixed",
    "trainer.micro_batch=4",
    "trainer.global_batch=512",
    "parallelism=mesh",
    "parallelism.pipeline=4",
    "parallelism.shards=8",
    "parallelism.tensor=8",
)


def test_large_run_is_reduced_in_every_dimension() -> None:
    small = reduce_run(compose(LLAMA_3D, check_machine=False))
    assert isinstance(small.model, DecoderConfig)
    assert isinstance(small.parallelism, MeshConfig)
    sizes = {"pipeline": 2, "replicate": 1, "shards": 2, "context": 1, "tensor": 2}
    assert small.parallelism.sizes == sizes
    model = small.model
    assert (model.layers, model.width, model.heads, model.kv_heads) == (2, 64, 8, 2)
    assert model.vocabulary == 128_256
    assert small.data.sequence == 128
    assert (small.micro_batch, small.accumulation, small.global_batch) == (2, 2, 8)
    assert small.hardware.device is DeviceKind.cpu
    assert (small.option("optimizer"), small.tracking.is_enabled) == ("adamw", False)
    assert not is_fp32(small)
    assert is_fp32(in_fp32(small))


def test_experts_are_reduced_like_a_dense_feedforward() -> None:
    run = compose(["model=qwen3_30b_a3b", "data=synthetic", "tracking=none"], check_machine=False)
    small = reduce_run(run).model
    assert isinstance(small, DecoderConfig)
    assert isinstance(run.model, DecoderConfig)
    assert small.experts == run.model.experts
    assert (small.width, small.expert_dim) == (64, 16)


@pytest.mark.parametrize("width", [16, 64])
def test_experts_with_capacity_drop_no_token(width: int) -> None:
    """Which tokens are dropped depends on the ranks, so one device would drop others."""
    capacity = ("model.capacity_factor=0.5", "parallelism=fsdp", f"verify.width={width}")
    run = compose([*EXPERTS, "data=synthetic", "data.sequence=32", "tracking=none", *capacity])
    model = reduce_run(run).model
    assert isinstance(model, DecoderConfig)
    assert model.expert_capacity(64) == 64


def test_small_run_keeps_mup_with_half_its_width_as_base_model() -> None:
    mup = ("optimizer.lr_transfer=mup", "model.base_width=32", "model.base_heads=4")
    run = compose([*TINY_DECODER, "model.width=128", *mup, "verify.width=64"])
    small = reduce_run(run)
    assert isinstance(small.model, DecoderConfig)
    assert (small.model.width, small.model.base_width) == (64, 32)
    assert small.optimizer.lr_transfer is run.optimizer.lr_transfer is LRTransfer.mup


def test_small_run_keeps_its_sizes_and_an_uneven_batch() -> None:
    overrides = (*TINY_DECODER, "parallelism=ddp", "trainer.micro_batch=1")
    run = compose([*overrides, "trainer.global_batch=3", "verify.layers=8"])
    small = reduce_run(run)
    assert small.model == run.model
    assert (small.micro_batch, small.global_batch, small.accumulation) == (1, 3, 2)
    reference = reference_run(small)
    assert (reference.world_size, reference.micro_batch, reference.accumulation) == (1, 3, 1)


def test_pipeline_has_a_layer_per_stage_and_a_sample_per_micro_batch() -> None:
    overrides = (*TINY_DECODER, "parallelism=pipeline", "verify.layers=1", "verify.micro_batch=1")
    schedule = ("parallelism.pipeline_schedule=zbv_zero_bubble", "trainer.micro_batch=8")
    small = reduce_run(compose([*overrides, *schedule]))
    assert (small.model.layers, small.micro_batch) == (4, 4)


def test_warmups_are_left_out() -> None:
    lengths = "+trainer.sequence_warmup={a:{until_step:10,sequence:1024}}"
    batches = "+trainer.batch_warmup={a:{until_step:20,global_batch:8}}"
    sizes = ("data.sequence=2048", "trainer.global_batch=16")
    small = reduce_run(compose(["model=llama_160m", "data=synthetic", *sizes, lengths, batches]))
    assert small.data.sequence == 128
    assert small.tokens_in_step.stages == ()


@pytest.mark.parametrize("hook", ["powersgd", "fp16_powersgd", "post_local_sgd"])
def test_hooks_that_change_updates_are_rejected(hook: str) -> None:
    ddp = ("model=llama_160m", "data=synthetic", "parallelism=ddp")
    with pytest.raises(ConfigError) as error:
        reduce_run(compose([*ddp, f"parallelism.comm_hook={hook}"]))
    (issue,) = error.value.issues
    assert (issue.key, issue.value) == ("parallelism.comm_hook", hook)
    assert issue.fix == "set parallelism.comm_hook=none"
    reduce_run(compose([*ddp, "parallelism.comm_hook=fp16"]))  # rounds, as precisions do


def test_sizes_out_of_range_are_rejected() -> None:
    with pytest.raises(ConfigError) as error:
        compose(["verify.steps=0", "verify.width=8", "verify.learning_rate=0"])
    assert [issue.key for issue in error.value.issues] == [
        "verify.steps",
        "verify.width",
        "verify.learning_rate",
    ]
    assert error.value.issues[1].fix == "set verify.width=64"
