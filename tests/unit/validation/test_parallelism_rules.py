"""Rejected parallelism strategies: key, reason and fix."""

import pytest
from fixtures.rejections import REJECTION_FIELDS, RejectionCase, assert_rejected, overrides_id

from scalewise.config.compose import compose
from scalewise.errors import ConfigError
from scalewise.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("cpu_machine", "example_files")

REJECTED_MESHES: list[RejectionCase] = [
    (["parallelism=mesh", "parallelism.shards=0"], "parallelism.shards", "1 or more, or auto", ""),
    (["parallelism=mesh", "parallelism.shards=x"], "parallelism.shards", "1 or more, or auto", ""),
    (
        ["parallelism=fsdp", "parallelism.tensor=auto"],
        "parallelism.tensor",
        "only one size may be auto, and shards is",
        "parallelism.tensor=2",
    ),
    (
        ["parallelism=pipeline", "parallelism.pipeline_schedule=zbv_zero_bubble",
         "parallelism.stages_per_rank=4", "trainer.micro_batch=8"],
        "parallelism.stages_per_rank",
        "zbv_zero_bubble requires 2 stages per rank",
        "set parallelism.stages_per_rank=null",
    ),
    (
        ["parallelism=pipeline", "parallelism.pipeline_schedule=interleaved_1f1b",
         "parallelism.stages_per_rank=1"],
        "parallelism.stages_per_rank",
        "interleaved_1f1b requires 2 or more stages per rank",
        "set parallelism.stages_per_rank=null",
    ),
    (
        ["quantization=nf4", "adapter=lora", "parallelism=tensor"],
        "parallelism.tensor",
        "would shard the matrices that quantization=nf4 packs",
        "parallelism=fsdp",
    ),
    (
        ["precision=fp8", "parallelism=tensor"],
        "parallelism.tensor",
        "would compute fp8 scales per rank",
        "parallelism=fsdp",
    ),
    (
        ["precision=fp8", "parallelism=context"],
        "parallelism.context",
        "would compute fp8 scales per rank",
        "parallelism=fsdp",
    ),
    (
        ["precision=fp8", "parallelism=deepspeed_zero2"],
        "parallelism",
        "does not support fp8",
        "set parallelism=fsdp",
    ),
    (
        ["quantization=qat_8da4w", "parallelism=tensor"],
        "parallelism.tensor",
        "would compute quantization scales per rank",
        "parallelism=fsdp",
    ),
    (
        ["quantization=qat_int4", "parallelism=deepspeed_zero3"],
        "parallelism",
        "is not supported with quantization=qat_int4",
        "set parallelism=fsdp",
    ),
    (
        ["quantization=nf4", "adapter=lora", "parallelism=deepspeed_zero2"],
        "parallelism",
        "casts the parameters that quantization=nf4 packs",
        "set parallelism=fsdp",
    ),
    (
        ["parallelism=pipeline", "parallelism.stages_per_rank=2"],
        "parallelism.stages_per_rank",
        "one_f_one_b requires 1 stage per rank",
        "set parallelism.stages_per_rank=null",
    ),
    (
        ["parallelism=single", "parallelism.stage=2"],
        "parallelism.stage",
        "no such key",
        "it is a key of parallelism=deepspeed_zero1, deepspeed_zero2, deepspeed_zero2_offload",
    ),
    (
        ["parallelism=tensor", "parallelism.tensor=2", "model.kv_heads=1"],
        "parallelism.tensor",
        "does not divide model.kv_heads=1",
        "parallelism.tensor=1",
    ),
    (
        ["parallelism=tensor", "parallelism.tensor=2", "model.feedforward=341"],
        "parallelism.tensor",
        "does not divide model.feedforward=341",
        "parallelism.tensor=1",
    ),
    (
        ["parallelism=tensor", "parallelism.tensor=4", "data.sequence=54"],
        "parallelism.tensor",
        "does not divide the 54 tokens of a sequence on a rank",
        "parallelism.sequence_parallel=false",
    ),
    (
        ["parallelism=tensor", "objective.label_smoothing=0.1"],
        "parallelism.loss_parallel",
        "not supported with objective.label_smoothing",
        "parallelism.loss_parallel=false",
    ),
    (
        ["parallelism=context", "objective=dpo", "data=corpus_pairs"],
        "objective",
        "context ranks have a part each",
        "parallelism=fsdp",
    ),
    (
        ["parallelism=pipeline", "objective=dpo", "data=corpus_pairs"],
        "objective",
        "which pipeline stages do not pass on",
        "parallelism=fsdp",
    ),
    (
        ["parallelism=mesh", "parallelism.shards=2", "parallelism.context=2", "objective=dpo",
         "data=corpus_pairs"],
        "objective",
        "context ranks have a part each",
        "parallelism.context=1",
    ),
    (
        ["parallelism=mesh", "parallelism.shards=2", "parallelism.tensor=2", "objective=grpo",
         "data=reversal", "data.sequence=32"],
        "objective",
        "tensor ranks have a part each",
        "parallelism.tensor=1",
    ),
    (
        ["parallelism=context", "data.sequence=54"],
        "data.sequence",
        "not a multiple of 4, the number of chunks for 2 context ranks",
        "data.sequence=52",
    ),
    (
        ["parallelism=context", "parallelism.balanced=false", "data.sequence=53"],
        "data.sequence",
        "not a multiple of 2",
        "data.sequence=52",
    ),
    (
        ["parallelism=context", "parallelism.context=8", "data.sequence=64"],
        "parallelism.context",
        "does not divide the 4 heads that Ulysses splits",
        "parallelism.attention=gather",
    ),
    (
        ["parallelism=pipeline", "parallelism.pipeline=8"],
        "parallelism.pipeline",
        "requires 8 stages, and the model has 4 layers",
        "parallelism.pipeline=4",
    ),
    (
        ["parallelism=pipeline", "parallelism.pipeline=4", "parallelism.pipeline_micro_batches=2"],
        "parallelism.pipeline_micro_batches",
        "is less than the 4 stages",
        "parallelism.pipeline_micro_batches=4",
    ),
    (
        ["parallelism=pipeline", "trainer.micro_batch=3"],
        "trainer.micro_batch",
        "is not a multiple of the 2 pipeline micro-batches",
        "trainer.micro_batch=2",
    ),
    (
        ["parallelism=pipeline", "parallelism.pipeline_schedule=zbv_zero_bubble",
         "memory=checkpoint_selective"],
        "memory.recompute",
        "one backward pass, and zbv_zero_bubble runs two",
        "memory=none",
    ),
    *(
        (
            ["parallelism=pipeline", f"parallelism.pipeline_schedule={schedule}",
             f"memory={memory}"],
            "memory.recompute",
            f"recomputes a block once for each group of its weights with {schedule}",
            fix,
        )
        for schedule in ("zbv_zero_bubble", "interleaved_zero_bubble")
        for memory in ("checkpoint_full", "checkpoint_every_n", "offload_activations")
        for fix in ("memory=none", "parallelism.pipeline_schedule=interleaved_1f1b")
    ),
    *(
        (
            ["parallelism=pipeline", f"parallelism.pipeline_schedule={schedule}",
             f"compile={scope}"],
            "compile.scope",
            f"compiles a backward pass as one graph, and {schedule} splits it",
            "parallelism.pipeline_schedule=interleaved_1f1b",
        )
        for schedule in ("zbv_zero_bubble", "interleaved_zero_bubble")
        for scope in ("block", "whole")
    ),
    (
        ["parallelism=fsdp", "optimizer.offload=true"],
        "optimizer.offload",
        "its own offload option",
        "parallelism.cpu_offload=true",
    ),
    (
        ["parallelism=fsdp", "parallelism.shards=1", "parallelism.cpu_offload=true"],
        "parallelism.cpu_offload",
        "no axis shards them",
        "parallelism.shards=2",
    ),
    (
        ["parallelism=tensor", "parallelism.async_tensor=true"],
        "parallelism.async_tensor",
        "not implemented",
        "set parallelism.async_tensor=false",
    ),
    (
        ["parallelism=ddp", "parallelism.comm_hook=bf16"],
        "parallelism.comm_hook",
        "gloo does not support bf16",
        "parallelism.comm_hook=fp16",
    ),
    (
        ["parallelism=ddp", "parallelism.comm_hook=powersgd", "parallelism.lossless_steps=1"],
        "parallelism.lossless_steps",
        "2 or more with comm_hook=powersgd",
        "parallelism.lossless_steps=2",
    ),
    (
        ["parallelism=ddp", "parallelism.comm_hook=post_local_sgd", "optimizer.shard=true"],
        "optimizer.shard",
        "from the samples of one rank only",
        "optimizer.shard=false",
    ),
    (
        [
            *("parallelism=ddp", "parallelism.comm_hook=post_local_sgd"),
            *("optimizer=schedule_free", "schedule=constant"),
        ],
        "optimizer",
        "keeps a second copy of the weights, which local SGD does not average over ranks",
        "parallelism.comm_hook=none",
    ),
    (
        ["parallelism=ddp", "parallelism.static_graph=true", "trainer.global_batch=40"],
        "parallelism.static_graph",
        "fails with 3 micro-batches per step",
        "trainer.global_batch=16",
    ),
]  # fmt: skip


