"""Differentiable maps between rows of tokens and rows of experts, without atomic additions.

Shape suffixes: N tokens, K experts of a token, R rows sorted by expert, A = N K assignments, W
width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def sort_by_expert(
    x_NW: Tensor, order_R: Tensor, inverse_NK: Tensor, *, is_limited: bool
) -> Tensor:
    """Rows of tokens in the order of experts: ``x_NW -> x_RW``.

    ``is_limited``: whether assignments are dropped, whose row in ``inverse_NK`` is -1.
    """
    return _apply(_SortByExpert, x_NW, order_R, inverse_NK, is_limited)


def sum_by_token(y_RW: Tensor, order_R: Tensor, inverse_NK: Tensor, *, is_limited: bool) -> Tensor:
    """Sum of the rows of each token: ``y_RW -> y_NW``, the transpose of ``sort_by_expert``."""
    return _apply(_SumByToken, y_RW, order_R, inverse_NK, is_limited)


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Identity whose backward multiplies the gradient by ``scale``."""
    return _apply(_ScaleGradient, x, scale)


def add_gradient(x: Tensor, loss: Tensor) -> Tensor:
    """Identity of ``x`` whose backward also starts the backward pass of a scalar ``loss``.

    The gradient of the loss needs no value of it, so that it works in pipeline stages and in
    recomputed blocks; ``loss`` contains all factors.
    """
    return _apply(_AddGradient, x, loss)


def permute_rows(x_RW: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows ``order_R`` of ``x_RW``; ``inverse_R``: the inverse permutation."""
    return _apply(_PermuteRows, x_RW, order_R, inverse_R)


def _apply(function: type[torch.autograd.Function], *arguments: Tensor | float) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


class _SortByExpert(torch.autograd.Function):
    """See ``sort_by_expert``."""

    @staticmethod
    def forward(
        ctx: Any, x_NW: Tensor, order_R: Tensor, inverse_NK: Tensor, is_limited: bool
    ) -> Tensor:
        ctx.save_for_backward(inverse_NK)
        ctx.is_limited = is_limited
        return _gather_rows(x_NW, order_R, inverse_NK)

    @staticmethod
    def backward(ctx: Any, grad_RW: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_NK,) = ctx.saved_tensors
        return _sum_rows(grad_RW, inverse_NK, is_limited=ctx.is_limited), None, None, None


class _PermuteRows(torch.autograd.Function):
    """Rows in another order, without atomic additions in backward."""

    @staticmethod
    def forward(ctx: Any, x_RW: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RW.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RW: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return grad_RW.index_select(0, inverse_R), None, None


class _SumByToken(torch.autograd.Function):
    """See ``sum_by_token``."""

    @staticmethod
    def forward(
        ctx: Any, y_RW: Tensor, order_R: Tensor, inverse_NK: Tensor, is_limited: bool
    ) -> Tensor:
        ctx.save_for_backward(order_R, inverse_NK)
        return _sum_rows(y_RW, inverse_NK, is_limited=is_limited)

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather_rows(grad_NW, *ctx.saved_tensors), None, None, None


def _gather_rows(x_NW: Tensor, order_R: Tensor, inverse_NK: Tensor) -> Tensor:
    return x_NW.index_select(0, order_R // inverse_NK.shape[1])


def _sum_rows(y_RW: Tensor, inverse_NK: Tensor, *, is_limited: bool) -> Tensor:
    rows_A = inverse_NK.flatten()
    rows_A = rows_A.clamp(min=0) if is_limited else rows_A
    y_NKW = y_RW.index_select(0, rows_A).view(*inverse_NK.shape, -1)
    if is_limited:
        y_NKW.masked_fill_((inverse_NK < 0)[..., None], 0)
    return y_NKW.sum(1, dtype=y_RW.dtype)  # autocast on CUDA would return fp32


class _ScaleGradient(torch.autograd.Function):
    """See ``scale_gradient``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class _AddGradient(torch.autograd.Function):
    """See ``add_gradient``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)
