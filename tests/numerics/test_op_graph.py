"""Activation memory of the operator graph compared with measured memory of a block."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from scalewise.hardware import DeviceKind
from scalewise.measure.memory import LiveBytes
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.base import StageSlice
from scalewise.models.build import build_meta
from scalewise.models.decoder.config import ActivationKind, DecoderConfig, NormKind, PositionKind
from scalewise.models.op_graph import ForwardSpec, Recompute, build_op_graphs
from scalewise.planner.activation_liveness import simulate_part
from scalewise.precision.build import apply_precision
from scalewise.precision.config import Float8
from scalewise.quantization import NoQuantizationConfig
from scalewise.quantization.build import apply_quantization
from scalewise.quantization.config import QAT8da4wConfig, QATInt4Config
from scalewise.strategies.activation_checkpointing import apply_checkpointing

ROWS, TOKENS = 8, 64
FP8 = Float8()
PART = StageSlice(range(1))
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
FORMATS = {
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
QATS = {"qat_int4": QATInt4Config(), "qat_8da4w": QAT8da4wConfig(group=16)}
NEVER = {("gpt2", name) for name in FORMATS if "qat" in name}
"""Rejected: the matrices of GPT-2 have biases."""
CASES = [(family, name) for family in SPECS for name in FORMATS if (family, name) not in NEVER]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize(("family", "precision"), CASES)
def test_block_memory_equals_the_operator_graph(
    family: str, precision: str, recompute: Recompute, fresh: bool
) -> None:
    spec, (stream, compute, held) = SPECS[family], FORMATS[precision]
    mixed = "bf16_mixed" in precision
    in_fp8 = FP8.fp8_layers(spec) if "fp8" in precision else ()
    rounding = QATS.get(precision.partition(",")[0], NoQuantizationConfig())
    shape = ForwardSpec(
        *(ROWS, TOKENS, stream, compute, held),
        autocast=mixed,
        on_cpu=True,
        rope_element_bytes=held,
        fp8_layers=in_fp8,
        fake_quantized_layers=rounding.fake_quantized_layers(spec),
        quantization_group=rounding.group,
        rounds_inputs=rounding.rounds_inputs,
    )
    graph = build_op_graphs(spec, shape).block
    predicted = simulate_part(graph, recompute, fresh_gradients=fresh)
    found = _measured(spec, precision, recompute, fresh=fresh)
    # What the block reads stays for as long as the test has it.
    kept = recompute is not Recompute.nothing or any(0 in op.saved for op in graph.operators)
    given = 0 if kept else graph.sizes[0]
    assert found["kept"] == pytest.approx(predicted.saved_bytes + given, rel=1e-3)
    assert found["forward"] == pytest.approx(predicted.forward_peak, rel=1e-3)
    assert found["backward"] == pytest.approx(predicted.backward_peak + given, rel=1e-3)


def _measured(
    spec: DecoderConfig, precision: str, recompute: Recompute, *, fresh: bool
) -> dict[str, int]:
    module = build_meta(spec, PART)
    if "fp8" in precision:
        apply_precision(FP8, module, spec, DeviceKind.cpu)
    quantization = QATS.get(precision.partition(",")[0], NoQuantizationConfig())
    apply_quantization(quantization, module, spec)
    module.to_empty(device="cpu")
    module.init_weights(1)
    number = torch.bfloat16 if "bf16_true" in precision else torch.float32
    module.to(number)
    apply_checkpointing(FixedCheckpointing(recompute), module, PART)
    (block,) = module.layers()
    if not fresh:
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
    mixed = "bf16_mixed" in precision
    context: AbstractContextManager[object] = (
        torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext()
    )
    rope = None if module.rope is None else module.rope[:, :TOKENS].clone()
    gradient = torch.ones(ROWS, TOKENS, spec.width, dtype=number)
    size = gradient.untyped_storage().nbytes()
    with LiveBytes() as live:
        x = torch.randn(ROWS, TOKENS, spec.width, dtype=number).requires_grad_()
        with context:
            y = block(x, rope)
        forward, kept = live.take_peak(), live.current_bytes - size
        y.backward(gradient)
        backward = live.take_peak()
    # The block's output lives on here, and the gradient was there before: they cancel out.
    return {"forward": forward, "kept": kept, "backward": backward}
