"""Accelerate's YAML config of a run."""

from __future__ import annotations

from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind
from scalewise.interop.translation import ExternalConfig
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.op_graph import Recompute
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig, OffloadTarget
from scalewise.parallelism.mesh import ContextAttention, MeshConfig, ShardedState
from scalewise.parallelism.single import SingleConfig
from scalewise.precision.config import Float8, FloatFormat
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope


def accelerate_config(run: RunConfig) -> ExternalConfig:
    """Return Accelerate's config of a run.

    Raises ``ConfigError`` for a parallelism strategy that Accelerate does not have.
    """
    config = ExternalConfig()
    on_cpu, ranks = run.hardware.device is DeviceKind.cpu, run.world_size
    config.values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": _mixed_precision(run, config),
        "num_machines": run.hardware.nodes,
        "num_processes": ranks,
        "machine_rank": 0,
        "rdzv_backend": "c10d",
        "main_training_function": "main",
        "use_cpu": on_cpu,
        "debug": False,
    }
    parallelism = run.parallelism
    if isinstance(parallelism, DeepSpeedConfig):
        _add_deepspeed(run, parallelism, config)
    elif isinstance(parallelism, MeshConfig):
        _add_mesh(run, parallelism, config)
    elif isinstance(parallelism, DDPConfig):
        config.values["distributed_type"] = "MULTI_CPU" if on_cpu else "MULTI_GPU"
    elif not isinstance(parallelism, SingleConfig):
        reason = "Accelerate has no counterpart of this strategy"
        raise ConfigError.for_key("parallelism", run.option("parallelism"), reason)
    _add_compilation(run, config)
    config.notes.append(
        "model, data, objective, optimizer, schedule, batch sizes and clipping belong to the script"
    )
    return config


def _mixed_precision(run: RunConfig, config: ExternalConfig) -> str:
    precision = run.precision
    if precision.parameters is FloatFormat.bf16:
        config.notes.append("precision=bf16_true: load the model with dtype=torch.bfloat16")
        return "no"
    if isinstance(precision, Float8):
        config.values["fp8_config"] = {"backend": "AO"}
        return "fp8"
    return "no" if precision.compute is FloatFormat.fp32 else precision.compute.value


def _add_deepspeed(run: RunConfig, deepspeed: DeepSpeedConfig, config: ExternalConfig) -> None:
    section: dict[str, object] = {
        "zero_stage": deepspeed.stage,
        "gradient_accumulation_steps": run.accumulation,
        "offload_optimizer_device": deepspeed.offload_optimizer.value,
        "offload_param_device": deepspeed.offload_parameters.value,
        "zero3_init_flag": deepspeed.stage == 3,
    }
    if run.trainer.clip_norm is not None:
        section["gradient_clipping"] = run.trainer.clip_norm
    for key, target in (
        ("offload_optimizer", deepspeed.offload_optimizer),
        ("offload_param", deepspeed.offload_parameters),
    ):
        if target is OffloadTarget.nvme:
            section[f"{key}_nvme_path"] = deepspeed.nvme_path or "none"
    config.values |= {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    config.notes.append("bucket sizes and ZeRO++: scalewise export deepspeed writes them")


def _add_mesh(run: RunConfig, mesh: MeshConfig, config: ExternalConfig) -> None:
    if mesh.sizes["pipeline"] > 1:
        key, size = "parallelism.pipeline", mesh.sizes["pipeline"]
        reason = "Accelerate has no pipeline parallelism of its own for training"
        raise ConfigError.for_key(key, size, reason, f"set {key}=1")
    keeps = not mesh.reshard_after_forward
    if mesh.shard is not ShardedState.parameters:
        config.notes.append(f"parallelism.shard={mesh.shard}: FSDP2 partitions parameters too")
        keeps = True
    section: dict[str, object] = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": not keeps,
        "fsdp_offload_params": mesh.cpu_offload,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": _checkpoints_blocks(run, config),
    }
    config.values |= {"distributed_type": "FSDP", "fsdp_config": section}
    sizes = {axis: size for axis, size in mesh.sizes.items() if size > 1}
    if set(sizes) <= {"shards"}:
        return
    prefix = "parallelism_config_"
    axes = {
        f"{prefix}dp_replicate_size": mesh.sizes["replicate"],
        f"{prefix}dp_shard_size": mesh.sizes["shards"],
        f"{prefix}tp_size": mesh.sizes["tensor"],
    }
    if mesh.attention is ContextAttention.ulysses:
        axes[f"{prefix}sp_size"] = mesh.sizes["context"]
    else:
        axes[f"{prefix}cp_size"] = mesh.sizes["context"]
    config.values["parallelism_config"] = axes


def _checkpoints_blocks(run: RunConfig, config: ExternalConfig) -> bool:
    """Whether every block is recomputed; notes what Accelerate cannot express."""
    counts = run.memory.count_by_recompute(run.model.layers)
    if set(counts) == {Recompute.full}:
        if isinstance(run.memory, FixedCheckpointing) and run.memory.offload:
            config.notes.append("memory.offload=true: has no counterpart for FSDP2")
        return True
    if set(counts) != {Recompute.nothing}:
        name = run.option("memory")
        config.notes.append(f"memory={name}: Accelerate recomputes all blocks or none")
    return False


def _add_compilation(run: RunConfig, config: ExternalConfig) -> None:
    scope = run.applied_compile.scope
    if scope is CompileScope.none:
        config.values["dynamo_config"] = {"dynamo_backend": "NO"}
        return
    config.values["dynamo_config"] = {
        "dynamo_backend": run.compile.backend.name.upper(),
        "dynamo_use_dynamic": run.compile.dynamic,
        "dynamo_use_regional_compilation": scope is CompileScope.block,
    }
