"""Published measurements as runs of this suite, with the facts of the framework that made them.

A row says which model, layout and batch; how its framework holds and computes them is stated here
once a source, with where it was read. No number is fitted to a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from scalewise.activation_checkpointing import FixedCheckpointing, Recompute
from scalewise.adapters import AdapterConfig, LoRAAdapterConfig, NoAdapterConfig
from scalewise.bench.published_rows import Row
from scalewise.checkpoints.config import CheckpointConfig
from scalewise.data.random_tokens import RandomTokens
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, Hardware
from scalewise.launch.config import Launch
from scalewise.lr_schedules import ConstantConfig
from scalewise.models.decoder.config import ActivationKind, DecoderConfig, NormKind, PositionKind
from scalewise.objectives import CausalLM
from scalewise.optimizers import AdamWConfig, SGDConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.parallelism.rank_memory import RankMemory
from scalewise.precision import FloatFormat, Precision
from scalewise.run_config import RunConfig
from scalewise.torch_compile import Compile
from scalewise.tracking.config import WandbConfig
from scalewise.trainer_config import TrainerConfig

BF16 = Precision(FloatFormat.bf16, FloatFormat.bf16)
MIXED = Precision(FloatFormat.fp32, FloatFormat.bf16)


@dataclass(frozen=True)
class PublishedDevice:
    """A device by the name that rows use: memory GiB, TFLOP/s, GB/s of memory and link."""

    memory: float
    tflops: float
    bandwidth: float
    link: float
    product_share: float = 0.8
    attention_share: float = 0.35


DEVICES = {
    "A100": PublishedDevice(80, 312, 2039, 300, 0.87, 0.6),
    "A100 40": PublishedDevice(40, 312, 1555, 300, 0.87, 0.6),
    "A800": PublishedDevice(80, 312, 2039, 200, 0.87, 0.6),
    "B200": PublishedDevice(180, 2250, 8000, 900),
    "GH200": PublishedDevice(96, 989.5, 4000, 450),
    "H100": PublishedDevice(80, 989.5, 3350, 450),
    "H100 96": PublishedDevice(95, 989.5, 2400, 450),
    "H200": PublishedDevice(139, 989.5, 4800, 450),
    "H800": PublishedDevice(80, 989.5, 3350, 200),
    "L4": PublishedDevice(24, 121, 300, 32),
    "L40S": PublishedDevice(48, 362, 864, 32),
    "A6000": PublishedDevice(48, 155, 768, 32),
    "A10G": PublishedDevice(24, 70, 600, 32),
    "3090": PublishedDevice(24, 71, 936, 32),
    "4090": PublishedDevice(24, 165.2, 1008, 32),
    "V100": PublishedDevice(32, 125, 900, 150),
    "V100 16": PublishedDevice(16, 125, 900, 150),
}
"""Vendors' datasheets; torchtitan's H100 are of 96 GB with HBM2e (its report says so). Shares are
those of ``conf/hardware``."""


@dataclass(frozen=True)
class FrameworkFacts:
    """How a framework holds and computes what its rows name.

    ``precision``: of a row. ``reports_reserved``: whether it reports what the allocator reserves.
    ``source``: where this was read. ``keeps_unsharded_gradients``: whether gradients stay whole
    while micro batches are summed. ``gradient_reduce_bytes``: bytes of a gradient in its reduction.
    ``shards_sequence``:
    whether tensor ranks share tokens and logits out as well. ``loss_bytes``: bytes of a number in
    the
    loss. ``recomputes_every_second``: whether selective recomputation keeps every second product
    alone.
    ``loads_full_model``: whether every rank makes the whole model before it is sharded.
    ``is_llama``: whether blocks are Llama's; else GPT's.
    """

    precision: Callable[[Row], Precision]
    reports_reserved: bool
    source: str
    keeps_unsharded_gradients: bool = False
    gradient_reduce_bytes: int | None = None
    shards_sequence: bool = True
    loss_bytes: int = 4
    recomputes_every_second: bool = False
    loads_full_model: bool = False
    devices_per_node: int = 8
    is_llama: bool = True


def _stated_formats(row: Row) -> Precision:
    """Returns the formats of a row that says them: true or pure formats throughout, else mixed."""
    name = row["precision"].lower()
    compute = FloatFormat.fp16 if "fp16" in name else FloatFormat.bf16
    if name in ("fp32", "float32", "32-true"):
        return Precision()
    if "mixed" in name or "amp" in name or "fp32" in name:
        return Precision(FloatFormat.fp32, compute)
    return Precision(compute, compute)


FRAMEWORKS = {
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
        is_llama=False,
    ),
}
"""By what a row's source contains. Another source is taken at its columns' word."""

OTHER = FrameworkFacts(_stated_formats, True, "the row's own columns")


def framework_of(row: Row) -> FrameworkFacts:
    """Returns the facts of the framework that a row comes from."""
    return next((facts for name, facts in FRAMEWORKS.items() if name in row["source"]), OTHER)


_FOUR_BITS, _DOUBLE = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)
QUANTIZED = {
    "bnb.nf4": _FOUR_BITS,
    "bnb.nf4-dq": _DOUBLE,
    "bnb.fp4": _FOUR_BITS,
    "bnb.fp4-dq": _DOUBLE,
    "bnb.int8": 1.0,
}
"""Bytes of a weight: four bits, a scale for 64 of them, and of those in turn (Dettmers, 2023)."""


def measured_peak(row: Row, run: RunConfig, predicted: int) -> int:
    """Returns the bytes that a row should have measured, of those that the ledger foresees.

    Beside the step there is the loading: every rank of a framework that ``loads_full_model`` holds
    the model and its own shard of it. Quantized weights are those of the blocks' linear layers.
    """
    each = run.precision.parameters.bytes
    shards = run.parallelism.world_size
    if each_quantized := QUANTIZED.get(row["quant"]):
        linear = sum(
            w.numel for w in run.model.weight_census() if w.layer is not None and len(w.shape) > 1
        )
        predicted -= int(linear * (each - each_quantized)) // shards
        if run.memory == FixedCheckpointing():
            predicted += _quantized_input_bytes(run)
    if framework_of(row).loads_full_model and shards > 1:
        whole = run.model.num_parameters * each
        predicted = max(predicted, whole + whole // shards)
    return predicted


def _quantized_input_bytes(run: RunConfig) -> int:
    """Returns the bytes of what 4-bit products keep of their inputs, which frozen ones need not.

    bitsandbytes 0.41, autograd/_functions.py: ``MatMul4Bit`` holds its input and its weight. Of a
    block's inputs those of the last product of attention and of the two of the feedforward count:
    the first is kept by the adapter as well.
    """
    model = run.model
    assert isinstance(model, DecoderConfig)
    tokens = run.micro_batch * run.data.sequence
    inputs = 2 * model.width + model.feedforward
    return tokens * inputs * run.precision.compute.bytes * model.layers


def build_run(row: Row) -> RunConfig:
    """Returns the run that a row measured, as near as this suite comes to it."""
    facts = framework_of(row)
    accumulation = _parse_int(row, "grad_accum", 1)
    parallelism = _parallelism_overrides(row, facts, accumulation)
    micro_batch = _parse_int(row, "micro_bs", 1)
    rows_of_step = micro_batch * parallelism.data_parallel_size * accumulation
    full = row["act_ckpt"].startswith("full")
    recompute = Recompute.selective if "selective" in row["act_ckpt"] else Recompute.nothing
    return RunConfig(
        model=_model_overrides(row, facts),
        data=RandomTokens(sequence=_parse_int(row, "seq", 2048)),
        objective=CausalLM(),
        parallelism=parallelism,
        precision=facts.precision(row),
        optimizer=SGDConfig() if row["optimizer"].lower().startswith("sgd") else AdamWConfig(),
        schedule=ConstantConfig(),
        adapter=_adapter_overrides(row),
        memory=FixedCheckpointing(Recompute.full if full else recompute),
        compile=Compile(),
        trainer=TrainerConfig(micro_batch=micro_batch, global_batch=rows_of_step, max_steps=1),
        checkpoint=CheckpointConfig(),
        tracking=WandbConfig(),
        launch=Launch(),
        hardware=device_profile(row["gpu"], facts.devices_per_node),
    )


def device_profile(name: str, devices_per_node: int) -> Hardware:
    """Returns the profile of a device by the name that rows use.

    Raises ``ConfigError`` for a device that is not known.
    """
    known = _find_device(name)
    if known is None:
        raise ConfigError.for_key(
            "gpu", name, "is no device known here", f"one of {', '.join(DEVICES)}"
        )
    return Hardware(
        device=DeviceKind.cuda,
        memory_gib=known.memory,
        fp32_tflops=known.tflops / 16,  # of NVIDIA's since Ampere, outside of tensor cores
        tf32_tflops=known.tflops / 2,
        bf16_tflops=known.tflops,
        fp16_tflops=known.tflops,
        memory_gb_per_s=known.bandwidth,
        link_gb_per_s=known.link,
        link_latency_us=4.0,
        devices_per_node=devices_per_node,
        node_link_gb_per_s=known.link / 9,
        node_link_latency_us=8.0,
        context_gib=1.0,
        product_share=known.product_share,
        attention_share=known.attention_share,
    )


def _find_device(name: str) -> PublishedDevice | None:
    """Returns the device that a name like ``NVIDIA H100 80GB HBM3`` or ``h100-sxm`` means."""
    words = re.findall(r"[a-z]*\d+[a-z]*", name.lower())
    sizes = [word.removesuffix("gb").removesuffix("g") for word in words[1:]]
    for model in sorted(DEVICES, key=len, reverse=True):
        kind, _, size = model.lower().partition(" ")
        named = any(kind in (word, word.removeprefix("rtx")) for word in words)
        if named and (not size or size in sizes):
            return DEVICES[model]
    return None


def _model_overrides(row: Row, facts: FrameworkFacts) -> DecoderConfig:
    llama = facts.is_llama and not row["model"].lower().startswith(("phi", "stablelm", "falcon"))
    shape = DecoderConfig(
        vocabulary=_parse_int(row, "vocab", 32000),
        context=_parse_int(row, "seq", 2048),
        width=_parse_int(row, "hidden", 4096),
        layers=_parse_int(row, "layers", 32),
        heads=_parse_int(row, "heads", 32),
        feedforward=_parse_int(row, "ffn", 11008),
        kv_heads=_parse_int(row, "kv_heads", 0) or None,
    )
    if llama:
        return shape
    return replace(
        shape,
        norm=NormKind.layernorm,
        activation=ActivationKind.gelu,
        position=PositionKind.rope if facts.is_llama else PositionKind.learned,
        bias=facts.is_llama,
        tied=not facts.is_llama,
    )


@dataclass(frozen=True)
class ForeignMesh(MeshConfig):
    """A mesh of another framework: gradients reduced, and losses taken, in its own formats."""

    reduced: int | None = None
    loss: int = 4
    every_second: bool = False

    def rank_memory(self, run: RunConfig, rank: int = 0) -> RankMemory:
        """Returns what a mesh of ours holds, in those formats."""
        held = super().rank_memory(run, rank)
        shape = replace(
            held.forward_spec,
            loss_element_bytes=self.loss,
            saves_alternate_matmuls=self.every_second,
        )
        held = replace(held, forward_spec=shape)
        if self.reduced is None or held.fsdp is None:
            return held
        return replace(held, fsdp=replace(held.fsdp, reduced_element_bytes=self.reduced))


def _parallelism_overrides(row: Row, facts: FrameworkFacts, accumulation: int) -> MeshConfig:
    pipeline = _parse_int(row, "pp", 1)
    return ForeignMesh(
        pipeline=pipeline,
        replicate=_parse_int(row, "dp", 1),
        shards=_parse_int(row, "fsdp", 1),
        context=_parse_int(row, "cp", 1),
        tensor=_parse_int(row, "tp", 1),
        reduced=facts.gradient_reduce_bytes,
        loss=facts.loss_bytes,
        every_second=facts.recomputes_every_second,
        sequence_parallel=facts.shards_sequence,
        loss_parallel=facts.shards_sequence,
        reshard_after_forward=row["zero_stage"] != "2" and pipeline == 1,
        reduce_each_micro_batch=not (facts.keeps_unsharded_gradients and accumulation > 1),
    )


def _adapter_overrides(row: Row) -> AdapterConfig:
    """Returns the adapter of a row; those of few weights count as one of rank 1."""
    if not row["peft"]:
        return NoAdapterConfig()
    return LoRAAdapterConfig() if row["peft"] == "lora" else LoRAAdapterConfig(rank=1)


def _parse_int(row: Row, key: str, default: int) -> int:
    return int(float(row[key])) if row.get(key) else default
