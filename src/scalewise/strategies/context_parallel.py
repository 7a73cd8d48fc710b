"""Context parallelism: ranks share the tokens of each row out, and attention reaches across.

Shape suffixes: B rows, T tokens of a rank, S of a row, N context ranks, H query heads, K key heads,
D features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from scalewise.parallelism.mesh import ContextAttention

_NEW_NAME = "all_gather_single_autograd"  # since torch 2.13, which warns of the old one
gather: Any = getattr(collectives, _NEW_NAME, None) or collectives.all_gather_tensor_autograd

Batch = dict[str, Tensor]


class SequenceSharding:
    """Which tokens of a row each rank holds.

    ``balanced``: a row is cut into 2N pieces, of which rank r holds r and 2N - 1 - r, so that
    causal attention costs every rank the same; else into N.
    """

    def __init__(self, mesh: DeviceMesh, sequence: int, *, balanced: bool) -> None:
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        self.group = mesh.get_group()
        pieces = (2 if balanced else 1) * self.ranks
        self.chunk_tokens = sequence // pieces
        held = [[rank, pieces - 1 - rank] if balanced else [rank] for rank in range(self.ranks)]
        self.chunk_indices = held[self.rank]
        places = torch.arange(sequence, device="cpu").view(pieces, self.chunk_tokens)
        self.order_T = torch.cat([places[pieces_of_rank].flatten() for pieces_of_rank in held])
        """Places in the row of all ranks' tokens, rank after rank."""
        self.places_T = places[self.chunk_indices].flatten()
        """Places in the row of this rank's tokens."""
        self.inverse_T = torch.argsort(self.order_T)

    def shard_batch(self, batch: Batch) -> Batch:
        """Returns the tokens and labels of this rank; the places of packed rows stay whole."""
        return {
            name: x[:, self.places_T.to(x.device)] if name in ("inputs", "labels") else x
            for name, x in batch.items()
        }


def build_attention(
    kind: ContextAttention, sharding: SequenceSharding, dropout: float
) -> nn.Module:
    """Returns the attention that takes the place of ``CausalMix``."""
    kinds = {
        ContextAttention.ulysses: UlyssesAttention,
        ContextAttention.gather: AllGatherAttention,
    }
    return kinds[kind](sharding, dropout)


class UlyssesAttention(nn.Module):
    """Whole rows of some heads on each rank, by all-to-all there and back (DeepSpeed-Ulysses)."""

    def __init__(self, sharding: SequenceSharding, dropout: float) -> None:
        super().__init__()
        self.sharding, self.dropout = sharding, dropout

    def forward(
        self, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, mask_B1SS: Tensor | None
    ) -> Tensor:
        """Returns ``mixed_BTHD`` of this rank's tokens."""
        split = self.sharding
        heads, keys = query_BTHD.shape[2], key_BTKD.shape[2]
        if keys % split.ranks:  # too few to share out: each query head brings its own
            key_BTKD, value_BTKD = (
                x.repeat_interleave(heads // keys, dim=2) for x in (key_BTKD, value_BTKD)
            )
        inverse = split.inverse_T.to(query_BTHD.device)
        query, key, value = (
            all_to_all_dims(x, 2, 1, split.group)[:, inverse]
            for x in (query_BTHD, key_BTKD, value_BTKD)
        )
        mixed_BHTD = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask_B1SS,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask_B1SS is None,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        ordered = mixed_BHTD.transpose(1, 2)[:, split.order_T.to(query_BTHD.device)]
        return all_to_all_dims(ordered, 1, 2, split.group)


class AllGatherAttention(nn.Module):
    """All keys and values on each rank, for its own queries (Llama 3, section 3.3.2)."""

    def __init__(self, sharding: SequenceSharding, dropout: float) -> None:
        super().__init__()
        self.sharding, self.dropout = sharding, dropout

    def forward(
        self, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, mask_B1SS: Tensor | None
    ) -> Tensor:
        """Returns ``mixed_BTHD`` of this rank's tokens, a piece at a time against what it sees."""
        split = self.sharding
        both = torch.stack((key_BTKD, value_BTKD))
        both = gather(both, 2, split.group)
        both = both[:, :, split.inverse_T.to(both.device)]
        mixed = []
        for number, query in enumerate(torch.split(query_BTHD, split.chunk_tokens, dim=1)):
            first = split.chunk_indices[number] * split.chunk_tokens
            key, value = both[:, :, : first + split.chunk_tokens].unbind(0)
            if mask_B1SS is None:
                rows = torch.arange(split.chunk_tokens, device=query.device)[:, None] + first
                seen = (
                    torch.arange(first + split.chunk_tokens, device=query.device)[None, :] <= rows
                )
            else:
                seen = mask_B1SS[
                    :, :, first : first + split.chunk_tokens, : first + split.chunk_tokens
                ]
            mixed_BHTD = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=seen,
                dropout_p=self.dropout if self.training else 0.0,
                enable_gqa=query.shape[2] != key.shape[2],
            )
            mixed.append(mixed_BHTD.transpose(1, 2))
        return torch.cat(mixed, dim=1)


def all_to_all_dims(x: Tensor, split_dim: int, concat_dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns ``x`` with dim ``split_dim`` shared out over the ranks and dim ``concat_dim`` whole
    again."""
    ranks = group.size()
    sent = torch.stack(x.chunk(ranks, split_dim)).flatten(0, 1)
    received = collectives.all_to_all_single_autograd(sent, None, None, group)
    return torch.cat(received.chunk(ranks), concat_dim)
