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
    module: CausalLMModule, tp_styles: Mapping[str, TPStyle], forward_spec: ForwardSpec
) -> None:
    """Shard a module on the meta device in place, to that of one tensor-parallel rank."""
    column_parents = {
        name.rpartition(".")[0] for name, style in tp_styles.items() if style is TPStyle.column
    }
    for name, part in module.named_modules():
        pattern = name.replace("blocks.0", "blocks.*", 1)
        style = tp_styles.get(pattern)
        if pattern in column_parents or style is TPStyle.head:
            part.register_forward_pre_hook(_replicate_input, with_kwargs=True)
        if style in REPLICATED:
            part.register_forward_pre_hook(_view_input)
        if style in (TPStyle.row, TPStyle.vocabulary):
            part.register_forward_hook(_reduce_output)
        if style is TPStyle.head and not forward_spec.loss_parallel:
            part.register_forward_hook(partial(_gather_output, forward_spec.tensor_ranks))
        for key, parameter in part.named_parameters(recurse=False):
            weight = Weight(f"{pattern}.{key}", tuple(parameter.shape), "")
            shape = shard_weight(weight, tp_styles, forward_spec.tensor_ranks).shape
            empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
            part.register_parameter(key, nn.Parameter(empty, parameter.requires_grad))


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


def _replicate_input(module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
    if inputs:
        return (ReplicateToPartial.apply(inputs[0]), *inputs[1:]), kwargs  # type: ignore[no-untyped-call]  # torch's own
    first, *_ = kwargs
    return inputs, kwargs | {first: ReplicateToPartial.apply(kwargs[first])}  # type: ignore[no-untyped-call]  # torch's own


def _view_input(module: nn.Module, inputs: Any) -> Any:
    # Autograd sums the gradients of a view before other gradients of the same tensor.
    return inputs[0].view_as(inputs[0]), *inputs[1:]


def _reduce_output(layer: nn.Module, inputs: Any, partial_sum: Tensor) -> Tensor:
    return cast(Tensor, PartialToReplicate.apply(partial_sum))  # type: ignore[no-untyped-call]  # torch's own


def _gather_output(ranks: int, layer: nn.Module, inputs: Any, shard: Tensor) -> Tensor:
    return cast(Tensor, GatherFeatures.apply(shard, ranks))  # type: ignore[no-untyped-call]  # torch's own
