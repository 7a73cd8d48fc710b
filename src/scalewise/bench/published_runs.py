"""Conversion of published measurements to runs, with the properties of their frameworks.

A row of the measurements describes model, parallelism and batch. ``FRAMEWORKS`` describes how its
framework stores and computes them, with the source of this information. No value is fitted to a
row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from scalewise.adapters import (
    AdapterConfig,
    IA3AdapterConfig,
    LoRAAdapterConfig,
    NoAdapterConfig,
)
from scalewise.bench.published_rows import FP8_NAMES, Row
from scalewise.checkpoint_config import CheckpointConfig
from scalewise.data.synthetic import RandomTokens
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, Hardware
from scalewise.launch_config import Launch
from scalewise.lr_schedules import ConstantConfig
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.decoder.config import ActivationKind, DecoderConfig, NormKind, PositionKind
from scalewise.models.op_graph import Recompute
from scalewise.objectives import CausalLM
from scalewise.optimizers import AdamWConfig, SGDConfig
from scalewise.parallelism.mesh import MeshConfig, PipelineSchedule, ShardedState
from scalewise.planner.rank_memory import RankMemory, build_rank_memory, mesh_rank_memory
from scalewise.precision import Float8, FloatFormat, Precision
from scalewise.precision.config import ScalingRecipe
from scalewise.run_config import RunConfig
from scalewise.torch_compile import Compile, CompileScope
from scalewise.tracking_config import WandbConfig
from scalewise.trainer_config import TrainerConfig

BF16 = Precision(FloatFormat.bf16, FloatFormat.bf16)
MIXED = Precision(FloatFormat.fp32, FloatFormat.bf16)


@dataclass(frozen=True)
class PublishedDevice:
    """Device of a published measurement."""

    memory: float
    """Memory, in GiB."""
    tflops: float
    """Peak bf16 compute rate, in TFLOP/s."""
    bandwidth: float
    """Memory bandwidth, in GB/s."""
    link: float
    """Bandwidth of the link between devices, in GB/s."""
    product_share: float = 0.8
    """Fraction of the peak compute rate that matmuls reach."""
    attention_share: float = 0.35
    """Fraction of the peak compute rate that attention reaches."""
    bandwidth_share: float = 1.0
    """Fraction of the memory bandwidth that kernels reach."""


HOPPER_SHARES = (0.67, 0.35, 0.8808)
"""Fractions of matmuls and of the bandwidth measured by ``bench gpu`` on an H100 SXM, which other
Hopper devices are taken to reach too; of attention, those of FlashAttention-2, torch's default."""
DEVICES = {
    "A100": PublishedDevice(80, 312, 2039, 300, 0.87, 0.6),
    "A100 40": PublishedDevice(40, 312, 1555, 300, 0.87, 0.6),
    "A800": PublishedDevice(80, 312, 2039, 200, 0.87, 0.6),
    "B200": PublishedDevice(180, 2250, 8000, 900),
    "GH200": PublishedDevice(96, 989.5, 4000, 450, *HOPPER_SHARES),
    "H100": PublishedDevice(80, 989.5, 3350, 450, *HOPPER_SHARES),
    "H100 96": PublishedDevice(95, 989.5, 2400, 450, *HOPPER_SHARES),
    "H200": PublishedDevice(139, 989.5, 4800, 450, *HOPPER_SHARES),
    "H800": PublishedDevice(80, 989.5, 3350, 200, *HOPPER_SHARES),
    "L4": PublishedDevice(24, 121, 300, 32),
    "L40S": PublishedDevice(48, 362, 864, 32),
    "A6000": PublishedDevice(48, 155, 768, 32),
    "A10G": PublishedDevice(24, 70, 600, 32),
    "3090": PublishedDevice(24, 71, 936, 32),
    "4090": PublishedDevice(24, 165.2, 1008, 32),
    "V100": PublishedDevice(32, 125, 900, 150),
    "V100 16": PublishedDevice(16, 125, 900, 150),
}
"""Devices by name, from vendors' datasheets; fractions of published kernels (Bekman,
Machine Learning Engineering, MAMF table; FlashAttention-2).

According to its report, torchtitan uses the H100 with 96 GB of HBM2e.
"""


