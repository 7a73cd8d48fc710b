"""Loss summed over chunks of tokens, so that only the logits of one chunk exist at a time.

Shape suffixes: B sequences, T tokens, C tokens of a chunk, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from scalewise.models.init import local_tensor

ChunkLoss = Callable[[Tensor, Tensor], Tensor]
"""Loss sum of one chunk, from ``x_BCW`` and ``labels_BC``."""


def chunked_loss_recomputed(
    chunk_loss: ChunkLoss, x_BTW: Tensor, labels_BT: Tensor, chunk_tokens: int
) -> Tensor:
    """Loss sum over chunks; the backward pass recomputes the logits of each chunk.

    ``chunk_tokens``: largest number of tokens of a chunk.
    """
    sums: list[Tensor] = [
        checkpoint(chunk_loss, x_BCW, labels_BC, use_reentrant=False)
        for x_BCW, labels_BC in _chunks(x_BTW, labels_BT, chunk_tokens)
    ]
    return sum(sums[1:], sums[0])


def chunked_loss_with_gradients(
    chunk_loss: ChunkLoss,
    x_BTW: Tensor,
    labels_BT: Tensor,
    chunk_tokens: int,
    weights: Iterable[nn.Parameter],
) -> Tensor:
    """Loss sum over chunks, a scalar; gradients are computed in the forward pass.

    ``weights``: parameters that ``chunk_loss`` reads. As in Liger (Hsu et al., 2024, section 3.2),
    no logits are recomputed, and the gradients of ``weights`` are stored from the forward pass on.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    if not torch.is_grad_enabled() or not (trained or x_BTW.requires_grad):
        sums = [chunk_loss(*chunk) for chunk in _chunks(x_BTW, labels_BT, chunk_tokens)]
        return sum(sums[1:], sums[0])
    arguments = (chunk_loss, chunk_tokens, labels_BT, x_BTW, *trained)
    total: Tensor = ChunkedLossWithGradients.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
    return total


class ChunkedLossWithGradients(torch.autograd.Function):
    """Autograd function: forward computes the gradients, backward scales them."""

    @staticmethod
    def forward(
        context: Any,
        chunk_loss: ChunkLoss,
        chunk_tokens: int,
        labels_BT: Tensor,
        x_BTW: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Loss sum; saves the gradients of ``x_BTW`` and ``weights``."""
        sums: list[Tensor] = []
        x_gradients: list[Tensor] = []
        weight_gradients: list[Tensor] = []
        for x_BCW, labels_BC in _chunks(x_BTW, labels_BT, chunk_tokens):
            with torch.enable_grad(), saved_tensors_hooks(_identity, _identity):
                leaf_BCW = x_BCW.detach().requires_grad_(x_BTW.requires_grad)
                chunk_sum = chunk_loss(leaf_BCW, labels_BC)
                grad_inputs = (leaf_BCW,) * x_BTW.requires_grad + weights
                gradients = [*torch.autograd.grad(chunk_sum, grad_inputs)]
            sums.append(chunk_sum.detach())
            x_gradients += gradients[: x_BTW.requires_grad]
            del chunk_sum, gradients[: x_BTW.requires_grad]
            for accumulated in weight_gradients:
                accumulated.add_(gradients.pop(0))
            weight_gradients = weight_gradients or gradients
            del gradients
        context.x_requires_grad = x_BTW.requires_grad
        context.save_for_backward(
            *([torch.cat(x_gradients, 1)] if x_gradients else []), *weight_gradients
        )
        return sum(sums[1:], sums[0])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Saved gradients times the gradient of the sum.

        They are scaled in place: the backward pass reads them once.
        """
        gradients: tuple[Tensor, ...] = context.saved_tensors
        for saved in gradients:
            local_tensor(saved).mul_(local_tensor(gradient))
        return None, None, None, *([] if context.x_requires_grad else [None]), *gradients


def _chunks(x_BTW: Tensor, labels_BT: Tensor, chunk_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of all sequences, with at most ``chunk_tokens`` tokens in total.

    A chunk has at least one token per sequence.
    """
    tokens_per_sequence = max(1, chunk_tokens // x_BTW.shape[0])
    for start in range(0, labels_BT.shape[1], tokens_per_sequence):
        yield (
            x_BTW[:, start : start + tokens_per_sequence],
            labels_BT[:, start : start + tokens_per_sequence],
        )


def _identity(tensor: Tensor) -> Tensor:
    """Saved-tensor hook that keeps a tensor as it is: it is read at once."""
    return tensor
