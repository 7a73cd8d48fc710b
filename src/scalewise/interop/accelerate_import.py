"""Accelerate's YAML config (``accelerate config``) as overrides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from scalewise.errors import ConfigIssue
from scalewise.interop import deepspeed_import
from scalewise.interop.translation import KeyReader, Translation

PRECISIONS = {"no": "fp32", "bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp8": "fp8"}
"""Option of ``precision`` by Accelerate's ``mixed_precision``."""
DATA_PARALLEL = ("MULTI_GPU", "MULTI_CPU")
"""Distributed types that replicate the model."""
FSDP1_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Sharding strategies of FSDP1, by their number from 1."""
UNUSED_MESH_KEYS = (
    "cp_backend",
    "cp_comm_strategy",
    "sp_backend",
    "sp_seq_length",
    "sp_seq_length_is_variable",
    "sp_attn_implementation",
)
"""Keys of ``parallelism_config`` about how Accelerate exchanges keys and values."""
SCRIPT = "belongs to the training script"
REASONS = {
    "compute_environment": "ranks start on this machine, under torchrun or under Slurm",
    "main_training_function": SCRIPT,
    "debug": "launch.timeout ends ranks that wait for a collective",
    "enable_cpu_affinity": "threads are divided by launch",
    "same_network": "is required",
    "rdzv_backend": "is c10d",
    "machine_rank": "c10d assigns ranks",
    "fsdp_auto_wrap_policy": "blocks are found in the model",
    "fsdp_transformer_layer_cls_to_wrap": "blocks are found in the model",
    "fsdp_min_num_params": "blocks are found in the model",
    "fsdp_backward_prefetch": "is always before the previous gradient; set parallelism.prefetch",
    "fsdp_forward_prefetch": "set parallelism.prefetch",
    "fsdp_state_dict_type": "checkpoints are sharded, and any strategy reads them",
    "fsdp_use_orig_params": "FSDP2 keeps the original parameters",
    "fsdp_sync_module_states": "initial weights depend on the seed and their names only",
    "fsdp_cpu_ram_efficient_loading": "each rank reads the shards that it stores",
    "zero3_init_flag": "weights are partitioned when they are built",
    "zero3_save_16bit_model": "scalewise export writes whole weights",
    "deepspeed_multinode_launcher": "torchrun starts the ranks",
    "dynamo_mode": "is the default mode",
    "backend": "fp8 matmuls are torchao's",
}
"""Reason why a key has no counterpart."""
IGNORED = ("fp8_format", "downcast_bf16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu")
"""Keys that ``accelerate config`` writes for every machine and that change nothing here."""


def translate(config: Mapping[str, object], folder: Path) -> Translation:
    """Translate the config; ``folder``: where a DeepSpeed config that it names is looked up.

    Raises ``ConfigError`` for a value of a wrong type.
    """
    translation, reader = Translation(), KeyReader(config)
    nodes = reader.take_count("num_machines")
    kind = str(reader.take("distributed_type", "NO")).upper()
    ranks = reader.take_count("num_processes")
    sections = {
        name: reader.take_section(name)
        for name in ("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config")
    }
    mesh = sections["parallelism_config"]
    sizes = _mesh_sizes(mesh, translation)
    if sizes:
        _translate_mesh(sizes, ranks, translation)
        _translate_fsdp_options(sections["fsdp_config"], translation)
    elif kind == "NO" or (kind in DATA_PARALLEL and ranks == 1):
        translation.overrides["parallelism"] = "single"
    elif kind in DATA_PARALLEL:
        translation.overrides |= {"parallelism": "ddp", "parallelism.replicas": ranks}
    elif kind == "FSDP":
        _translate_fsdp(sections["fsdp_config"], ranks, nodes, translation)
    elif kind == "DEEPSPEED":
        _translate_deepspeed(sections["deepspeed_config"], ranks, folder, translation)
    elif kind == "MEGATRON_LM":
        _translate_megatron(sections["megatron_lm_config"], ranks, translation)
    else:
        reason = "has no counterpart; scalewise trains on CUDA devices and CPUs"
        translation.issues.append(ConfigIssue("distributed_type", kind, reason))
    _translate_precision(reader, translation)
    _translate_compilation(reader.take_section("dynamo_config"), translation)
    if reader.take_flag("use_cpu") or kind == "MULTI_CPU":
        translation.overrides["hardware"] = "cpu"
    _translate_launch(reader, ranks, nodes, translation)
    for section in sections.values():
        section.note_remaining(translation, REASONS)
    if reader.take("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        translation.note("compute_environment", "AMAZON_SAGEMAKER", REASONS["compute_environment"])
    reader.note_remaining(translation, REASONS, IGNORED)
    return translation


def _mesh_sizes(mesh: KeyReader, translation: Translation) -> dict[str, int]:
    """Sizes above 1 of the mesh axes; empty without ``parallelism_config``."""
    prefix = "parallelism_config_"
    axes = {
        "replicate": "dp_replicate_size",
        "shards": "dp_shard_size",
        "context": "cp_size",
        "tensor": "tp_size",
    }
    sizes = {axis: mesh.take_count(prefix + key) for axis, key in axes.items()}
    ulysses = mesh.take_count(prefix + "sp_size")
    if sizes["context"] > 1 and ulysses > 1:
        reason = "context parallelism has one axis; set one of cp_size and sp_size to 1"
        translation.issues.append(ConfigIssue(f"{prefix}sp_size", ulysses, reason))
    elif ulysses > 1:
        sizes["context"] = ulysses
    elif sizes["context"] > 1:
        translation.overrides["parallelism.attention"] = "gather"
    for key in UNUSED_MESH_KEYS:
        mesh.take(prefix + key)
    return {axis: size for axis, size in sizes.items() if size > 1}


def _translate_mesh(sizes: Mapping[str, int], ranks: int, translation: Translation) -> None:
    product = 1
    for size in sizes.values():
        product *= size
    if product != ranks:
        reason = f"the sizes in parallelism_config have the product {product}"
        translation.issues.append(ConfigIssue("num_processes", ranks, reason))
    attention = translation.overrides.pop("parallelism.attention", None)
    translation.overrides["parallelism"] = "mesh"
    translation.overrides |= {f"parallelism.{axis}": size for axis, size in sizes.items()}
    if attention is not None:
        translation.overrides["parallelism.attention"] = attention


def _translate_fsdp(fsdp: KeyReader, ranks: int, nodes: int, translation: Translation) -> None:
    reshard = str(fsdp.take("fsdp_reshard_after_forward", True)).upper()
    default = reshard if reshard in FSDP1_STRATEGIES else "FULL_SHARD"
    strategy = str(fsdp.take("fsdp_sharding_strategy", default)).upper()
    if strategy in ("1", "2", "3", "4", "5"):
        strategy = FSDP1_STRATEGIES[int(strategy) - 1]
    overrides = translation.overrides
    if strategy == "NO_SHARD":
        overrides |= {"parallelism": "ddp", "parallelism.replicas": ranks}
        return
    if strategy.startswith("HYBRID_SHARD") and nodes > 1:
        overrides |= {"parallelism": "hsdp", "parallelism.replicate": nodes}
        overrides["parallelism.shards"] = ranks // nodes
    else:
        overrides |= {"parallelism": "fsdp", "parallelism.shards": ranks}
    if strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") or reshard == "FALSE":
        overrides["parallelism.reshard_after_forward"] = False
    _translate_fsdp_options(fsdp, translation)


def _translate_fsdp_options(fsdp: KeyReader, translation: Translation) -> None:
    fsdp.take("fsdp_version")
    overrides = translation.overrides
    if not fsdp.take_flag("fsdp_reshard_after_forward", default=True):
        overrides["parallelism.reshard_after_forward"] = False
    if fsdp.take_flag("fsdp_offload_params"):
        overrides["parallelism.cpu_offload"] = True
    if fsdp.take_flag("fsdp_activation_checkpointing"):
        overrides["memory"] = "checkpoint_full"
        if fsdp.take_flag("fsdp_activation_checkpointing_offload"):
            overrides["memory.offload"] = True


def _translate_deepspeed(
    section: KeyReader, ranks: int, folder: Path, translation: Translation
) -> None:
    path = section.take("deepspeed_config_file")
    if path is not None:
        values = deepspeed_import.read_file(folder / str(path))
    else:
        zero: dict[str, object] = {"stage": section.take_number("zero_stage", 2)}
        for key in ("offload_optimizer", "offload_param"):
            device = section.take(f"{key}_device", "none")
            zero[key] = {"device": device, "nvme_path": section.take(f"{key}_nvme_path")}
        values = {
            "zero_optimization": zero,
            "gradient_clipping": section.take_number("gradient_clipping"),
        }
    accumulation = section.take_count("gradient_accumulation_steps")
    nested = deepspeed_import.translate(values)
    if path is None:
        del nested.overrides["precision"]
    translation.overrides |= {**nested.overrides, "parallelism.replicas": ranks}
    translation.notes += nested.notes
    if accumulation > 1 and "trainer.global_batch" not in translation.overrides:
        reason = f"set trainer.global_batch to trainer.micro_batch x {ranks * accumulation}"
        translation.note("deepspeed_config.gradient_accumulation_steps", accumulation, reason)


def _translate_megatron(section: KeyReader, ranks: int, translation: Translation) -> None:
    tensor = section.take_count("megatron_lm_tp_degree")
    pipeline = section.take_count("megatron_lm_pp_degree")
    overrides = translation.overrides
    if ranks % (tensor * pipeline):
        reason = f"is no multiple of {tensor} tensor x {pipeline} pipeline ranks"
        translation.issues.append(ConfigIssue("num_processes", ranks, reason))
    overrides["parallelism"] = "mesh"
    data_ranks = max(1, ranks // (tensor * pipeline))
    if section.take_flag("megatron_lm_use_distributed_optimizer"):
        overrides |= {"parallelism.shards": data_ranks, "parallelism.shard": "optimizer"}
    else:
        overrides["parallelism.replicate"] = data_ranks
    overrides |= {"parallelism.tensor": tensor, "parallelism.pipeline": pipeline}
    sequence_parallel = section.take_flag("megatron_lm_sequence_parallelism")
    if tensor > 1:
        overrides["parallelism.sequence_parallel"] = sequence_parallel
    micro_batches = section.take_count("megatron_lm_num_micro_batches")
    if pipeline > 1:
        overrides["parallelism.pipeline_micro_batches"] = micro_batches
    if section.take_flag("megatron_lm_recompute_activations"):
        overrides["memory"] = "checkpoint_selective"
    clip_norm = section.take_number("megatron_lm_gradient_clipping")
    if clip_norm is not None:
        overrides["trainer.clip_norm"] = clip_norm or None


def _translate_precision(reader: KeyReader, translation: Translation) -> None:
    name = str(reader.take("mixed_precision", "no")).lower()
    fp8 = reader.take_section("fp8_config")
    if name not in PRECISIONS:
        reason = f"must be one of {', '.join(PRECISIONS)}"
        translation.issues.append(ConfigIssue("mixed_precision", name, reason))
        return
    if name != "no" or "precision" not in translation.overrides:
        translation.overrides["precision"] = PRECISIONS[name]
    if name == "fp8":
        backend = str(fp8.take("backend", "AO")).upper()
        if backend != "AO":
            translation.note("fp8_config.backend", backend, REASONS["backend"])
        fp8.note_remaining(translation, REASONS, IGNORED)


def _translate_compilation(dynamo: KeyReader, translation: Translation) -> None:
    backend = str(dynamo.take("dynamo_backend", "")).upper()
    regional = dynamo.take_flag("dynamo_use_regional_compilation")
    is_dynamic = dynamo.take_flag("dynamo_use_dynamic")
    if backend == "NO":
        translation.overrides["compile"] = "none"
    elif backend:
        translation.overrides["compile"] = "block" if regional else "whole"
        if is_dynamic:
            translation.overrides["compile.dynamic"] = True
        if backend == "AOT_EAGER":
            translation.overrides["compile.backend"] = "aot_eager"
        elif backend != "INDUCTOR":
            reason = "is replaced by inductor"
            translation.note("dynamo_config.dynamo_backend", backend, reason)
    dynamo.note_remaining(translation, REASONS)


def _translate_launch(reader: KeyReader, ranks: int, nodes: int, translation: Translation) -> None:
    address, port = reader.take("main_process_ip"), reader.take("main_process_port")
    gpus = reader.take("gpu_ids", "all")
    if gpus != "all":
        reason = f"set the environment variable CUDA_VISIBLE_DEVICES={gpus}"
        translation.note("gpu_ids", gpus, reason)
    if nodes == 1:
        return
    if ranks % nodes:
        reason = f"is no multiple of {nodes} machines"
        translation.issues.append(ConfigIssue("num_processes", ranks, reason))
    endpoint = f"{address or 'HOST'}:{port or 29400}"
    translation.torchrun = (
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks // nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
    )
