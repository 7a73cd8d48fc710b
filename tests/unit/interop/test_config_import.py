"""Configs of Accelerate and DeepSpeed as command lines that compose."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from scalewise.commands import import_config
from scalewise.config.compose import compose
from scalewise.errors import ConfigError
from scalewise.interop import accelerate_import, deepspeed_import

ACCELERATE: list[tuple[dict[str, Any], str]] = [
    ({"distributed_type": "NO", "num_processes": 1}, "parallelism=single precision=fp32"),
    (
        {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "fp16"},
        "parallelism=ddp parallelism.replicas=8 precision=fp16_mixed",
    ),
    (
        {"distributed_type": "MULTI_CPU", "num_processes": 2},
        "parallelism=ddp parallelism.replicas=2 precision=fp32 hardware=cpu",
    ),
    (
        {
            "distributed_type": "FSDP",
            "num_processes": 8,
            "mixed_precision": "bf16",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": "false",
                "fsdp_offload_params": True,
                "fsdp_activation_checkpointing": True,
            },
        },
        "parallelism=fsdp parallelism.shards=8 parallelism.reshard_after_forward=false "
        "parallelism.cpu_offload=true memory=checkpoint_full precision=bf16_mixed",
    ),
    (
        {
            "distributed_type": "FSDP",
            "num_processes": 4,
            "fsdp_config": {"fsdp_sharding_strategy": 2},
        },
        "parallelism=fsdp parallelism.shards=4 parallelism.reshard_after_forward=false "
        "precision=fp32",
    ),
    (
        {
            "distributed_type": "FSDP",
            "num_processes": 4,
            "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"},
        },
        "parallelism=ddp parallelism.replicas=4 precision=fp32",
    ),
    (
        {
            "distributed_type": "DEEPSPEED",
            "num_processes": 4,
            "mixed_precision": "bf16",
            "deepspeed_config": {
                "zero_stage": 3,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "none",
                "gradient_clipping": 0.5,
            },
        },
        "parallelism=deepspeed_zero3 parallelism.offload_optimizer=cpu trainer.clip_norm=0.5 "
        "parallelism.replicas=4 precision=bf16_mixed",
    ),
    (
        {
            "distributed_type": "MEGATRON_LM",
            "num_processes": 8,
            "megatron_lm_config": {
                "megatron_lm_tp_degree": 2,
                "megatron_lm_pp_degree": 2,
                "megatron_lm_num_micro_batches": 4,
                "megatron_lm_sequence_parallelism": "true",
                "megatron_lm_use_distributed_optimizer": "true",
                "megatron_lm_recompute_activations": "true",
            },
        },
        "parallelism=mesh parallelism.shards=2 parallelism.shard=optimizer parallelism.tensor=2 "
        "parallelism.pipeline=2 parallelism.sequence_parallel=true "
        "parallelism.pipeline_micro_batches=4 memory=checkpoint_selective precision=fp32",
    ),
    (
        {
            "distributed_type": "FSDP",
            "num_processes": 8,
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2,
                "parallelism_config_sp_size": 2,
            },
        },
        "parallelism=mesh parallelism.shards=2 parallelism.context=2 parallelism.tensor=2 "
        "precision=fp32",
    ),
    (
        {
            "distributed_type": "FSDP",
            "num_processes": 4,
            "parallelism_config": {
                "parallelism_config_cp_size": 4,
                "parallelism_config_cp_comm_strategy": "alltoall",
            },
        },
        "parallelism=mesh parallelism.context=4 parallelism.attention=gather precision=fp32",
    ),
    (
        {
            "distributed_type": "MULTI_GPU",
            "num_processes": 2,
            "dynamo_config": {
                "dynamo_backend": "INDUCTOR",
                "dynamo_use_regional_compilation": True,
            },
        },
        "parallelism=ddp parallelism.replicas=2 precision=fp32 compile=block",
    ),
]

DEEPSPEED: list[tuple[dict[str, Any], str]] = [
    (
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "overlap_comm": False,
                "reduce_bucket_size": 52428800,
            },
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-7, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_min_lr": 0},
            },
        },
        "parallelism=deepspeed_zero2 parallelism.offload_optimizer=cpu "
        "parallelism.bucket_mib=200.0 parallelism.overlap_comm=false precision=bf16_mixed "
        "trainer.micro_batch=4 trainer.global_batch=64 parallelism.replicas=8 optimizer=adamw "
        "optimizer.lr=3e-05 optimizer.weight_decay=3e-07 optimizer.beta1=0.8 optimizer.beta2=0.999 "
        "optimizer.epsilon=1e-07 schedule=linear schedule.warmup_steps=10 trainer.max_steps=100 "
        "trainer.clip_norm=null",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 1000,
                "zero_hpz_partition_size": 2,
            },
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50}},
        },
        "parallelism=deepspeed_zero3 parallelism.keep_whole_below=1000 parallelism.hierarchical=2 "
        "precision=fp32 schedule=cosine trainer.max_steps=50 schedule.final=0.0001",
    ),
    (
        {"fp16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"},
        "parallelism=ddp",
    ),
]


@pytest.mark.usefixtures("cpu_machine")
@pytest.mark.parametrize(("config", "line"), ACCELERATE, ids=lambda it: it if str(it) == it else "")
def test_accelerate_configs_become_command_lines(
    config: dict[str, Any], line: str, tmp_path: Path
) -> None:
    translation = accelerate_import.translate(config, tmp_path)
    assert translation.command() == f"scalewise train {line}"
    assert not translation.notes
    overrides = shlex.split(translation.command())[2:]
    run = compose([*overrides, "trainer.micro_batch=8"], check_machine=False)
    assert run.world_size == config["num_processes"]


@pytest.mark.usefixtures("cpu_machine")
@pytest.mark.parametrize(("config", "line"), DEEPSPEED, ids=lambda it: it if str(it) == it else "")
def test_deepspeed_configs_become_command_lines(config: dict[str, Any], line: str) -> None:
    translation = deepspeed_import.translate(config)
    assert translation.command() == f"scalewise train {line}"
    compose(shlex.split(translation.command())[2:], check_machine=False)


def test_several_machines_become_a_torchrun_command(tmp_path: Path) -> None:
    config = {
        "distributed_type": "FSDP",
        "num_machines": 2,
        "num_processes": 16,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "machine_rank": 1,
        "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"},
    }
    translation = accelerate_import.translate(config, tmp_path)
    assert translation.command() == (
        "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d "
        "--rdzv-endpoint=10.0.0.1:29500 -m scalewise train parallelism=hsdp "
        "parallelism.replicate=2 parallelism.shards=8 precision=fp32"
    )
    assert translation.notes == ["machine_rank=1: c10d assigns ranks"]


def test_deepspeed_file_of_an_accelerate_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(json.dumps(DEEPSPEED[1][0]))
    config = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 4,
        "deepspeed_config": {"deepspeed_config_file": "zero.json"},
    }
    overrides = accelerate_import.translate(config, tmp_path).overrides
    assert overrides["parallelism"] == "deepspeed_zero3"
    assert overrides["parallelism.replicas"] == 4
    (tmp_path / "zero.json").write_text("{")
    with pytest.raises(ConfigError, match=r"zero\.json cannot be read as JSON"):
        accelerate_import.translate(config, tmp_path)


def test_keys_without_counterpart_are_named() -> None:
    config = {
        "bf16": {"enabled": "auto"},
        "steps_per_print": 10,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1, "round_robin_gradients": True},
        "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}},
        "scheduler": {"type": "OneCycle"},
        "unknown": {"a": 1},
    }
    assert deepspeed_import.translate(config).notes == [
        "zero_optimization.round_robin_gradients=true: has no counterpart",
        "bf16.enabled=auto: is the choice of the training script",
        "gradient_accumulation_steps=4: set trainer.global_batch to trainer.micro_batch x ranks x "
        "this number",
        "optimizer.type=OneBitAdam: is no option of optimizer; scalewise explain optimizer lists "
        "them",
        "optimizer.params.freeze_step=400: has no counterpart",
        "scheduler.type=OneCycle: is no option of schedule; scalewise explain schedule lists them",
        "steps_per_print=10: set trainer.log_every",
        "unknown={a:1}: has no counterpart",
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"distributed_type": "XLA"}, "distributed_type=XLA: has no counterpart"),
        ({"mixed_precision": "fp4"}, "mixed_precision=fp4: must be one of no, bf16"),
        ({"num_processes": "many"}, "num_processes=many: is not a number"),
        ({"num_processes": 0}, "num_processes=0: must be a positive integer"),
        ({"fsdp_config": "x"}, "fsdp_config=x: must be a mapping"),
        (
            {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 3},
            "num_processes=3: is no multiple of 2 machines",
        ),
        (
            {"num_processes": 8, "parallelism_config": {"parallelism_config_tp_size": 4}},
            "num_processes=8: the sizes in parallelism_config have the product 4",
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "num_processes": 3,
                "megatron_lm_config": {"megatron_lm_tp_degree": 2},
            },
            "num_processes=3: is no multiple of 2 tensor x 1 pipeline ranks",
        ),
    ],
)
def test_untranslatable_values_are_rejected(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        accelerate_import.translate(config, tmp_path).command()
    assert message in str(error.value)


def test_import_prints_the_command_and_names_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0,1\n")
    assert import_config.main(["accelerate", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == (
        "scalewise train parallelism=ddp parallelism.replicas=2 precision=fp32\n"
    )
    assert "gpu_ids=0,1: set the environment variable CUDA_VISIBLE_DEVICES=0,1" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "scalewise import accelerate FILE"),
        (["accelrate", "x"], "did you mean accelerate?"),
        (["accelerate"], "requires one file, not 0"),
        (["accelerate", "missing.yaml"], "missing.yaml cannot be read as YAML"),
        (["deepspeed", "missing.json"], "missing.json cannot be read as JSON"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        import_config.main(arguments)
    assert message in str(error.value)