@dataclass(frozen=True)
class FrameworkFacts:
    """Properties of a framework that determine memory and time of its measurements."""

    precision: Callable[[Row], Precision]
    """Function that returns the precision of a row."""
    reports_reserved: bool
    """Whether it reports the memory that the allocator reserves, not the allocated memory."""
    source: str
    """Source of these properties."""
    keeps_unsharded_gradients: bool = False
    """Whether gradients stay unsharded during gradient accumulation."""
    gradient_reduce_bytes: int | None = None
    """Bytes per element in the reduction of gradients; None: as in scalewise."""
    shards_sequence: bool = True
    """Whether tensor parallelism includes sequence and loss parallelism."""
    loss_bytes: int = 4
    """Bytes per element of the logits in the loss."""
    recomputes_every_second: bool = False
    """Whether selective activation checkpointing saves every second matmul only."""
    loads_full_model: bool = False
    """Whether every rank builds the full model before it is sharded."""
    devices_per_node: int = 8
    """Number of devices per node."""
    fuses_kernels: bool = False
    """Whether its layers are fused kernels, like compiled ones, without compilation."""
    compiles_loss: bool = False
    """Whether compilation includes the loss, or its kernel is fused."""
    allocates_all_stage_buffers: bool = True
    """Whether each micro-batch of a pipeline has communication buffers of its own, as in torch."""
    adds_context: bool = False
    """Whether it reports the memory of the driver, which includes the CUDA context."""


def _stated_formats(row: Row) -> Precision:
    """Precision that a row states: mixed for "mixed", "amp" and "fp32", else one format."""
    name = row["precision"].lower()
    compute = FloatFormat.fp16 if "fp16" in name else FloatFormat.bf16
    if name in ("fp32", "float32", "32-true"):
        return Precision()
    if "mixed" in name or "amp" in name or "fp32" in name:
        return Precision(FloatFormat.fp32, compute)
    return Precision(compute, compute)


FRAMEWORKS = {
    "ao docs/source/eager_tutorials": FrameworkFacts(
        _stated_formats,
        True,
        "a log of torchtitan in 2025, which compiles the loss (components/loss.py); else as below",
        recomputes_every_second=True,
        compiles_loss=True,
    ),
    "torchtitan": FrameworkFacts(
        _stated_formats,
        True,
        "train.py logs max_reserved; FSDP2 with fp32 masters; selective-op: every second matmul",
        recomputes_every_second=True,
    ),
    "KempnerForge": FrameworkFacts(
        lambda row: BF16,
        False,
        "parallel.py: model.to(bf16) whatever the name, gradients unsharded while accumulating; "
        "loss.py: cross-entropy of bf16 logits",
        keeps_unsharded_gradients=True,
        loss_bytes=2,
        gradient_reduce_bytes=4,
        shards_sequence=False,
        devices_per_node=4,
    ),
    "litgpt": FrameworkFacts(
        _stated_formats,
        False,
        "resource-tables.md: torch.cuda.max_memory_allocated; FSDP1 over a module that is loaded",
        loads_full_model=True,
    ),
    "llm-foundry": FrameworkFacts(
        lambda row: MIXED if row["precision"].startswith("amp") else BF16,
        True,
        "benchmarking/README.md: MosaicML DEFAULT and PURE are FSDP1's; GPT-shaped models; "
        "hf_causal_lm and mpt: loss_fn=fused_crossentropy, gradients in the place of the logits",
        loss_bytes=0,
    ),
    "bigscience": FrameworkFacts(
        _stated_formats,
        True,
        "chronicles-prequel.md: nvidia-smi; Megatron-DeepSpeed: gradients in fp16, tensor "
        "parallelism without sequence parallelism (Korthikanti et al., 2022, came later)",
        gradient_reduce_bytes=2,
        shards_sequence=False,
        allocates_all_stage_buffers=False,
        adds_context=True,
    ),
    "NVIDIA": FrameworkFacts(
        lambda row: MIXED,
        True,
        "performance summaries of NeMo and Megatron-Bridge: bf16 with fp32 masters and gradients; "
        "Transformer Engine: norm, SwiGLU and RoPE fused; Megatron Core: fused cross-entropy",
        fuses_kernels=True,
        compiles_loss=True,
        allocates_all_stage_buffers=False,
    ),
}
"""Properties by a part of the name of a row's source."""

OTHER = FrameworkFacts(_stated_formats, True, "the columns of the row")
"""Properties of other sources."""


def framework_of(row: Row) -> FrameworkFacts:
    """Properties of the framework of a row."""
    return next((facts for name, facts in FRAMEWORKS.items() if name in row["source"]), OTHER)


_FOUR_BITS, _DOUBLE = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)
QUANTIZED = {
    "bnb.nf4": _FOUR_BITS,
    "bnb.nf4-dq": _DOUBLE,
    "bnb.fp4": _FOUR_BITS,
    "bnb.fp4-dq": _DOUBLE,
    "bnb.int8": 1.0,
}
"""Bytes per quantized weight: 4 bits and a scale per 64 weights, quantized in turn with "dq"
(Dettmers et al., 2023)."""


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


