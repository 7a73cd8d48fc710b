"""Selective activation checkpointing of attention by segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalewise.compat.torch import TorchDispatchMode
from scalewise.models import attention_backends
from scalewise.models.attention_backends import attend
from scalewise.models.attention_kernels import AttentionBackend, AttentionKernel
from scalewise.models.attention_segments import equal_segments
from scalewise.strategies.activation_checkpointing import checkpoint_block


class CountOps(TorchDispatchMode):
    """Record the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """Attention of one segment per sequence, after an operator that is recomputed."""

    def forward(self, x_BTHD: Tensor) -> Tensor:
        """Return ``attention_BTHD``."""
        query = x_BTHD.exp()
        return attend(query, query, query, equal_segments(2, 4, 4, x_BTHD.device))


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (AttentionKernel.varlen, "torch_attn::_varlen_attn"),
        (AttentionKernel.varlen_cpu, "scalewise::varlen_attention_cpu"),
    ],
)
def test_selective_checkpointing_does_not_recompute_attention_of_segments(
    kernel: AttentionKernel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = AttentionBackend(kernel, expands_keys=False)
    monkeypatch.setattr(attention_backends, "choose_backend", lambda *_, **__: backend)
    counts = {}
    for saves_attention in (True, False):
        block = Attention()
        checkpoint_block(block, save_matmuls=saves_attention)
        with CountOps() as ops:
            block(torch.ones(2, 4, 2, 8, device="meta", requires_grad=True)).sum().backward()
        counts[saves_attention] = ops.names.count(name)
        assert ops.names.count("aten::exp") == 2
    assert counts == {True: 1, False: 2}
