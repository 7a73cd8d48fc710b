"""Expert parallelism: ranks store some of the routed experts, and exchange tokens by all-to-all.

Shape suffixes: E experts of all ranks, L experts of this rank, S ranks of the group, R rows of this
rank's tokens, P rows of this rank's experts, C capacity of an expert, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scalewise.compat.torch import has_no_values
from scalewise.compat.torch_distributed import all_to_all, fsdp_placements
from scalewise.models.decoder.expert_rows import permute_rows
from scalewise.models.decoder.moe import ExpertMatrices, RowMap, find_mixtures
from scalewise.strategies.tensor_parallel_experts import fsdp_shard_dim


def apply_expert_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the experts of each mixture over the ranks of ``mesh``, in place.

    FSDP averages the gradient of an expert over fewer ranks, each of which has computed it from the
    tokens of all expert ranks: its scale makes it the average over all ranks. Tensor parallelism
    has sharded its matrices over the experts too; each tensor rank exchanges rows with those that
    store the same features.
    """
    for mixture in find_mixtures(module):
        mixture.experts.exchange = ExpertExchange(mesh.get_group())
        for part in mixture.experts.modules():
            if isinstance(part, ExpertMatrices):
                part.gradient_scale = 1 / mesh.size()
                if isinstance(part.weight, DTensor):
                    continue
                weight = distribute_tensor(part.weight, mesh, [Shard(0)], src_data_rank=None)
                part.weight = nn.Parameter(weight, requires_grad=part.weight.requires_grad)


def expert_placement(module: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """``shard_placement_fn`` that shards experts over the ranks that store the same ones.

    Args:
        module: Model or pipeline stage.
        mesh: Mesh of the experts.
    """
    has_replicas = mesh["replicate"].size() > 1
    axes = ("replicate", "expert_shards") if has_replicas else ("expert_shards",)
    place = fsdp_placements(mesh[axes])
    experts = {id(it) for mixture in find_mixtures(module) for it in mixture.experts.parameters()}
    return lambda it: place(fsdp_shard_dim(it)) if id(it) in experts else None


class ExpertExchange:
    """All-to-all of rows to the ranks of their experts, and of the results back.

    Without capacity, the host waits for the number of rows of each rank, once per forward pass of a
    layer. With it, all experts of all ranks have the same number.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self, ends_E: Tensor, num_rows: int, capacity: int | None
    ) -> tuple[RowMap, Tensor, RowMap]:
        """Exchange the number of rows, unless it is known.

        Args:
            ends_E: Ends of the rows of each expert, sorted by expert.
            num_rows: Number of rows of this rank.
            capacity: Number of rows of each expert; None: it depends on the expert.

        Returns:
            Map of ``x_RW`` to the rows ``x_PW`` of this rank's experts, the ends of the rows of
            each, and the inverse map.
        """
        ranks = self.group.size()
        if capacity is None:
            counts_SL = ends_E.diff(prepend=ends_E.new_zeros(1)).unflatten(0, (ranks, -1))
            received_SL = torch.empty_like(counts_SL)
            dist.all_to_all_single(received_SL, counts_SL, group=self.group)
            sent, received = _row_counts(counts_SL, received_SL, num_rows)
            order_P, inverse_P = _order_by_expert(received_SL, sum(received))
            ends_L = received_SL.sum(0).cumsum(0, dtype=torch.int32)
        else:
            sent = received = [num_rows // ranks] * ranks
            rows_SLC = torch.arange(num_rows, device=ends_E.device).view(ranks, -1, capacity)
            order_P = rows_SLC.transpose(0, 1).flatten()
            inverse_P = rows_SLC.view(-1, ranks, capacity).transpose(0, 1).flatten()
            ends_L = ends_E[: num_rows // ranks // capacity] * ranks

        # Each name is bound again: its tensor is freed after its last use.
        def send(x: Tensor) -> Tensor:
            x = all_to_all(x, received, sent, self.group)
            return permute_rows(x, order_P, inverse_P)

        def receive(y: Tensor) -> Tensor:
            y = permute_rows(y, inverse_P, order_P)
            return cast(Tensor, all_to_all(y, sent, received, self.group))

        return send, ends_L, receive


def _row_counts(sent_SL: Tensor, received_SL: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Number of rows that this rank sends to each rank, and receives from each.

    Of fake tensors, those of a balanced load.
    """
    if has_no_values(sent_SL):
        ranks = len(sent_SL)
        size, rest = divmod(num_rows, ranks)
        return [size + (rank < rest) for rank in range(ranks)], [size] * ranks
    sent, received = torch.stack([sent_SL.sum(1), received_SL.sum(1)]).tolist()
    return sent, received


def _order_by_expert(received_SL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Order of received rows by expert, and its inverse; they arrive sorted by rank and expert."""
    ranks, experts = received_SL.shape
    expert_SL = torch.arange(experts, device=received_SL.device).repeat(ranks)
    expert_P = expert_SL.repeat_interleave(received_SL.flatten(), output_size=num_rows)
    order_P = expert_P.argsort(stable=True)
    rows_P = torch.arange(num_rows, device=order_P.device)
    return order_P, torch.empty_like(order_P).scatter_(0, order_P, rows_P)
