"""Rules between precision or quantization and the other parts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from math import gcd

from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind
from scalewise.models.base import ModelConfig
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.hf_names import LLAMA_OPTIONS
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.precision import FloatFormat, Precision
from scalewise.precision.config import DIM_MULTIPLE, Float8
from scalewise.quantization.config import BitsAndBytesConfig, QATInt4Config, QuantizationConfig
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override


@singledispatch
def precision_issues(precision: Precision, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of the precision with other parts of the run: none."""
    yield from ()


@precision_issues.register(Float8)
def _fp8_issues(precision: Float8, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for devices, shapes and strategies that torchao's layers do not support."""
    parallelism, option = run.parallelism, run.option("precision")
    if run.hardware.fp8_tflops == 0:
        reason = f"{run.hardware.match or 'the device'} has no fp8 matmuls"
        yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
    for key, length in run.sequence_lengths.items():
        if length % DIM_MULTIPLE:
            reason = f"is not divisible by {DIM_MULTIPLE}, which fp8 matmuls over tokens require"
            fix = f"set {key}={max(1, length // DIM_MULTIPLE) * DIM_MULTIPLE}"
            yield ConfigIssue(key, length, reason, fix)
    if not precision.fp8_layers(run.model):
        reason = f"the model has no linear layer with dimensions divisible by {DIM_MULTIPLE}"
        yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
    if run.has_frozen_weights:
        adapter = run.option("adapter")
        reason = "freezes matrices, whose gradients torchao's fp8 layers compute all the same"
        yield ConfigIssue("adapter", adapter, reason, "set precision=bf16_mixed")
    if isinstance(parallelism, MeshConfig):
        for axis in ("tensor", "context"):
            if (ranks := parallelism.sizes.get(axis, 1)) > 1:
                reason = "would compute fp8 scales per rank instead of per tensor or row"
                fix = f"set parallelism=fsdp parallelism.{axis}=1"
                yield ConfigIssue(f"parallelism.{axis}", ranks, reason, fix)
    if isinstance(parallelism, DeepSpeedConfig):
        parallelism_option = run.option("parallelism")
        reason = "casts parameters itself and does not support fp8"
        yield ConfigIssue("parallelism", parallelism_option, reason, "set parallelism=fsdp")


@singledispatch
def quantization_issues(quantization: QuantizationConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of quantization with other parts of the run: none."""
    yield from ()


@quantization_issues.register(BitsAndBytesConfig)
def _packing_issues(quantization: BitsAndBytesConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for parts that train, shard or read the packed matrices."""
    name = run.option("quantization")
    parallelism = run.parallelism
    if not run.has_frozen_weights:
        reason = "packs matrices, which cannot be trained without an adapter"
        yield ConfigIssue("quantization", name, reason, "add adapter=lora")
    elif run.adapter.reads_base_weights:
        option = run.option("adapter")
        reason = f"is initialized from matrices that quantization={name} packs"
        yield ConfigIssue("adapter", option, reason, "set adapter=lora")
    if conflicting := {*run.adapter.fully_trained_modules(run.model)} & {
        *quantization.packed_layers(run.model)
    }:
        reason = f"matches {min(conflicting)}, which quantization={name} packs"
        fix = "leave it out, or set quantization=none"
        yield ConfigIssue("adapter.trained", run.adapter.trained, reason, fix)
    if isinstance(parallelism, MeshConfig) and parallelism.sizes.get("tensor", 1) > 1:
        reason = f"would shard the matrices that quantization={name} packs"
        fix = "set parallelism=fsdp parallelism.tensor=1"
        yield ConfigIssue("parallelism.tensor", parallelism.sizes["tensor"], reason, fix)
    if isinstance(parallelism, DeepSpeedConfig):
        option = run.option("parallelism")
        reason = f"casts the parameters that quantization={name} packs"
        yield ConfigIssue("parallelism", option, reason, "set parallelism=fsdp")
    if run.is_compiled:
        reason = f"is not supported with bitsandbytes, which unpacks for quantization={name}"
        yield ConfigIssue("compile", str(run.compile.scope), reason, "set compile=none")


@quantization_issues.register(QATInt4Config)
def _qat_issues(quantization: QATInt4Config, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for parts that freeze matrices, or shard elements with a common scale."""
    name = run.option("quantization")
    parallelism, model = run.parallelism, run.model
    if isinstance(model, DecoderConfig):
        yield from _export_format_issues(model, name)
    yield from _group_issues(quantization, model)
    if run.has_frozen_weights:
        option = run.option("adapter")
        reason = f"freezes the matrices that quantization={name} trains"
        fix = "set adapter=none, or quantization=nf4"
        yield ConfigIssue("adapter", option, reason, fix)
    if run.precision.fp8_layers(model):
        option = run.option("precision")
        reason = f"casts to fp8 the operands that quantization={name} rounds to integers"
        yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
    if isinstance(parallelism, MeshConfig) and parallelism.sizes.get("tensor", 1) > 1:
        reason = f"would compute quantization scales per rank instead of per group in {name}"
        fix = "set parallelism=fsdp parallelism.tensor=1"
        yield ConfigIssue("parallelism.tensor", parallelism.sizes["tensor"], reason, fix)
    if isinstance(parallelism, DeepSpeedConfig):
        option = run.option("parallelism")
        reason = f"is not supported with quantization={name}"
        yield ConfigIssue("parallelism", option, reason, "set parallelism=fsdp")


def _export_format_issues(model: DecoderConfig, name: str) -> Iterator[ConfigIssue]:
    """Yield an issue for each field that the export format does not have."""
    for field in ("position", "norm", "activation", "bias", "qkv_bias"):
        llama_value = LLAMA_OPTIONS[field]
        if (value := getattr(model, field)) != llama_value:
            reason = f"differs from Llama, whose format quantization={name} is exported in"
            fix = f"set {format_override(f'model.{field}', llama_value)}"
            yield ConfigIssue(f"model.{field}", value, reason, fix)


def _group_issues(quantization: QATInt4Config, model: ModelConfig) -> Iterator[ConfigIssue]:
    """Yield an issue if the group size does not divide the inputs of each linear layer."""
    weights = (
        weight for weight in model.weight_census() if quantization.is_fake_quantized(weight, model)
    )
    input_sizes = {weight.shape[1] for weight in weights}
    if indivisible := sorted(size for size in input_sizes if size % quantization.group):
        reason = f"does not divide {indivisible[0]}, the number of input features of a linear layer"
        divisors = (
            divisor
            for divisor in (128, 64, 32, 16, 8)
            if divisor <= quantization.group and not gcd(*input_sizes) % divisor
        )
        group = next(divisors, None)
        fix = f"set quantization.group={group}" if group else "set quantization=none"
        yield ConfigIssue("quantization.group", quantization.group, reason, fix)


def bf16_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for bf16 on a device without it."""
    formats = (run.precision.parameters, run.precision.compute)
    if FloatFormat.bf16 in formats and run.hardware.bf16_tflops == 0:
        chosen = run.option("precision")
        reason = f"is not supported: {run.hardware.match or 'the device'} has no bf16"
        has_fp16 = run.hardware.device is DeviceKind.cuda
        fix = f"set precision={'fp16_mixed' if has_fp16 else 'fp32'}"
        yield ConfigIssue("precision", chosen, reason, fix)


def stochastic_rounding_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for updates that ``precision.stochastic_rounding`` does not compute."""
    precision, optimizer, parallelism = run.precision, run.optimizer, run.parallelism
    if not precision.stochastic_rounding or precision.parameters is not FloatFormat.bf16:
        return
    key = "precision.stochastic_rounding"
    if run.objective.is_user_defined:
        reason = "is not supported with objective=module, which builds its optimizer itself"
        yield ConfigIssue(key, True, reason, f"set {key}=false")
        return
    reason = f"is not supported with {key}=true"
    if optimizer.offload:
        yield ConfigIssue("optimizer.offload", True, reason, "set optimizer.offload=false")
    elif not optimizer.supports_stochastic_rounding:
        fix = f"set optimizer=adamw, or {key}=false"
        yield ConfigIssue("optimizer", run.option("optimizer"), reason, fix)
    if optimizer.in_backward:
        yield ConfigIssue("optimizer.in_backward", True, reason, "set optimizer.in_backward=false")
    if optimizer.shard:
        fix = "set optimizer.shard=false parallelism=fsdp parallelism.shard=optimizer"
        yield ConfigIssue("optimizer.shard", True, reason, fix)
    if isinstance(parallelism, DeepSpeedConfig):
        option = run.option("parallelism")
        reason = f"updates the parameters itself, without {key}"
        yield ConfigIssue("parallelism", option, reason, "set parallelism=fsdp")
    elif isinstance(parallelism, DDPConfig) and not parallelism.averages_gradients:
        hook = parallelism.comm_hook.value
        reason = "averages bf16 parameters, which rounds them to nearest"
        fix = f"set parallelism.comm_hook=none, or {key}=false"
        yield ConfigIssue("parallelism.comm_hook", hook, reason, fix)
    elif isinstance(parallelism, MeshConfig):
        for axis in ("pipeline", "context", "tensor", "expert"):
            size = parallelism.expert if axis == "expert" else parallelism.sizes[axis]
            if size > 1:
                fix = f"set parallelism=fsdp parallelism.{axis}=1"
                yield ConfigIssue(f"parallelism.{axis}", size, reason, fix)
        if parallelism.cpu_offload:
            fix = "set parallelism.cpu_offload=false"
            yield ConfigIssue("parallelism.cpu_offload", True, reason, fix)


def fp16_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for fp16 on the CPU."""
    compute = run.precision.compute
    key, chosen = "precision", run.option("precision")
    if not chosen.startswith(compute.value):
        key, chosen = "precision.compute", compute.value
    if run.hardware.device is DeviceKind.cpu and compute is FloatFormat.fp16:
        reason = "is not supported on the CPU, where Lightning silently uses bf16"
        fix = f"set precision={'fp32' if run.hardware.bf16_tflops == 0 else 'bf16_mixed'}"
        yield ConfigIssue(key, chosen, reason, fix)
