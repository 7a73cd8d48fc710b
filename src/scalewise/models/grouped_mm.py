"""Matmul of rows grouped by expert, with one matrix per group.

Shape suffixes: R rows, sorted by expert; E experts; I input features; O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_mm(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Product of the rows of each expert with its matrix, as ``F.linear``: ``y_RO``.

    On CUDA in bf16 it is ``torch.nn.functional.grouped_mm``, one kernel without synchronization
    that requires rows of 16 bytes; otherwise a loop over experts.

    Args:
        x_RI: Rows; those from ``ends_E[e - 1]`` to ``ends_E[e]`` belong to expert e.
        weight_EOI: Matrices, in the dtype of the rows.
        ends_E: Ends of the groups, in int32.
    """
    is_aligned = all(size % 8 == 0 for size in weight_EOI.shape[1:])
    if x_RI.is_cuda and x_RI.dtype is torch.bfloat16 and is_aligned:
        return F.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)
    y_RO: Tensor = _grouped_mm(x_RI, weight_EOI, ends_E)
    return y_RO


@torch.library.custom_op("scalewise::grouped_mm", mutates_args=())
def _grouped_mm(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    y_RO = x_RI.new_empty(len(x_RI), weight_EOI.shape[1])
    start = 0
    for weight_OI, end in zip(weight_EOI.unbind(), ends_E.tolist(), strict=True):
        torch.mm(x_RI[start:end], weight_OI.t(), out=y_RO[start:end])
        start = end
    return y_RO


@torch.library.custom_op("scalewise::grouped_weight_gradient", mutates_args=())
def _grouped_weight_gradient(grad_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    gradient_EOI = x_RI.new_empty(len(ends_E), grad_RO.shape[1], x_RI.shape[1])
    start = 0
    for gradient_OI, end in zip(gradient_EOI.unbind(), ends_E.tolist(), strict=True):
        torch.mm(grad_RO[start:end].t(), x_RI[start:end], out=gradient_OI)
        start = end
    return gradient_EOI


@_grouped_mm.register_fake
def _(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty(len(x_RI), weight_EOI.shape[1])


@_grouped_weight_gradient.register_fake
def _(grad_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty(len(ends_E), grad_RO.shape[1], x_RI.shape[1])


def _save_operands(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x_RI, weight_EOI, ends_E = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x_RI if needs_weight else None, weight_EOI if needs_x else None, ends_E)


def _backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_RI, weight_EOI, ends_E = ctx.saved_tensors
    grad_RO = grad_RO.contiguous()
    weight_gradient = input_gradient = None
    if x_RI is not None:
        weight_gradient = _grouped_weight_gradient(grad_RO, x_RI, ends_E)
    if weight_EOI is not None:
        input_gradient = _grouped_mm(grad_RO, weight_EOI.transpose(1, 2), ends_E)
    return input_gradient, weight_gradient, None


_grouped_mm.register_autograd(_backward, setup_context=_save_operands)
