"""Module of one tensor-parallel rank without the other ranks, for runs with fake tensors.

The sharding is that of ``strategies/tensor_parallel.py``, from the same table of styles.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from scalewise.compat.torch_distributed import functional_collectives
from scalewise.models.base import TPStyle, Weight, shard_weight
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.op_graph import ForwardSpec

NO_GROUP = ""
"""Name of the process group; fake tensors need none."""
REPLICATED = (TPStyle.tokens, TPStyle.positions, TPStyle.replicated, TPStyle.prompt)
"""Styles of modules that every rank computes in full."""


def shard_for_rank(
    module: CausalLMModule,
    tp_styles: Mapping[str, TPStyle],
    forward_spec: ForwardSpec,
    *,
    chunks_loss: bool,
) -> None:
    """Shard a module on the meta device in place, to that of one tensor-parallel rank.

    ``chunks_loss``: whether the head reads chunks of the tokens of all ranks.
    """
    column_parents = {
        name.rpartition(".")[0] for name, style in tp_styles.items() if style is TPStyle.column
    }
    ranks = forward_spec.tensor_ranks if forward_spec.sequence_parallel else 1
    if ranks > 1 and chunks_loss:
        module.gather_tokens = lambda x_BTW: GatherReplicated.apply(x_BTW, ranks)  # type: ignore[no-untyped-call]  # torch's own
    for name, part in module.named_modules():
        pattern = name.replace("blocks.0", "blocks.*", 1)
        style = tp_styles.get(pattern)
        if pattern in column_parents or style is TPStyle.head:
            input_ranks = 1 if style is TPStyle.head and chunks_loss else ranks
            part.register_forward_pre_hook(partial(_replicate_input, input_ranks), with_kwargs=True)
        if style in REPLICATED:
            part.register_forward_pre_hook(_view_input)
        if style is TPStyle.vocabulary:
            part.register_forward_hook(partial(_reduce_output, 1))
        if style is TPStyle.row:
            part.register_forward_hook(partial(_reduce_output, ranks))
        if style is TPStyle.head and not forward_spec.loss_parallel:
            part.register_forward_hook(partial(_gather_output, forward_spec.tensor_ranks))
        for key, parameter in part.named_parameters(recurse=False):
            weight = Weight(f"{pattern}.{key}", tuple(parameter.shape), "")
            shape = shard_weight(weight, tp_styles, forward_spec.tensor_ranks).shape
            empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
            part.register_parameter(key, nn.Parameter(empty, parameter.requires_grad))


def shard_tokens(ranks: int, block: nn.Module, inputs: Any) -> Any:
    """Forward pre-hook of the first block: this rank's tokens of the embeddings of all tokens."""
    return SliceTokens.apply(inputs[0], ranks), *inputs[1:]  # type: ignore[no-untyped-call]  # torch's own


class SliceTokens(torch.autograd.Function):
    """Tokens of this rank; backward all-gathers their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        """Return a copy of the tokens of one rank."""
        ctx.ranks = ranks
        return x.chunk(ranks, dim=1)[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all tokens."""
        return _gather_tokens(gradients[0], ctx.ranks), None


class GatherTokens(torch.autograd.Function):
    """All-gather of tokens; backward reduce-scatters their partial gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        """Return the tokens of all ranks."""
        ctx.ranks = ranks
        return _gather_tokens(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the summed gradients of this rank's tokens."""
        return _scatter_tokens(gradients[0], ctx.ranks), None


class GatherReplicated(torch.autograd.Function):
    """All-gather of tokens with equal gradients on all ranks; backward takes a part of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        """Return the tokens of all ranks."""
        ctx.ranks = ranks
        return _gather_tokens(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of this rank's tokens."""
        return gradients[0].chunk(ctx.ranks, dim=1)[0].clone(), None


class ScatterTokens(torch.autograd.Function):
    """Reduce-scatter of partial sums by tokens; backward all-gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        """Return the sums of this rank's tokens."""
        ctx.ranks = ranks
        return _scatter_tokens(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all tokens."""
        return _gather_tokens(gradients[0], ctx.ranks), None


class ReplicateToPartial(torch.autograd.Function):
    """Identity of a replicated tensor; backward all-reduces its partial gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the all-reduced gradient."""
        return _reduce(gradients[0])


class PartialToReplicate(torch.autograd.Function):
    """All-reduce of partial sums; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the all-reduced tensor."""
        return _reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient."""
        return gradients[0]


class GatherFeatures(torch.autograd.Function):
    """All-gather of features; backward takes this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        """Return the features of all ranks."""
        ctx.features = x.shape[-1]
        gathered = functional_collectives.all_gather_into_tensor(x, ranks, NO_GROUP)
        return torch.cat(gathered.chunk(ranks), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's features."""
        return gradients[0][..., : ctx.features].clone(), None


def _reduce(x: Tensor) -> Tensor:
    summed: Tensor = functional_collectives.all_reduce(x, "sum", NO_GROUP)
    return summed


def _gather_tokens(x: Tensor, ranks: int) -> Tensor:
    gathered = functional_collectives.all_gather_into_tensor(x, ranks, NO_GROUP)
    return torch.cat(gathered.chunk(ranks), dim=1)


def _scatter_tokens(x: Tensor, ranks: int) -> Tensor:
    chunks = torch.cat(x.chunk(ranks, dim=1))
    summed: Tensor = functional_collectives.reduce_scatter_tensor(chunks, "sum", ranks, NO_GROUP)
    return summed


def _replicate_input(ranks: int, module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
    """Inputs with the first one on every rank; ``ranks``: those that shard its tokens."""

    def replicate(x: Tensor) -> Any:
        if ranks > 1:
            return GatherTokens.apply(x, ranks)  # type: ignore[no-untyped-call]  # torch's own
        return ReplicateToPartial.apply(x)  # type: ignore[no-untyped-call]  # torch's own

    if inputs:
        return (replicate(inputs[0]), *inputs[1:]), kwargs
    first, *_ = kwargs
    return inputs, kwargs | {first: replicate(kwargs[first])}


def _view_input(module: nn.Module, inputs: Any) -> Any:
    # Autograd sums the gradients of a view before other gradients of the same tensor.
    return inputs[0].view_as(inputs[0]), *inputs[1:]


def _reduce_output(ranks: int, layer: nn.Module, inputs: Any, partial_sum: Tensor) -> Tensor:
    """Sum of partial sums over all ranks; ``ranks``: those that shard its tokens."""
    if ranks > 1:
        return cast(Tensor, ScatterTokens.apply(partial_sum, ranks))  # type: ignore[no-untyped-call]  # torch's own
    return cast(Tensor, PartialToReplicate.apply(partial_sum))  # type: ignore[no-untyped-call]  # torch's own


def _gather_output(ranks: int, layer: nn.Module, inputs: Any, shard: Tensor) -> Tensor:
    return cast(Tensor, GatherFeatures.apply(shard, ranks))  # type: ignore[no-untyped-call]  # torch's own
