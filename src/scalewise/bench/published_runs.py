"""Conversion of published measurements to runs: model, parallelism and batch of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from scalewise.adapters import (
    AdapterConfig,
    IA3AdapterConfig,
    LoRAAdapterConfig,
    NoAdapterConfig,
)
from scalewise.bench.published_devices import device_profile
from scalewise.bench.published_frameworks import OTHER, FrameworkFacts, framework_of
from scalewise.bench.published_rows import FP8_NAMES, QUANTIZED, Row
from scalewise.checkpoint_config import CheckpointConfig
from scalewise.data.synthetic import RandomTokens
from scalewise.errors import ConfigError
from scalewise.hardware import Hardware
from scalewise.launch_config import Launch
from scalewise.lr_schedules import ConstantConfig
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import ActivationKind, NormKind, PositionKind
from scalewise.models.op_graph import Recompute
from scalewise.objectives import CausalLM
from scalewise.optimizers import AdamWConfig, SGDConfig
from scalewise.parallelism.mesh import MeshConfig, PipelineSchedule, ShardedState
from scalewise.planner.rank_memory import RankMemory, build_rank_memory, mesh_rank_memory
from scalewise.precision import Float8, Precision
from scalewise.precision.config import ScalingRecipe
from scalewise.run_config import RunConfig
from scalewise.torch_compile import Compile, CompileScope
from scalewise.tracking_config import WandbConfig
from scalewise.trainer_config import TrainerConfig


def measured_peak(row: Row, run: RunConfig, predicted: int) -> int:
    """Convert a predicted peak to the peak that the framework of a row should measure, in bytes.

    Quantization reduces the size of the linear layers in the blocks. With ``loads_full_model``,
    the peak may occur while a rank stores both the full model and its shard.
    """
    element_bytes = run.precision.parameters.bytes
    shards = run.parallelism.world_size
    if quantized_bytes := QUANTIZED.get(row["quant"]):
        linear_numel = sum(
            w.numel for w in run.model.weight_census() if w.layer is not None and len(w.shape) > 1
        )
        predicted -= int(linear_numel * (element_bytes - quantized_bytes)) // shards
        if run.memory == FixedCheckpointing():
            predicted += _quantized_input_bytes(run)
    if framework_of(row).loads_full_model and shards > 1:
        model_bytes = run.model.num_parameters * element_bytes
        predicted = max(predicted, model_bytes + model_bytes // shards)
    return predicted


def _quantized_input_bytes(run: RunConfig) -> int:
    """Bytes of the inputs that 4-bit matmuls save, although frozen layers do not need them.

    In bitsandbytes 0.41 (autograd/_functions.py), ``MatMul4Bit`` saves its input. This adds the
    inputs of the output projection of attention and of the feedforward layers in each block; the
    adapter already saves the input of the first projection.
    """
    model = run.model
    assert isinstance(model, DecoderConfig)
    tokens = run.micro_batch * run.data.sequence
    inputs = 2 * model.width + model.feedforward
    return tokens * inputs * run.precision.compute.bytes * model.layers


def build_run(row: Row, profiles: Mapping[str, Hardware]) -> RunConfig:
    """Convert a row to the run of scalewise that is most similar to it.

    In a pipeline, the micro-batches of gradient accumulation are those of the pipeline.

    Args:
        row: Row of published measurements.
        profiles: Hardware profiles by name.
    """
    facts = framework_of(row)
    accumulation = _parse_int(row, "grad_accum", 1)
    micro_batch = _parse_int(row, "micro_bs", 1)
    parallelism = _parallelism_config(row, facts, accumulation)
    if parallelism.sizes["pipeline"] > 1:
        num_pipeline_micro_batches = (
            accumulation if accumulation > 1 else min(micro_batch, parallelism.num_stages)
        )
        parallelism = replace(parallelism, pipeline_micro_batches=num_pipeline_micro_batches)
        micro_batch, accumulation = micro_batch * accumulation, 1
    global_batch = micro_batch * parallelism.data_parallel_size * accumulation
    is_full = row["act_ckpt"].startswith("full")
    is_compiled = facts.fuses_kernels or row.get("compile") == "1"
    recompute = Recompute.selective if "selective" in row["act_ckpt"] else Recompute.nothing
    return RunConfig(
        model=_model_config(row),
        data=RandomTokens(sequence=_parse_int(row, "seq", 2048)),
        objective=CausalLM(),
        parallelism=parallelism,
        precision=_precision(row, facts),
        optimizer=SGDConfig() if row["optimizer"].lower().startswith("sgd") else AdamWConfig(),
        schedule=ConstantConfig(),
        adapter=_adapter_config(row, facts),
        memory=FixedCheckpointing(Recompute.full if is_full else recompute),
        compile=Compile(CompileScope.block if is_compiled else CompileScope.none),
        trainer=TrainerConfig(micro_batch=micro_batch, global_batch=global_batch, max_steps=1),
        checkpoint=CheckpointConfig(),
        tracking=WandbConfig(),
        launch=Launch(),
        hardware=device_profile(row["gpu"], facts, profiles),
    )


SIZE_TOLERANCE = 0.02
"""Largest relative difference of the size of a model from that of its row."""


def _model_config(row: Row) -> DecoderConfig:
    """Architecture whose size is that of a row: of Llama or GPT-2, with a tied head or without.

    Raises:
        ConfigError: none of them has the size.
    """
    config = DecoderConfig(
        vocabulary=_parse_int(row, "vocab", 32000),
        context=_parse_int(row, "seq", 2048),
        width=_parse_int(row, "hidden", 4096),
        layers=_parse_int(row, "layers", 32),
        heads=_parse_int(row, "heads", 32),
        feedforward=_parse_int(row, "ffn", 11008),
        kv_heads=_parse_int(row, "kv_heads", 0) or None,
    )
    gpt = replace(config, norm=NormKind.layernorm, activation=ActivationKind.gelu)
    learned = replace(gpt, position=PositionKind.learned)
    candidates = [
        config,
        replace(config, tied=True),
        replace(learned, tied=True),
        replace(learned, bias=True, tied=True),
        replace(gpt, bias=True),
        gpt,
        replace(gpt, tied=True),
    ]
    if any(config.validate()) or not row.get("params_B"):
        return config
    parameters = 1e9 * float(row["params_B"])
    for candidate in candidates:
        if abs(candidate.num_parameters / parameters - 1) <= SIZE_TOLERANCE:
            return candidate
    sizes = f"{config.num_parameters / 1e9:.4g} (Llama) or {gpt.num_parameters / 1e9:.4g} (GPT)"
    reason = f"the model of the row has {sizes} billion parameters"
    raise ConfigError.for_key("params_B", row["params_B"], reason, "check the columns")


@dataclass(frozen=True)
class ForeignMesh(MeshConfig):
    """Mesh of another framework."""

    facts: FrameworkFacts = OTHER
    """Properties of the framework."""


@build_rank_memory.register
def _foreign_mesh_memory(config: ForeignMesh, run: RunConfig, rank: int = 0) -> RankMemory:
    """Memory of a rank, with the formats of the other framework."""
    memory, facts = mesh_rank_memory(config, run, rank), config.facts
    forward_spec = replace(
        memory.forward_spec,
        loss_element_bytes=facts.loss_bytes,
        saves_alternate_matmuls=facts.recomputes_every_second,
        is_loss_compiled=facts.compiles_loss and memory.forward_spec.is_loss_compiled,
        fuses_fp8_casts=facts.fuses_fp8_casts,
        has_megatron_layers=facts.has_megatron_layers,
        stores_scores=facts.stores_scores,
        unfused_norms=facts.unfused_norms,
    )
    memory = replace(memory, forward_spec=forward_spec)
    if not facts.allocates_all_stage_buffers:
        memory = replace(
            memory,
            num_stage_buffers=min(
                memory.num_stage_buffers, ceil(memory.in_flight / len(memory.stages))
            ),
            num_gradient_buffers=1,
        )
    if facts.gradient_reduce_bytes is None or memory.fsdp is None:
        return memory
    fsdp = replace(memory.fsdp, reduced_element_bytes=facts.gradient_reduce_bytes)
    return replace(memory, fsdp=fsdp)


def _parallelism_config(row: Row, facts: FrameworkFacts, accumulation: int) -> MeshConfig:
    pipeline = _parse_int(row, "pp", 1)
    replicas, shards = _parse_int(row, "dp", 1), _parse_int(row, "fsdp", 1)
    shard = {"1": ShardedState.optimizer, "2": ShardedState.gradients}.get(row["zero_stage"])
    if shard is not None:  # the data-parallel ranks partition the optimizer state
        replicas, shards = 1, replicas * shards
    stages_per_rank = _stages_per_rank(row) if pipeline > 1 else 1
    return ForeignMesh(
        pipeline=pipeline,
        pipeline_schedule=PipelineSchedule.interleaved_1f1b
        if stages_per_rank > 1
        else PipelineSchedule.one_f_one_b,
        stages_per_rank=stages_per_rank,
        replicate=replicas,
        shards=shards,
        context=_parse_int(row, "cp", 1),
        tensor=_parse_int(row, "tp", 1),
        facts=facts,
        sequence_parallel=facts.shards_sequence,
        loss_parallel=facts.shards_sequence,
        shard=shard or ShardedState.parameters,
        reshard_after_forward=pipeline == 1,
        reduce_each_micro_batch=not (facts.keeps_unsharded_gradients and accumulation > 1),
    )


def _stages_per_rank(row: Row) -> int:
    """Number of stages per pipeline rank: "VP=N" or "interleaved" in the notes, else one."""
    virtual = re.search(r"\bVP=(\d+)", row["notes"])
    count = int(virtual[1]) if virtual else 2 * ("interleaved" in row["notes"].lower())
    return max(1, count)


def _precision(row: Row, facts: FrameworkFacts) -> Precision:
    """Formats of a row; those with fp8 also multiply the linear layers of blocks in fp8."""
    formats = facts.precision(row)
    if "fp8" not in row["precision"].lower() and not row["quant"].startswith(FP8_NAMES):
        return formats
    recipe = ScalingRecipe.rowwise if "rowwise" in row["quant"] else ScalingRecipe.tensorwise
    return Float8(formats.parameters, formats.compute, recipe=recipe)


def _adapter_config(row: Row, facts: FrameworkFacts) -> AdapterConfig:
    """Adapter of a row."""
    lora = LoRAAdapterConfig(dropout=facts.lora_dropout)
    return {"": NoAdapterConfig(), "ia3": IA3AdapterConfig()}.get(row["peft"], lora)


def _parse_int(row: Row, key: str, default: int) -> int:
    return int(float(row[key])) if row.get(key) else default
