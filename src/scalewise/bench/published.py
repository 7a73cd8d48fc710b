"""Published measurements as runs of this suite, with the facts of the framework that made them.

A row says which model, layout and batch; how its framework holds and computes them is stated here
once a source, with where it was read. No number is fitted to a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from scalewise.adapters import Adapter, Lora, NoAdapter
from scalewise.bench.rows import Row
from scalewise.checkpoints.spec import Checkpoint
from scalewise.compilation import Compile
from scalewise.data.synthetic import Synthetic
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind, Hardware
from scalewise.launch.spec import Launch
from scalewise.memory import Checkpointing, Recompute
from scalewise.models.decoder.spec import Activation, Decoder, Norm, Position
from scalewise.objectives import CausalLM
from scalewise.optimizers import SGD, AdamW
from scalewise.parallelism.holds import Holds
from scalewise.parallelism.mesh import Mesh
from scalewise.precision import Number, Precision
from scalewise.run import Run
from scalewise.schedules import Constant
from scalewise.tracking.spec import Wandb
from scalewise.trainer import Trainer

BF16 = Precision(Number.bf16, Number.bf16)
MIXED = Precision(Number.fp32, Number.bf16)


@dataclass(frozen=True)
class Device:
    """A device by the name that rows use: memory GiB, TFLOP/s, GB/s of memory and link."""

    memory: float
    tflops: float
    bandwidth: float
    link: float
    product_share: float = 0.8
    attention_share: float = 0.35


DEVICES = {
    "A100": Device(80, 312, 2039, 300, 0.87, 0.6),
    "A100 40": Device(40, 312, 1555, 300, 0.87, 0.6),
    "A800": Device(80, 312, 2039, 200, 0.87, 0.6),
    "B200": Device(180, 2250, 8000, 900),
    "GH200": Device(96, 989.5, 4000, 450),
    "H100": Device(80, 989.5, 3350, 450),
    "H100 96": Device(95, 989.5, 2400, 450),
    "H200": Device(139, 989.5, 4800, 450),
    "H800": Device(80, 989.5, 3350, 200),
    "L4": Device(24, 121, 300, 32),
    "L40S": Device(48, 362, 864, 32),
    "A6000": Device(48, 155, 768, 32),
    "A10G": Device(24, 70, 600, 32),
    "3090": Device(24, 71, 936, 32),
    "4090": Device(24, 165.2, 1008, 32),
    "V100": Device(32, 125, 900, 150),
    "V100 16": Device(16, 125, 900, 150),
}
"""Vendors' datasheets; torchtitan's H100 are of 96 GB with HBM2e (its report says so). Shares are
those of ``conf/hardware``."""


@dataclass(frozen=True)
class Framework:
    """How a framework holds and computes what its rows name.

    ``precision``: of a row. ``reserved``: whether it reports what the allocator reserves.
    ``source``: where this was read. ``keeps_whole_gradients``: whether gradients stay whole while
    micro batches are summed. ``reduced``: bytes of a gradient in its reduction. ``cuts_tokens``:
    whether tensor ranks share tokens and logits out as well. ``loss``: bytes of a number in the
    loss. ``every_second``: whether selective recomputation keeps every second product alone.
    ``loads_whole``: whether every rank makes the whole model before it is sharded. ``llama``:
    whether blocks are Llama's; else GPT's.
    """

    precision: Callable[[Row], Precision]
    reserved: bool
    source: str
    keeps_whole_gradients: bool = False
    reduced: int | None = None
    cuts_tokens: bool = True
    loss: int = 4
    every_second: bool = False
    loads_whole: bool = False
    devices_per_node: int = 8
    llama: bool = True


def _said(row: Row) -> Precision:
    """Returns the formats of a row that says them: true or pure formats throughout, else mixed."""
    name = row["precision"].lower()
    compute = Number.fp16 if "fp16" in name else Number.bf16
    if name in ("fp32", "float32", "32-true"):
        return Precision()
    if "mixed" in name or "amp" in name or "fp32" in name:
        return Precision(Number.fp32, compute)
    return Precision(compute, compute)


FRAMEWORKS = {
    "torchtitan": Framework(
        _said,
        True,
        "train.py logs max_reserved; FSDP2 with fp32 masters; selective-op: every second matmul",
        every_second=True,
    ),
    "KempnerForge": Framework(
        lambda row: BF16,
        False,
        "parallel.py: model.to(bf16) whatever the name, gradients unsharded while accumulating; "
        "loss.py: cross-entropy of bf16 logits",
        keeps_whole_gradients=True,
        loss=2,
        reduced=4,
        cuts_tokens=False,
        devices_per_node=4,
    ),
    "litgpt": Framework(
        _said,
        False,
        "resource-tables.md: torch.cuda.max_memory_allocated; FSDP1 over a module that is loaded",
        loads_whole=True,
    ),
    "llm-foundry": Framework(
        lambda row: MIXED if row["precision"].startswith("amp") else BF16,
        True,
        "benchmarking/README.md: MosaicML DEFAULT and PURE are FSDP1's; GPT-shaped models; "
        "hf_causal_lm and mpt: loss_fn=fused_crossentropy, gradients in the place of the logits",
        loss=0,
        llama=False,
    ),
}
"""By what a row's source contains. Another source is taken at its columns' word."""

OTHER = Framework(_said, True, "the row's own columns")


def framework(row: Row) -> Framework:
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


def peak(row: Row, run: Run, foreseen: int) -> int:
    """Returns the bytes that a row should have measured, of those that the ledger foresees.

    Beside the step there is the loading: every rank of a framework that ``loads_whole`` holds the
    model and its own shard of it. Quantized weights are those of the blocks' linear layers.
    """
    each = run.precision.parameters.bytes
    shards = run.parallelism.world_size
    if each_quantized := QUANTIZED.get(row["quant"]):
        linear = sum(
            w.count for w in run.model.census() if w.layer is not None and len(w.shape) > 1
        )
        foreseen -= int(linear * (each - each_quantized)) // shards
        if run.memory == Checkpointing():
            foreseen += _inputs_of_quantized(run)
    if framework(row).loads_whole and shards > 1:
        whole = run.model.parameters * each
        foreseen = max(foreseen, whole + whole // shards)
    return foreseen


def _inputs_of_quantized(run: Run) -> int:
    """Returns the bytes of what 4-bit products keep of their inputs, which frozen ones need not.

    bitsandbytes 0.41, autograd/_functions.py: ``MatMul4Bit`` holds its input and its weight. Of a
    block's inputs those of the last product of attention and of the two of the feedforward count:
    the first is kept by the adapter as well.
    """
    model = run.model
    assert isinstance(model, Decoder)
    tokens = run.micro_batch * run.data.sequence
    inputs = 2 * model.width + model.feedforward
    return tokens * inputs * run.precision.compute.bytes * model.layers


def run_of(row: Row) -> Run:
    """Returns the run that a row measured, as near as this suite comes to it."""
    facts = framework(row)
    accumulation = _int(row, "grad_accum", 1)
    parallelism = _parallelism(row, facts, accumulation)
    micro_batch = _int(row, "micro_bs", 1)
    rows_of_step = micro_batch * parallelism.data_parallel_size * accumulation
    full = row["act_ckpt"].startswith("full")
    recompute = Recompute.selective if "selective" in row["act_ckpt"] else Recompute.nothing
    return Run(
        model=_model(row, facts),
        data=Synthetic(sequence=_int(row, "seq", 2048)),
        objective=CausalLM(),
        parallelism=parallelism,
        precision=facts.precision(row),
        optimizer=SGD() if row["optimizer"].lower().startswith("sgd") else AdamW(),
        schedule=Constant(),
        adapter=_adapter(row),
        memory=Checkpointing(Recompute.full if full else recompute),
        compile=Compile(),
        trainer=Trainer(micro_batch=micro_batch, global_batch=rows_of_step, max_steps=1),
        checkpoint=Checkpoint(),
        tracking=Wandb(),
        launch=Launch(),
        hardware=hardware(row["gpu"], facts.devices_per_node),
    )


def hardware(name: str, devices_per_node: int) -> Hardware:
    """Returns the profile of a device by the name that rows use.

    Raises ``ConfigError`` for a device that is not known.
    """
    known = _device(name)
    if known is None:
        raise ConfigError.one(
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


def _device(name: str) -> Device | None:
    """Returns the device that a name like ``NVIDIA H100 80GB HBM3`` or ``h100-sxm`` means."""
    words = re.findall(r"[a-z]*\d+[a-z]*", name.lower())
    sizes = [word.removesuffix("gb").removesuffix("g") for word in words[1:]]
    for model in sorted(DEVICES, key=len, reverse=True):
        kind, _, size = model.lower().partition(" ")
        named = any(kind in (word, word.removeprefix("rtx")) for word in words)
        if named and (not size or size in sizes):
            return DEVICES[model]
    return None


def _model(row: Row, facts: Framework) -> Decoder:
    llama = facts.llama and not row["model"].lower().startswith(("phi", "stablelm", "falcon"))
    shape = Decoder(
        vocabulary=_int(row, "vocab", 32000),
        context=_int(row, "seq", 2048),
        width=_int(row, "hidden", 4096),
        layers=_int(row, "layers", 32),
        heads=_int(row, "heads", 32),
        feedforward=_int(row, "ffn", 11008),
        kv_heads=_int(row, "kv_heads", 0) or None,
    )
    if llama:
        return shape
    return replace(
        shape,
        norm=Norm.layernorm,
        activation=Activation.gelu,
        position=Position.rope if facts.llama else Position.learned,
        bias=facts.llama,
        tied=not facts.llama,
    )


@dataclass(frozen=True)
class ForeignMesh(Mesh):
    """A mesh of another framework: gradients reduced, and losses taken, in its own formats."""

    reduced: int | None = None
    loss: int = 4
    every_second: bool = False

    def holds(self, run: Run, rank: int = 0) -> Holds:
        """Returns what a mesh of ours holds, in those formats."""
        held = super().holds(run, rank)
        shape = replace(held.shape, loss=self.loss, every_second=self.every_second)
        held = replace(held, shape=shape)
        if self.reduced is None or held.gathering is None:
            return held
        return replace(held, gathering=replace(held.gathering, reduced=self.reduced))


def _parallelism(row: Row, facts: Framework, accumulation: int) -> Mesh:
    pipeline = _int(row, "pp", 1)
    return ForeignMesh(
        pipeline=pipeline,
        replicate=_int(row, "dp", 1),
        shards=_int(row, "fsdp", 1),
        context=_int(row, "cp", 1),
        tensor=_int(row, "tp", 1),
        reduced=facts.reduced,
        loss=facts.loss,
        every_second=facts.every_second,
        sequence_parallel=facts.cuts_tokens,
        loss_parallel=facts.cuts_tokens,
        reshard_after_forward=row["zero_stage"] != "2" and pipeline == 1,
        reduce_each_micro_batch=not (facts.keeps_whole_gradients and accumulation > 1),
    )


def _adapter(row: Row) -> Adapter:
    """Returns the adapter of a row; those of few weights count as one of rank 1."""
    if not row["peft"]:
        return NoAdapter()
    return Lora() if row["peft"] == "lora" else Lora(rank=1)


def _int(row: Row, key: str, default: int) -> int:
    return int(float(row[key])) if row.get(key) else default
