"""A sum over tokens in pieces of these, so that the logits of few exist at a time.

Shape suffixes: B sequences, T tokens, C tokens of a piece, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from scalewise.strategies.grad_norm import local_tensor

Piece = Callable[[Tensor, Tensor], Tensor]
"""Gives a piece's part of the sum, of ``x_BCW`` and ``labels_BC``."""


def chunked_loss_recomputed(
    chunk_loss: Piece, x_BTW: Tensor, labels_BT: Tensor, chunk_tokens: int
) -> Tensor:
    """Returns the sum; backward makes each piece once more, of at most ``chunk_tokens`` tokens."""
    sums: list[Tensor] = [
        checkpoint(chunk_loss, x_BCW, labels_BC, use_reentrant=False)
        for x_BCW, labels_BC in _chunks(x_BTW, labels_BT, chunk_tokens)
    ]
    return sum(sums[1:], sums[0])


def chunked_loss_with_gradients(
    chunk_loss: Piece,
    x_BTW: Tensor,
    labels_BT: Tensor,
    chunk_tokens: int,
    weights: Iterable[nn.Parameter],
) -> Tensor:
    """Returns the sum, a scalar; its gradients are taken on the way, while the logits are there.

    ``weights``: those that a piece reads. The order of Liger (Hsu et al., 2024, section 3.2):
    no piece is made twice, and the gradients of ``weights`` are held from here on.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    if not torch.is_grad_enabled() or not (trained or x_BTW.requires_grad):
        sums = [chunk_loss(*each) for each in _chunks(x_BTW, labels_BT, chunk_tokens)]
        return sum(sums[1:], sums[0])
    given = (chunk_loss, chunk_tokens, labels_BT, x_BTW, *trained)
    total: Tensor = ChunkedLossWithGradients.apply(*given)  # type: ignore[no-untyped-call]  # torch's own
    return total


class ChunkedLossWithGradients(torch.autograd.Function):
    """The sum of the pieces forward; backward only scales what forward has kept."""

    @staticmethod
    def forward(
        context: Any,
        chunk_loss: Piece,
        chunk_tokens: int,
        labels_BT: Tensor,
        x_BTW: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Returns the sum, and keeps its gradients in respect of ``x_BTW`` and ``weights``."""
        sums: list[Tensor] = []
        of_x: list[Tensor] = []
        of_weights: list[Tensor] = []
        for x_BCW, labels_BC in _chunks(x_BTW, labels_BT, chunk_tokens):
            with torch.enable_grad(), saved_tensors_hooks(_identity, _identity):
                leaf_BCW = x_BCW.detach().requires_grad_(x_BTW.requires_grad)
                part = chunk_loss(leaf_BCW, labels_BC)
                asked = (leaf_BCW,) * x_BTW.requires_grad + weights
                made = [*torch.autograd.grad(part, asked)]
            sums.append(part.detach())
            of_x += made[: x_BTW.requires_grad]
            del part, made[: x_BTW.requires_grad]
            for held in of_weights:
                held.add_(made.pop(0))
            of_weights = of_weights or made
            del made
        context.asks_x = x_BTW.requires_grad
        context.save_for_backward(*([torch.cat(of_x, 1)] if of_x else []), *of_weights)
        return sum(sums[1:], sums[0])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns what forward kept, times the gradient of the sum, in place: it is read once."""
        kept: tuple[Tensor, ...] = context.saved_tensors
        for held in kept:
            local_tensor(held).mul_(local_tensor(gradient))
        return None, None, None, *([] if context.asks_x else [None]), *kept


def _chunks(x_BTW: Tensor, labels_BT: Tensor, chunk_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pieces of all sequences, of at most ``chunk_tokens`` tokens but one of each."""
    each = max(1, chunk_tokens // x_BTW.shape[0])
    for at in range(0, labels_BT.shape[1], each):
        yield x_BTW[:, at : at + each], labels_BT[:, at : at + each]


def _identity(tensor: Tensor) -> Tensor:
    """Returns a tensor: what a piece keeps is read at once, and goes nowhere meanwhile."""
    return tensor