def build_run(row: Row) -> RunConfig:
    """Convert a row to the run of scalewise that is most similar to it.

    In a pipeline, the micro-batches of gradient accumulation are those of the pipeline.
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
        adapter=_adapter_config(row),
        memory=FixedCheckpointing(Recompute.full if is_full else recompute),
        compile=Compile(CompileScope.block if is_compiled else CompileScope.none),
        trainer=TrainerConfig(micro_batch=micro_batch, global_batch=global_batch, max_steps=1),
        checkpoint=CheckpointConfig(),
        tracking=WandbConfig(),
        launch=Launch(),
        hardware=device_profile(row["gpu"], facts.devices_per_node),
    )


def device_profile(name: str, devices_per_node: int) -> Hardware:
    """Hardware profile of a device.

    Raises:
        ConfigError: the device is unknown.
    """
    device = _find_device(name)
    if device is None:
        raise ConfigError.for_key(
            "gpu", name, "is an unknown device", f"choose one of {', '.join(DEVICES)}"
        )
    return Hardware(
        device=DeviceKind.cuda,
        memory_gib=device.memory,
        fp32_tflops=device.tflops / 16,  # NVIDIA GPUs since Ampere, without tensor cores
        tf32_tflops=device.tflops / 2,
        bf16_tflops=device.tflops,
        fp16_tflops=device.tflops,
        memory_gb_per_s=device.bandwidth,
        link_gb_per_s=device.link,
        link_latency_us=4.0,
        devices_per_node=devices_per_node,
        node_link_gb_per_s=device.link / 9,
        node_link_latency_us=8.0,
        context_gib=1.0,
        product_share=device.product_share,
        attention_share=device.attention_share,
        bandwidth_share=device.bandwidth_share,
        launch_us=6.0,
    )


def _find_device(name: str) -> PublishedDevice | None:
    """Find the device of a name such as ``NVIDIA H100 80GB HBM3`` or ``h100-sxm``."""
    parts = re.findall(r"[a-z]*\d+[a-z]*", name.lower())
    sizes = [part.removesuffix("gb").removesuffix("g") for part in parts[1:]]
    for model in sorted(DEVICES, key=len, reverse=True):
        kind, _, size = model.lower().partition(" ")
        matches = any(kind in (part, part.removeprefix("rtx")) for part in parts)
        if matches and (not size or size in sizes):
            return DEVICES[model]
    return None


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
    best = min(candidates, key=lambda it: abs(it.num_parameters / parameters - 1) > SIZE_TOLERANCE)
    if abs(best.num_parameters / parameters - 1) > SIZE_TOLERANCE:
        sizes = f"{config.num_parameters / 1e9:.4g} (Llama) or {gpt.num_parameters / 1e9:.4g} (GPT)"
        reason = f"the model of the row has {sizes} billion parameters"
        raise ConfigError.for_key("params_B", row["params_B"], reason, "check the columns")
    return best


@dataclass(frozen=True)
class ForeignMesh(MeshConfig):
    """Mesh of another framework, with its formats of gradient reduction and loss."""

    reduced: int | None = None
    """Bytes per element in the reduction of gradients; None: as in scalewise."""
    loss: int = 4
    """Bytes per element of the logits in the loss."""
    every_second: bool = False
    """Whether selective activation checkpointing saves every second matmul only."""
    compiles_loss: bool = False
    """Whether compilation includes the loss."""
    allocates_all_stage_buffers: bool = True
    """Whether each micro-batch of a pipeline has communication buffers of its own."""


@build_rank_memory.register
def _foreign_mesh_memory(config: ForeignMesh, run: RunConfig, rank: int = 0) -> RankMemory:
    """Memory of a rank, with the formats of the other framework."""
    memory = mesh_rank_memory(config, run, rank)
    forward_spec = replace(
        memory.forward_spec,
        loss_element_bytes=config.loss,
        saves_alternate_matmuls=config.every_second,
        is_loss_compiled=config.compiles_loss and memory.forward_spec.is_loss_compiled,
    )
    buffers = memory.num_stage_buffers
    if not config.allocates_all_stage_buffers:
        buffers = min(buffers, memory.in_flight)
    memory = replace(memory, forward_spec=forward_spec, num_stage_buffers=buffers)
    if config.reduced is None or memory.fsdp is None:
        return memory
    return replace(memory, fsdp=replace(memory.fsdp, reduced_element_bytes=config.reduced))


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
        reduced=facts.gradient_reduce_bytes,
        loss=facts.loss_bytes,
        every_second=facts.recomputes_every_second,
        compiles_loss=facts.compiles_loss,
        allocates_all_stage_buffers=facts.allocates_all_stage_buffers,
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


def _adapter_config(row: Row) -> AdapterConfig:
    """Adapter of a row."""
    return {"": NoAdapterConfig(), "ia3": IA3AdapterConfig()}.get(row["peft"], LoRAAdapterConfig())


def _parse_int(row: Row, key: str, default: int) -> int:
    return int(float(row[key])) if row.get(key) else default
