"""What tensor parallelism leaves a rank of a model, with no other rank there: what plans run.

It follows ``layouts/tensor.py``, by the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from scalewise.models.base import TPStyle, Weight
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.op_graph import ForwardSpec
from scalewise.parallelism import rank_partition

messages = torch.ops._c10d_functional
NOBODY = ""
"""The ranks that a message goes to: where tensors have no memory none is sent."""
WHOLE = (TPStyle.tokens, TPStyle.positions, TPStyle.replicated, TPStyle.prompt)
"""What every rank computes the same, by itself."""


def shard_for_rank(
    module: CausalLMModule, tp_styles: Mapping[str, TPStyle], forward_spec: ForwardSpec
) -> None:
    """Leaves a module on the meta device the part of one tensor rank, in place."""
    joins = {name.rpartition(".")[0] for name, how in tp_styles.items() if how is TPStyle.column}
    for name, part in module.named_modules():
        pattern = name.replace("blocks.0", "blocks.*", 1)
        how = tp_styles.get(pattern)
        if pattern in joins or how is TPStyle.head:
            part.register_forward_pre_hook(_joined_input, with_kwargs=True)
        if how in WHOLE:
            part.register_forward_pre_hook(_given_input)
        if how in (TPStyle.row, TPStyle.vocabulary):
            part.register_forward_hook(_summed_output)
        if how is TPStyle.head and not forward_spec.loss_parallel:
            part.register_forward_hook(partial(_gathered_output, forward_spec.tensor_ranks))
        for key, parameter in part.named_parameters(recurse=False):
            weight = Weight(f"{pattern}.{key}", tuple(parameter.shape), "")
            left = rank_partition.shard_weight(weight, tp_styles, forward_spec.tensor_ranks).shape
            empty = torch.empty(left, dtype=parameter.dtype, device="meta")
            part.register_parameter(key, nn.Parameter(empty, parameter.requires_grad))


class ReplicateToPartial(torch.autograd.Function):
    """What every rank has whole, whose gradients are sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns the same."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Returns a sum."""
        return _reduce(gradients[0])


class PartialToReplicate(torch.autograd.Function):
    """What is a sum over ranks, whose gradients every rank has whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns a sum."""
        return _reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Returns the same."""
        return gradients[0]


class GatherFeatures(torch.autograd.Function):
    """Features of which each rank has some, made whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        """Returns all features."""
        ctx.features = x.shape[-1]
        pieces = messages.all_gather_into_tensor(x, ranks, NOBODY).chunk(ranks)
        return torch.cat(pieces, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Returns a rank's own."""
        return gradients[0][..., : ctx.features].clone(), None


def _reduce(x: Tensor) -> Tensor:
    summed: Tensor = messages.all_reduce(x, "sum", NOBODY)
    return summed


def _joined_input(module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
    if inputs:
        return (ReplicateToPartial.apply(inputs[0]), *inputs[1:]), kwargs  # type: ignore[no-untyped-call]  # torch's own
    first, *_ = kwargs
    return inputs, kwargs | {first: ReplicateToPartial.apply(kwargs[first])}  # type: ignore[no-untyped-call]  # torch's own


def _given_input(module: nn.Module, inputs: Any) -> Any:
    # Of a view of its own, gradients are added up before others of the same tensor.
    return inputs[0].view_as(inputs[0]), *inputs[1:]


def _summed_output(layer: nn.Module, inputs: Any, partial_sum: Tensor) -> Tensor:
    return cast(Tensor, PartialToReplicate.apply(partial_sum))  # type: ignore[no-untyped-call]  # torch's own


def _gathered_output(ranks: int, layer: nn.Module, inputs: Any, shard: Tensor) -> Tensor:
    return cast(Tensor, GatherFeatures.apply(shard, ranks))  # type: ignore[no-untyped-call]  # torch's own