@pytest.mark.parametrize(REJECTION_FIELDS, REJECTED_MESHES, ids=overrides_id)
def test_parallelism_issue_names_key_reason_and_fix(
    overrides: list[str], key: str, reason: str, fix: str
) -> None:
    assert_rejected(overrides, key, reason, fix)


def test_fp16_rejects_options_that_read_scaled_gradients() -> None:
    overrides = ["optimizer.in_backward=true", "trainer.clip_norm=null", "hardware=v100"]
    with pytest.raises(ConfigError) as excinfo:
        compose([*overrides, "precision=fp16_mixed"], check_machine=False)
    (issue,) = excinfo.value.issues
    assert issue.key == "optimizer.in_backward"
    assert "known to be finite" in issue.reason


def test_fp16_is_rejected_with_a_mesh() -> None:
    overrides = ["parallelism=fsdp", "precision=fp16_mixed", "hardware=v100"]
    with pytest.raises(ConfigError) as excinfo:
        compose(overrides, check_machine=False)
    (issue,) = excinfo.value.issues
    assert (issue.key, issue.value) == ("precision", "fp16_mixed")
    assert "does not scale fp16 gradients" in issue.reason
    assert "parallelism=ddp" in issue.fix
    compose(["parallelism=ddp", *overrides[1:]], check_machine=False)


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["hardware=a100_80g"], "precision", "A100 has no fp8 matmuls"),
        (["hardware=h100", "precision.compute=fp16"], "precision.compute", "no loss scale"),
    ],
)
def test_fp8_requires_device_support(overrides: list[str], key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        compose(["precision=fp8", *overrides], check_machine=False)
    (issue,) = excinfo.value.issues
    assert issue.key == key
    assert reason in issue.reason


UNEVEN_BATCH = ["trainer.micro_batch=3", "trainer.global_batch=8"]


@pytest.mark.parametrize(
    "overrides",
    [
        UNEVEN_BATCH,
        [*UNEVEN_BATCH, "parallelism=ddp"],
        ["parallelism=context", "data.sequence=53", "parallelism.context=1"],
        ["parallelism=context", "data.sequence=54", "parallelism.balanced=false"],
        ["parallelism=context", "parallelism.context=8", "parallelism.attention=gather"],
        ["parallelism=tensor", "data.sequence=53", "parallelism.sequence_parallel=false"],
        ["parallelism=tensor", "objective.label_smoothing=0.1", "parallelism.loss_parallel=false"],
        ["parallelism=pipeline", "trainer.micro_batch=6", "parallelism.pipeline_micro_batches=3"],
        ["parallelism=pipeline", "parallelism.pipeline_schedule=zbv_zero_bubble"],
        ["parallelism=pipeline", "parallelism.pipeline_schedule=interleaved_1f1b", "compile=block"],
        ["parallelism=context", "parallelism.cpu_offload=true"],
        ["parallelism=ddp", "parallelism.static_graph=true"],
        ["parallelism=ddp", "parallelism.comm_hook=fp16"],
    ],
    ids=" ".join,
)
def test_similar_valid_combinations_are_accepted(overrides: list[str]) -> None:
    assert isinstance(compose(overrides), RunConfig)


def test_async_tensor_is_rejected_on_cuda() -> None:
    overrides = ["parallelism=tensor", "parallelism.async_tensor=true", "compile=block"]
    with pytest.raises(ConfigError) as caught:
        compose([*overrides, "hardware=h100"], check_machine=False)
    (issue,) = caught.value.issues
    assert issue.key == "parallelism.async_tensor"
    assert "not implemented" in issue.reason
