"""Activation memory of the operator graph compared with measured memory of a block."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

from scalewise.hardware import DeviceKind
from scalewise.measure.allocated_bytes import LiveBytes
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.base import StageSlice
from scalewise.models.build import build_meta
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import (
    ActivationKind,
    NormKind,
    NormPlacement,
    PositionKind,
    QKNorm,
    Residual,
)
from scalewise.models.decoder.moe_config import RouterScore
from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork, Recompute, build_op_graphs
from scalewise.planner.activation_liveness import simulate_part
from scalewise.precision.build import apply_precision
from scalewise.precision.config import Float8
from scalewise.quantization import NoQuantizationConfig
from scalewise.quantization.build import apply_quantization
from scalewise.quantization.config import QAT8da4wConfig, QATInt4Config
from scalewise.strategies.activation_checkpointing import apply_checkpointing

BATCH_SIZE, TOKENS = 8, 64
FP8 = Float8()
FIRST_BLOCK = StageSlice(range(1))
LATENT = {"kv_latent_dim": 40, "head_width": 24, "rope_head_dim": 8}
SPECS = {
    "llama": DecoderConfig(
        vocabulary=256, context=TOKENS, width=64, layers=1, heads=4, feedforward=160, kv_heads=2
    ),
    "gpt2": DecoderConfig(
        vocabulary=256,
        context=TOKENS,
        width=64,
        layers=1,
        heads=4,
        feedforward=160,
        norm=NormKind.layernorm,
        position=PositionKind.learned,
        activation=ActivationKind.gelu,
        bias=True,
    ),
}
SPECS["qk_norm"] = replace(SPECS["llama"], qk_norm=QKNorm.head, qkv_bias=True, head_width=24)
SPECS["olmo2"] = replace(
    SPECS["llama"],
    qk_norm=QKNorm.projection,
    norm_placement=NormPlacement.post,
    residual_multiplier=0.5,
    attention_multiplier=0.5,
)
SPECS["gemma3"] = replace(
    SPECS["llama"],
    norm=NormKind.zero_centered_rmsnorm,
    norm_placement=NormPlacement.sandwich,
    activation=ActivationKind.geglu,
    qk_norm=QKNorm.head,
    window=24,
)
SPECS["mup"] = replace(SPECS["llama"], base_width=16, base_heads=4)
SPECS["softcap"] = replace(SPECS["llama"], attention_softcap=2.0)
SPECS["gemma2"] = replace(SPECS["gemma3"], qk_norm=QKNorm.none, attention_softcap=50.0)
SPECS["gpt_neox"] = replace(
    SPECS["llama"],
    norm=NormKind.layernorm,
    activation=ActivationKind.gelu_exact,
    bias=True,
    residual=Residual.parallel,
    rotary_fraction=0.25,
)
SPECS["phi"] = replace(SPECS["gpt_neox"], residual=Residual.parallel_one_norm, head_bias=True)
SPECS["latent"] = replace(SPECS["llama"], kv_heads=None, **LATENT)
SPECS["latent_queries"] = replace(
    SPECS["latent"], query_latent_dim=48, value_head_dim=24, attention_multiplier=0.5
)
ELEMENT_BYTES = {
    "fp32": (4, 4, 4),
    "bf16_mixed": (4, 2, 4),
    "bf16_true": (2, 2, 2),
    "fp8, fp32": (4, 4, 4),
    "fp8, bf16_mixed": (4, 2, 4),
    "fp8, bf16_true": (2, 2, 2),
    "qat_int4, fp32": (4, 4, 4),
    "qat_int4, bf16_mixed": (4, 2, 4),
    "qat_8da4w, fp32": (4, 4, 4),
    "qat_8da4w, bf16_mixed": (4, 2, 4),
    "qat_8da4w, bf16_true": (2, 2, 2),
}
QAT_CONFIGS = {"qat_int4": QATInt4Config(), "qat_8da4w": QAT8da4wConfig(group=16)}
UNSUPPORTED_CASES = {("gpt2", name) for name in ELEMENT_BYTES if "qat" in name}
"""Rejected: the matrices of GPT-2 have biases."""
CASES = [
    (family, name)
    for family in SPECS
    for name in ELEMENT_BYTES
    if (family, name) not in UNSUPPORTED_CASES
    if family in ("llama", "gpt2")
    or name in ("fp32", "bf16_true")
    or (family in ("softcap", "latent", "latent_queries") and name == "bf16_mixed")
]


@pytest.mark.parametrize("fresh_gradients", [True, False])
@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize(("family", "precision"), CASES)
def test_block_memory_equals_the_operator_graph(
    family: str, precision: str, recompute: Recompute, fresh_gradients: bool
) -> None:
    spec, (stream, compute, master_bytes) = SPECS[family], ELEMENT_BYTES[precision]
    mixed = "bf16_mixed" in precision
    in_fp8 = FP8.fp8_layers(spec) if "fp8" in precision else ()
    rounding = QAT_CONFIGS.get(precision.partition(",")[0], NoQuantizationConfig())
    shape = ForwardSpec(
        *(BATCH_SIZE, TOKENS, stream, compute, master_bytes),
        autocast=mixed,
        on_cpu=True,
        rope_element_bytes=master_bytes,
        fp8_layers=in_fp8,
        fake_quantized_layers=rounding.fake_quantized_layers(spec),
        quantization_group=rounding.group,
        rounds_inputs=rounding.rounds_inputs,
    )
    graph = build_op_graphs(spec, shape).block
    predicted = simulate_part(graph, recompute, fresh_gradients=fresh_gradients)
    measured_bytes = _measured(spec, precision, recompute, fresh_gradients=fresh_gradients)
    input_bytes = _bytes_of_unsaved_input(graph, recompute)
    assert measured_bytes["saved"] == pytest.approx(predicted.saved_bytes + input_bytes, rel=1e-3)
    assert measured_bytes["forward"] == pytest.approx(predicted.forward_peak, rel=1e-3)
    assert measured_bytes["backward"] == pytest.approx(
        predicted.backward_peak + input_bytes, rel=1e-3
    )


LONG = 600
"""Tokens of a sequence whose soft-capped scores determine the peak: two tiles and a part of one."""


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_true"])
@pytest.mark.parametrize("window", [None, 100])
def test_memory_of_softcapped_scores_equals_the_operator_graph(
    window: int | None, precision: str, recompute: Recompute
) -> None:
    spec, (stream, compute, master_bytes) = SPECS["softcap"], ELEMENT_BYTES[precision]
    spec = replace(spec, context=LONG, window=window)
    shape = ForwardSpec(
        *(1, LONG, stream, compute, master_bytes),
        autocast="mixed" in precision,
        on_cpu=True,
        rope_element_bytes=master_bytes,
    )
    graph = build_op_graphs(spec, shape).block
    predicted = simulate_part(graph, recompute, fresh_gradients=True)
    measured_bytes = _measured(spec, precision, recompute, fresh_gradients=True, shape=(1, LONG))
    input_bytes = _bytes_of_unsaved_input(graph, recompute)
    assert measured_bytes["saved"] == pytest.approx(predicted.saved_bytes + input_bytes, rel=1e-3)
    assert measured_bytes["forward"] == pytest.approx(predicted.forward_peak, rel=1e-3)
    # The test keeps the output of the block, whose gradient the attention sublayer does not read.
    assert measured_bytes["backward"] == pytest.approx(
        predicted.backward_peak + input_bytes + graph.sizes[0], rel=1e-3
    )
    (attention,) = (op for op in graph.operators if op.work is OpWork.attention)
    assert attention.backward_scratch > predicted.backward_peak / 2


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("family", ["latent", "latent_queries"])
def test_memory_of_latent_attention_equals_the_operator_graph(
    family: str, precision: str, recompute: Recompute
) -> None:
    """With a small feedforward, attention determines the peaks."""
    spec = replace(SPECS[family], feedforward=16)
    stream, compute, master_bytes = ELEMENT_BYTES[precision]
    shape = ForwardSpec(
        *(BATCH_SIZE, TOKENS, stream, compute, master_bytes),
        autocast="mixed" in precision,
        on_cpu=True,
        rope_element_bytes=master_bytes,
    )
    graph = build_op_graphs(spec, shape).block
    predicted = simulate_part(graph, recompute, fresh_gradients=True)
    measured_bytes = _measured(spec, precision, recompute, fresh_gradients=True)
    assert measured_bytes["saved"] == pytest.approx(predicted.saved_bytes, rel=1e-3)
    assert measured_bytes["forward"] == pytest.approx(predicted.forward_peak, rel=0.003)
    # The test keeps the output of the block, whose gradient the attention sublayer does not read.
    assert measured_bytes["backward"] == pytest.approx(
        predicted.backward_peak + graph.sizes[0], rel=0.01
    )


EXPERTS = replace(SPECS["llama"], experts=8, expert_dim=96)
WITH_EXPERTS = {
    "experts": EXPERTS,
    "shared": replace(EXPERTS, shared_experts=1, aux_loss=0.01, router_z_loss=0.01),
    "capacity": replace(EXPERTS, capacity_factor=1.25),
    "low capacity": replace(EXPERTS, capacity_factor=0.5, shared_experts=1),
    "sigmoid": replace(EXPERTS, router_score=RouterScore.sigmoid, balance_rate=0.001),
}


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_true"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_block_memory_with_experts_is_near_the_operator_graph(
    name: str, precision: str, recompute: Recompute
) -> None:
    """Sizes do not depend on the routing; indices of rows are few bytes."""
    spec, (stream, compute, master_bytes) = WITH_EXPERTS[name], ELEMENT_BYTES[precision]
    shape = ForwardSpec(
        *(BATCH_SIZE, TOKENS, stream, compute, master_bytes),
        autocast="mixed" in precision,
        on_cpu=True,
        rope_element_bytes=master_bytes,
    )
    graph = build_op_graphs(spec, shape).block
    predicted = simulate_part(graph, recompute, fresh_gradients=True)
    measured_bytes = _measured(spec, precision, recompute, fresh_gradients=True)
    input_bytes = _bytes_of_unsaved_input(graph, recompute)
    assert measured_bytes["saved"] == pytest.approx(predicted.saved_bytes + input_bytes, rel=1e-3)
    assert measured_bytes["forward"] == pytest.approx(predicted.forward_peak, rel=0.025)
    assert measured_bytes["backward"] == pytest.approx(
        predicted.backward_peak + input_bytes, rel=0.025
    )


def _bytes_of_unsaved_input(graph: OpGraph, recompute: Recompute) -> int:
    """Size of the input of the block if only the test keeps it alive."""
    saves_input = recompute is not Recompute.nothing or any(0 in op.saved for op in graph.operators)
    return 0 if saves_input else graph.sizes[0]


def _measured(
    spec: DecoderConfig,
    precision: str,
    recompute: Recompute,
    *,
    fresh_gradients: bool,
    shape: tuple[int, int] = (BATCH_SIZE, TOKENS),
) -> dict[str, int]:
    module = build_meta(spec, FIRST_BLOCK)
    if "fp8" in precision:
        apply_precision(FP8, module, spec, DeviceKind.cpu)
    quantization = QAT_CONFIGS.get(precision.partition(",")[0], NoQuantizationConfig())
    apply_quantization(quantization, module, spec)
    module.to_empty(device="cpu")
    module.init_weights(1)
    dtype = torch.bfloat16 if "bf16_true" in precision else torch.float32
    module.to(dtype)
    apply_checkpointing(FixedCheckpointing(recompute), module, FIRST_BLOCK, DeviceKind.cpu)
    (block,) = module.layers()
    if not fresh_gradients:
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
    mixed = "bf16_mixed" in precision
    context: AbstractContextManager[object] = (
        torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext()
    )
    rope = None if module.rope is None else module.rope[:, : shape[1]].clone()
    gradient = torch.ones(*shape, spec.width, dtype=dtype)
    size = gradient.untyped_storage().nbytes()
    with LiveBytes() as live_bytes:
        x = torch.randn(*shape, spec.width, dtype=dtype).requires_grad_()
        with context:
            y = block(x, rope)
        forward, saved_bytes = live_bytes.take_peak(), live_bytes.current_bytes - size
        y.backward(gradient)
        backward = live_bytes.take_peak()
    # The output of the block stays alive, and the gradient existed before: they cancel out.
    return {"forward": forward, "saved": saved_bytes, "backward": backward}
