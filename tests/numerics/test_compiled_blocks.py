"""Blocks of the decoder compile to one graph, except where a part runs eagerly by design."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fixtures.strategies import GEMMA3, GPT2, LLAMA, TINY_DECODER
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

from scalewise import compose
from scalewise.hardware import DeviceKind
from scalewise.strategies.activation_checkpointing import RECOMPILE_LIMIT
from scalewise.strategies.single import SingleDevice

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # raised in Dynamo
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    # Dynamo instantiates autograd functions.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

TOKENS = 32
OPTIONS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "gemma3": (*LLAMA, *GEMMA3),
    "parallel_residual": (*GPT2, "model.residual=parallel"),
    "bf16_true": (*LLAMA, "precision=bf16_true"),
    "fp8": (*LLAMA, "precision=fp8"),
    "lora": (*LLAMA, "adapter=lora", "adapter.dropout=0.1"),
    "dora": (*LLAMA, "adapter=dora"),
    "ia3": (*LLAMA, "adapter=ia3"),
    "full": (*LLAMA, "memory=checkpoint_full"),
    "selective": (*LLAMA, "memory=checkpoint_selective"),
    "experts": (*LLAMA, "model.experts=4"),
    "experts, capacity": (*LLAMA, "model.experts=4", "model.capacity_factor=0.75"),
    "experts, lora": (*LLAMA, "model.experts=4", "adapter=lora", "adapter.targets=[.*]"),
}


def build_module(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> torch.nn.Module:
    """Build a module with blocks that fail to compile unless each is one graph."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True))
    options = ("compile=block", "compile.backend=aot_eager", f"data.sequence={TOKENS}")
    run = compose([*TINY_DECODER, *overrides, *options], check_machine=False)
    return SingleDevice(DeviceKind.cpu).build(run)


@pytest.mark.parametrize("name", OPTIONS)
def test_block_compiles_to_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = build_module(monkeypatch, *OPTIONS[name])
    logits_BTV = module(torch.arange(2 * TOKENS).view(2, TOKENS))
    logits_BTV.square().mean().backward()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert trained
    assert all(parameter.grad is not None for parameter in trained)


def test_soft_capped_attention_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop over tiles would be unrolled into the graph."""
    module = build_module(monkeypatch, *LLAMA, "model.attention_softcap=20")
    with pytest.raises(Unsupported, match="attend_softcapped"):
        module(torch.arange(2 * TOKENS).view(2, TOKENS))


@pytest.mark.exhaustive
def test_more_lengths_than_torchs_limit_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = range(4, 4 + RECOMPILE_LIMIT + 2)

    def train(*overrides: str) -> None:
        module = build_module(monkeypatch, *LLAMA, "model.layers=1", *overrides)
        for length in lengths:
            module(torch.zeros(1, length, dtype=torch.int64)).sum().backward()

    stages = [f"s{length}:{{until_step:{length},sequence:{length}}}" for length in lengths]
    limits = {"recompile_limit": RECOMPILE_LIMIT, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        with pytest.raises(FailOnRecompileLimitHit):
            train()
        train(f"+trainer.sequence_warmup={{{','.join(stages)}}}")


def test_packed_documents_are_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build_module(monkeypatch, *LLAMA)
    positions_BT = torch.arange(TOKENS).remainder(TOKENS // 2).expand(2, -1)
    logits_BTV = module(torch.arange(2 * TOKENS).view(2, TOKENS), positions_BS=positions_BT)
    logits_BTV.square().mean().backward()
