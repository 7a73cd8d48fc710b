"""Dropout as on CUDA in runs with fake tensors on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scalewise.tracing.cuda_kernels import cuda_kernels


def saved_tensors(forward: nn.Module | None, x: Tensor) -> list[Tensor]:
    """Tensors that attention with dropout, or ``forward``, saves for backward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        if forward is None:
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        else:
            forward(x)
    return saved


def test_cuda_dropout_saves_a_boolean_mask() -> None:
    x, dropout = torch.ones(4, 32, requires_grad=True), nn.Dropout(0.5)
    assert [tensor.dtype for tensor in saved_tensors(dropout, x)] == [torch.float32]
    with cuda_kernels():
        assert [tensor.dtype for tensor in saved_tensors(dropout, x)] == [torch.bool]
        output = dropout(x)
    assert {*output.flatten().tolist()} == {0.0, 2.0}
    assert F.dropout.__module__ == "torch.nn.functional"


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5).eval(), nn.Dropout(0.0)])
def test_cuda_dropout_without_effect_returns_its_input(dropout: nn.Module) -> None:
    x = torch.ones(4, 32, requires_grad=True)
    with cuda_kernels():
        assert torch.equal(dropout(x), x)


def test_cuda_attention_with_dropout_saves_no_scores() -> None:
    tokens = 48
    x = torch.ones(1, 2, tokens, 8, requires_grad=True)

    def has_scores(saved: list[Tensor]) -> bool:
        return any(tensor.shape[-2:] == (tokens, tokens) for tensor in saved)

    assert has_scores(saved_tensors(None, x))
    with cuda_kernels():
        assert not has_scores(saved_tensors(None, x))


def test_cuda_dropout_is_recomputed_in_backward() -> None:
    x, dropout = torch.ones(4, 32, requires_grad=True), nn.Dropout(0.5)
    with cuda_kernels():
        checkpoint(lambda x: dropout(x * x), x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert {*x.grad.flatten().tolist()} == {0.0, 4.0}
