"""Experts of Hugging Face models, computed by one grouped matmul per matrix.

The grouped matmul of torch runs on fake tensors in bf16 only, so that no plan could measure it.

Shape suffixes: N tokens; K experts of a token; R = N x K rows, sorted by expert; E experts; W
width; I input features; O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from scalewise.compat.hugging_face import apply_expert_gate
from scalewise.models.autocast import compute_dtype
from scalewise.models.decoder.expert_rows import permute_rows
from scalewise.models.grouped_mm import grouped_mm

IMPLEMENTATION = "scalewise"
"""Name of ``run_experts`` among the ``experts_implementation`` of transformers."""


def run_experts(module: nn.Module, x_NW: Tensor, expert_NK: Tensor, score_NK: Tensor) -> Tensor:
    """Return the sum over the experts of each token, weighted by ``score_NK``: ``y_NW``.

    Args:
        module: Experts, a class that transformers decorates with ``use_experts_implementation``.
        x_NW: Input features.
        expert_NK: Indices of the experts of each token.
        score_NK: Their weights.
    """
    experts: Any = module
    count = expert_NK.shape[-1]
    expert_R, order_R = expert_NK.flatten().sort(stable=True)
    inverse_R = torch.empty_like(order_R).scatter_(
        0, order_R, torch.arange(len(order_R), device=order_R.device)
    )
    numbers_E = torch.arange(experts.num_experts, device=expert_R.device)
    ends_E = torch.searchsorted(expert_R, numbers_E, right=True).int()
    x_RW = permute_rows(x_NW.repeat_interleave(count, dim=0), order_R, inverse_R)
    if experts.has_gate:
        hidden_RO = _linear(experts, "gate_up_proj", x_RW, expert_R, ends_E)
        hidden_RO = apply_expert_gate(experts, hidden_RO)
    else:
        hidden_RO = experts.act_fn(_linear(experts, "up_proj", x_RW, expert_R, ends_E))
    y_RW = _linear(experts, "down_proj", hidden_RO, expert_R, ends_E)
    if experts.has_post_expert_norm:
        y_RW = experts.post_expert_norm(y_RW)
    y_NKW: Tensor = permute_rows(y_RW, inverse_R, order_R).unflatten(0, (-1, count))
    return (y_NKW * score_NK[..., None]).sum(dim=1).to(x_NW.dtype)


def _linear(experts: Any, name: str, x_RI: Tensor, expert_R: Tensor, ends_E: Tensor) -> Tensor:
    """Return the product of each row with the matrix of its expert, in the dtype of autocast."""
    x_RI, weight = x_RI.to(compute_dtype(x_RI)), getattr(experts, name)
    weight_EOI = (weight.transpose(1, 2) if experts.is_transposed else weight).to(x_RI.dtype)
    y_RO = grouped_mm(x_RI, weight_EOI, ends_E)
    return y_RO + getattr(experts, f"{name}_bias")[expert_R] if experts.has_bias else y_RO


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
