"""Tensor parallelism of mixtures of experts: each rank routes all tokens to a part of each expert.

The hidden features of each expert are sharded, as in an ordinary feedforward: outputs, gradients of
the input and gradients of the router are partial sums over the ranks. Losses of the router alone
are equal on all ranks, so that each adds its share.

Shape suffixes: B batch, T tokens of a sequence, W width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from scalewise.checkpoints.strided_shards import has_strided_rows
from scalewise.compat.torch_distributed import strided_shard
from scalewise.models.base import TPStyle
from scalewise.models.decoder.moe import ExpertMatrices, MixtureOfExperts, TokenExchange


class GatheredExperts(ParallelStyle):
    """Style of a mixture: all tokens in, one sum over the ranks of routed and shared experts out.

    ``residual_placement``: placement of ``x_BTW`` before and after the mixture.
    """

    def __init__(self, residual_placement: Placement) -> None:
        super().__init__()
        self._residual_placement = residual_placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MixtureOfExperts)
        module.tokens = GatheredTokens(device_mesh, self._residual_placement)
        module.router_loss_scale = 1 / device_mesh.size()
        return module


class GatheredTokens(TokenExchange):
    """All-gather of the tokens of a mixture, and reduce-scatter of the sums of its output."""

    def __init__(self, mesh: DeviceMesh, residual_placement: Placement) -> None:
        self._mesh, self._placement = mesh, residual_placement

    def gather(self, x_BTW: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of all ranks, as a local tensor with partial gradients and as a DTensor."""
        sharded = DTensor.from_local(x_BTW, self._mesh, [self._placement], run_check=False)
        gathered = sharded.redistribute(placements=[Replicate()])
        return gathered.to_local(grad_placements=[Partial()]), gathered

    def add_shared(self, y_BTW: Tensor, shared_BTW: Tensor) -> Tensor:
        """Sum of this rank's terms of the outputs of routed and of shared experts."""
        assert isinstance(shared_BTW, DTensor)
        local: Tensor = shared_BTW.to_local(grad_placements=[Replicate()])
        return y_BTW + local

    def reduce(self, y_BTW: Tensor) -> Tensor:
        """Sum over ranks, of which this rank keeps its tokens."""
        terms = DTensor.from_local(y_BTW, self._mesh, [Partial()], run_check=False)
        reduced: Tensor = terms.redistribute(placements=[self._placement]).to_local()
        return reduced


class ReplicatedRouter(ParallelStyle):
    """Style of a router that reads all tokens on each rank; its gradients are partial sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())

        def forward(x_BTW: Tensor) -> Tensor:
            weight: Any = module.weight
            return F.linear(x_BTW, weight.to_local(grad_placements=[Partial()]))

        module.forward = forward
        return module


class PartialSumLinear(ParallelStyle):
    """Style of a replicated linear layer of a partial sum; output and gradient are partial too."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())

        def forward(x_BTW: Tensor) -> Tensor:
            assert isinstance(x_BTW, DTensor)
            # All ranks have the same gradient of a sum.
            local_BTW = x_BTW.to_local(grad_placements=[Replicate()])
            weight: Any = module.weight
            y_BTW = F.linear(local_BTW, weight.to_local(grad_placements=[Partial()]))
            return DTensor.from_local(y_BTW, device_mesh, [Partial()], run_check=False)

        module.forward = forward
        return module


class ShardedExperts(ParallelStyle):
    """Style of stacked matrices, each sharded by its rows or by its columns, or replicated.

    The gradients of replicated ones are partial sums.

    Args:
        style: One of ``styles``.
        expert_mesh: Mesh with the axes ``expert``, whose ranks store some of the matrices, and
            ``tensor``; None: each rank has a part of all matrices.
    """

    styles = (TPStyle.expert_column, TPStyle.expert_row, TPStyle.expert_replicated)

    def __init__(self, style: TPStyle, expert_mesh: DeviceMesh | None) -> None:
        super().__init__()
        self._style, self._expert_mesh = style, expert_mesh

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, ExpertMatrices)
        mesh, outer, num_experts = device_mesh, list[Placement](), module.num_experts
        if self._expert_mesh is not None:
            mesh, outer = self._expert_mesh, [Shard(0)]
            num_experts //= mesh["expert"].size()
        placement: Placement = Shard(1)
        if self._style is TPStyle.expert_column:
            placement = strided_shard(0, num_experts)
            module.out_features //= device_mesh.size()
        elif self._style is TPStyle.expert_replicated:
            placement = Replicate()
            module.grad_placements = [*outer, Partial()]
        _distribute(module, mesh, *outer, placement)
        return module


def fsdp_shard_dim(parameter: nn.Parameter) -> Shard | None:
    """Dimension that FSDP shards: columns, if tensor parallelism shards rows of each expert.

    The ranges of rows of two strided axes would be no placement of DTensor. None: rows.
    """
    return Shard(1) if has_strided_rows(parameter) else None


def _distribute(module: Any, mesh: DeviceMesh, *placements: Placement) -> None:
    weight = distribute_tensor(module.weight, mesh, placements, src_data_rank=None)
    module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
