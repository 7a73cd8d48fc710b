"""The residual stream under autocast: the arithmetic of FSDP's mixed precision."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import cast

import pytest
import torch
from fixtures.decoder_configs import ALL_DECODERS, GPT2, LLAMA, random_tokens
from torch import Tensor, nn

from scalewise.models.build import build_model
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.norms import RMSNorm

AUTOCAST = torch.autocast("cpu", torch.bfloat16)


def with_bf16_parameters(module: nn.Module) -> nn.Module:
    """Copy whose parameters are bf16, as FSDP gathers them; buffers stay in fp32."""
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    return module


@pytest.mark.parametrize("spec", ALL_DECODERS.values(), ids=ALL_DECODERS.keys())
def test_autocast_computes_what_bf16_parameters_do(spec: DecoderConfig) -> None:
    module, tokens = build_model(spec, seed=1), random_tokens(spec)
    gathered = with_bf16_parameters(module)
    with AUTOCAST:
        logits = module(tokens)
    expected = gathered(tokens)
    assert torch.equal(logits, expected)
    logits.float().square().sum().backward()
    expected.float().square().sum().backward()
    named = dict(gathered.named_parameters())
    for name, parameter in module.named_parameters():
        if name == "embedding.weight":  # rows of repeated tokens add up in fp32, and in bf16
            continue
        gradient, other = cast(Tensor, parameter.grad), cast(Tensor, named[name].grad)
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, other.float()), name


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
    ids=["bf16", "fp16"],
)
def test_residual_stream_is_bf16_but_never_fp16(
    spec: DecoderConfig, dtype: torch.dtype, expected: torch.dtype
) -> None:
    module = build_model(replace(spec, layers=1), seed=1)
    dtypes = []
    (block,) = module.layers()
    for part in (block, *(m for m in module.modules() if "Norm" in type(m).__name__)):
        part.register_forward_hook(
            lambda _, inputs, output: dtypes.extend((inputs[0].dtype, output.dtype))
        )
    with torch.autocast("cpu", dtype):
        module(random_tokens(spec))
    assert set(dtypes) == {expected}


def test_norm_without_autocast_equals_that_of_torch() -> None:
    module = build_model(LLAMA, seed=1)
    (norm,) = (m for name, m in module.named_modules() if name == "norm")
    x = torch.randn(2, 3, LLAMA.width)
    weight = cast(Tensor, norm.weight)
    expected = nn.functional.rms_norm(x, (LLAMA.width,), weight, LLAMA.norm_epsilon)
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("enabled", [True, False])
def test_norm_compiles_without_graph_breaks(enabled: bool) -> None:
    """A graph break at each norm leaves most of a compiled block to eager kernels."""
    norm = torch.compile(RMSNorm(8, LLAMA), backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        assert norm(torch.ones(2, 8)).dtype is torch.float32
    torch.compiler.reset()
