"""Soft-capped logits in chunked and compiled losses, compared with the full eager loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fixtures.decoder_configs import GEMMA2, random_tokens
from torch import Tensor
from torch.nn import functional as F

from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_model
from scalewise.objectives.config import CausalLM
from scalewise.objectives.losses import set_chunked_loss, token_sums_function
from scalewise.torch_compile import Compile, CompileBackend, CompileScope

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # raised in Dynamo
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

SPEC = replace(GEMMA2, initial_std=0.3)
TRACED = Compile(CompileScope.block, CompileBackend.aot_eager)


@pytest.fixture(autouse=True)
def clear_compiled_functions() -> None:
    torch.compiler.reset()


def gradients(module: ModelModule, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    taken = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return taken


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}], ids=str)
def test_chunked_loss_of_softcapped_logits_equals_full_loss(
    options: dict[str, float], in_forward: bool, compiled: bool, tied: bool
) -> None:
    module, batch = build_model(replace(SPEC, tied=tied), 0), random_tokens(SPEC)
    labels = batch.roll(-1, 1)
    logits = module(batch)
    assert logits.abs().max() < SPEC.logit_softcap < 5 * logits.abs().max()
    objective = CausalLM(20, **options)
    expected = token_sums_function(objective, None)(logits, labels)
    if not options:
        by_torch = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        torch.testing.assert_close(expected, by_torch)
    expected_gradients = gradients(module, expected)
    set_chunked_loss(
        objective, module, in_forward=in_forward, compile_config=TRACED if compiled else None
    )
    loss = module(batch, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(module, loss), expected_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", CompileBackend)
def test_compiled_softcapped_blocks_equal_eager_ones(backend: CompileBackend) -> None:
    spec = replace(SPEC, layers=2)
    module, batch = build_model(spec, 0), random_tokens(spec)
    expected = module(batch).sum()
    expected_gradients = gradients(module, expected)
    for block in module.layers():
        block.forward = torch.compile(block.forward, backend=backend.value, dynamic=False)
    actual = module(batch).sum()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(gradients(module, actual), expected_gradients, rtol=1e-3, atol=1e-4)
