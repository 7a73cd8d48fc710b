"""Properties of the frameworks of published measurements, each with its source.

They say how a framework stores and computes what a row of the measurements describes. No value is
fitted to a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from scalewise.bench.published_rows import Row
from scalewise.planner.fit_check import RESERVED_FACTORS
from scalewise.precision import FloatFormat, Precision

BF16 = Precision(FloatFormat.bf16, FloatFormat.bf16)
MIXED = Precision(FloatFormat.fp32, FloatFormat.bf16)
RESERVED = 1.15
"""Reserved over allocated memory without expandable segments, in the middle: torchtitan's runs of
2024 reserve 1.14 to 1.20 of what a trace of Llama 3 8B allocates. A run does not need the
difference: the allocator frees its cached blocks before it fails (torch's notes/cuda.html)."""
TRITON_SLOWDOWN = 1.9
"""Speed of FlashAttention-2 relative to FlashAttention in Triton: the middle of 1.3 to 2.5 (Dao,
2023, FlashAttention-2, section 4.1)."""


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
    has_megatron_layers: bool = False
    """Whether layers save their shard of gathered tokens and backward gathers them again, and the
    gradient of the embedding is computed sharded."""
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
    attention_speed: float = 1.0
    """Rate of its attention, relative to FlashAttention-2, the default of torch."""
    stores_scores: bool = False
    """Whether its attention stores the scores, as before FlashAttention (2022)."""
    uses_cudnn_attention: bool = False
    """Whether its attention is that of cuDNN, whose rate the profiles of Hopper have."""
    fuses_fp8_casts: bool = False
    """Whether kernels write FP8 operands themselves, and weights are cast once per step."""
    reserved_factor: float = RESERVED
    """Reserved over allocated memory, where it reports the former."""
    unfused_norms: bool = False
    """Whether its RMSNorm consists of fp32 operators."""
    lora_dropout: float = 0.0
    """Dropout probability of the input of its LoRA matrices."""
    overlaps_collectives: bool = True
    """Whether gathers of weights and reductions of gradients overlap with compute."""
    node_link_gb_per_s: float | None = None
    """Bandwidth from one device to another node, in GB/s; None: of the usual nodes."""


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
        "a log of torchtitan in 2025, which compiles the loss (components/loss.py) and uses "
        "expandable segments (run_train.sh); else as below",
        recomputes_every_second=True,
        reserved_factor=RESERVED_FACTORS[1],
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
        "resource-tables.md: torch.cuda.max_memory_allocated; FSDP1 over a module that is loaded; "
        "rmsnorm.py: fp32 operators; finetune/lora.py: lora_dropout=0.05",
        loads_full_model=True,
        unfused_norms=True,
        lora_dropout=0.05,
    ),
    "llm-foundry": FrameworkFacts(
        lambda row: MIXED if row["precision"].startswith("amp") else BF16,
        True,
        "benchmarking/README.md: MosaicML DEFAULT and PURE are FSDP1's; GPT-shaped models; "
        "hf_causal_lm and mpt: loss_fn=fused_crossentropy, gradients in the place of the logits; "
        "yamls/pretrain: attn_impl=triton, FlashAttention in Triton; amp_fp8: Transformer Engine",
        loss_bytes=0,
        attention_speed=1 / TRITON_SLOWDOWN,
        fuses_fp8_casts=True,
    ),
    "bigscience": FrameworkFacts(
        _stated_formats,
        True,
        "chronicles-prequel.md: nvidia-smi; Megatron-DeepSpeed: gradients in fp16, tensor "
        "parallelism without sequence parallelism (Korthikanti et al., 2022, came later); nodes of "
        "eight devices with four Omni-Path ports of 100 Gb/s; contiguous buffers hold parameters "
        "and gradients, so that little is fragmented; DeepSpeed's runtime/pipe/schedule.py: "
        "ReduceGrads and OptimizerStep follow the last backward pass",
        has_megatron_layers=True,
        stores_scores=True,
        gradient_reduce_bytes=2,
        shards_sequence=False,
        allocates_all_stage_buffers=False,
        adds_context=True,
        overlaps_collectives=False,
        node_link_gb_per_s=6.0,
        reserved_factor=RESERVED_FACTORS[1],
    ),
    "NVIDIA": FrameworkFacts(
        lambda row: BF16 if row["peft"] else MIXED,
        True,
        "performance summaries of NeMo and Megatron-Bridge: bf16 with fp32 masters and gradients, "
        "of adapters only if there are any; "
        "Transformer Engine: norm, SwiGLU, RoPE and casts fused, attention by cuDNN; "
        "Megatron Core: contiguous buffers, gathers tokens again in backward (Korthikanti et al., "
        "2022, section 4.2.2); NeMo's scripts/performance/helpers.py: cross-entropy of Transformer "
        "Engine, whose gradients take the place of the logits",
        has_megatron_layers=True,
        loss_bytes=0,
        fuses_kernels=True,
        compiles_loss=True,
        allocates_all_stage_buffers=False,
        uses_cudnn_attention=True,
        fuses_fp8_casts=True,
        reserved_factor=RESERVED_FACTORS[1],
    ),
}
"""Properties by a part of the name of a row's source."""

FP8_FRAMEWORKS = {
    "NVIDIA": replace(
        FRAMEWORKS["NVIDIA"],
        source="as above; scripts/performance/helpers.py: grad_reduce_in_fp32=False with fp8",
        gradient_reduce_bytes=2,
    )
}
"""As :data:`FRAMEWORKS`, of rows whose precision is fp8."""

OTHER = FrameworkFacts(_stated_formats, True, "the columns of the row")
"""Properties of other sources."""


def framework_of(row: Row) -> FrameworkFacts:
    """Properties of the framework of a row."""
    frameworks = FRAMEWORKS | FP8_FRAMEWORKS if row["precision"] == "fp8" else FRAMEWORKS
    return next((facts for name, facts in frameworks.items() if name in row["source"]), OTHER)
