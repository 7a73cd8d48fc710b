"""Context parallelism: ranks share the tokens of each sequence; attention communicates.

Shape suffixes: B sequences, T tokens of a rank, S tokens of a sequence, N context ranks, H query
heads, K key heads, D features.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from scalewise.compat.torch_distributed import all_gather, all_to_all
from scalewise.models.attention_backends import attend
from scalewise.models.attention_segments import AttentionSegments, equal_segments
from scalewise.parallelism.mesh import ContextAttention

Batch = dict[str, Tensor]


class SequenceOrder(NamedTuple):
    """Order of the tokens of sequences of one length over context ranks."""

    chunk_tokens: int
    """Tokens of a chunk."""
    order: Tensor
    """Positions in the sequence of all ranks' tokens, in rank order."""
    positions: Tensor
    """Positions in the sequence of this rank's tokens."""
    inverse: Tensor
    """Index of each position in ``order``."""


class SequenceSharding:
    """Assignment of the tokens of a sequence to context ranks.

    Args:
        mesh: Context ranks.
        lengths: Possible sequence lengths, in tokens; the longest is selected.
        balanced: Whether a sequence is divided into 2N chunks, of which rank r stores chunks r and
            2N - 1 - r, so that causal attention costs every rank the same; else, into N chunks.
    """

    def __init__(self, mesh: DeviceMesh, lengths: Collection[int], *, balanced: bool) -> None:
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        self.group = mesh.get_group()
        num_chunks = (2 if balanced else 1) * self.ranks
        chunks_of_ranks = [
            [rank, num_chunks - 1 - rank] if balanced else [rank] for rank in range(self.ranks)
        ]
        self.chunk_indices = chunks_of_ranks[self.rank]
        # On the device: a copy at each use would make the host wait.
        self.orders = {
            length: self._build_order(
                torch.arange(length, device=mesh.device_type).view(num_chunks, -1), chunks_of_ranks
            )
            for length in lengths
        }
        self.select_length(max(lengths))

    def _build_order(
        self, positions_CT: Tensor, chunks_of_ranks: Sequence[Sequence[int]]
    ) -> SequenceOrder:
        order_T = torch.cat([positions_CT[chunks].flatten() for chunks in chunks_of_ranks])
        positions_T = positions_CT[self.chunk_indices].flatten()
        return SequenceOrder(positions_CT.shape[1], order_T, positions_T, torch.argsort(order_T))

    def select_length(self, length: int) -> None:
        """Assign the tokens of sequences of ``length`` tokens from now on."""
        self.chunk_tokens, self.order_T, self.positions_T, self.inverse_T = self.orders[length]

    def shard_batch(self, batch: Batch) -> Batch:
        """Tokens and labels of this rank; positions of packed sequences stay unsharded."""
        return {
            name: x[:, self.positions_T] if name in ("inputs", "labels") else x
            for name, x in batch.items()
        }


def build_attention(
    method: ContextAttention, sharding: SequenceSharding, dropout: float
) -> nn.Module:
    """Attention module that replaces ``CausalAttention`` under context parallelism."""
    classes = {
        ContextAttention.ulysses: UlyssesAttention,
        ContextAttention.gather: AllGatherAttention,
    }
    return classes[method](sharding, dropout)


class UlyssesAttention(nn.Module):
    """Attention over full sequences of some heads per rank, by all-to-all (DeepSpeed-Ulysses)."""

    def __init__(self, sharding: SequenceSharding, dropout: float) -> None:
        super().__init__()
        self.sharding, self.dropout = sharding, dropout

    def forward(
        self,
        query_BTHD: Tensor,
        key_BTKD: Tensor,
        value_BTKD: Tensor,
        segments: AttentionSegments | None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """``attention_BTHD`` of this rank's tokens."""
        sharding = self.sharding
        heads, keys = query_BTHD.shape[2], key_BTKD.shape[2]
        if keys % sharding.ranks:  # too few key heads to shard: repeat them per query head
            key_BTKD, value_BTKD = (
                x.repeat_interleave(heads // keys, dim=2) for x in (key_BTKD, value_BTKD)
            )
        query, key, value = (
            all_to_all_dims(x, 2, 1, sharding.group)[:, sharding.inverse_T]
            for x in (query_BTHD, key_BTKD, value_BTKD)
        )
        dropout = self.dropout if self.training else 0.0
        attention = attend(query, key, value, segments, dropout, window, softcap)
        ordered = attention[:, sharding.order_T]
        return all_to_all_dims(ordered, 1, 2, sharding.group)


class AllGatherAttention(nn.Module):
    """Attention of local queries to all-gathered keys and values (Llama 3, section 3.3.2)."""

    def __init__(self, sharding: SequenceSharding, dropout: float) -> None:
        super().__init__()
        self.sharding, self.dropout = sharding, dropout

    def forward(
        self,
        query_BTHD: Tensor,
        key_BTKD: Tensor,
        value_BTKD: Tensor,
        segments: AttentionSegments | None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """``attention_BTHD`` of this rank's tokens, one chunk of a sequence at a time."""
        sharding = self.sharding
        keys_values = torch.stack((key_BTKD, value_BTKD))
        keys_values = all_gather(keys_values, 2, sharding.group)
        keys_values = keys_values[:, :, sharding.inverse_T]
        sequence = keys_values.shape[2]
        if segments is None:
            segments = equal_segments(len(query_BTHD), sequence, sequence, query_BTHD.device)
        if window is not None:
            segments = segments.with_window(window)
        outputs = []
        for row, (query_THD, keys_values_2SKD) in enumerate(
            zip(query_BTHD.unbind(0), keys_values.unbind(1), strict=True)
        ):
            chunks = query_THD.split(sharding.chunk_tokens)
            for index, chunk_THD in zip(sharding.chunk_indices, chunks, strict=True):
                first = row * sequence + index * sharding.chunk_tokens
                chunk_segments, keys = segments.slice_queries(first, first + len(chunk_THD))
                begin, end = keys.start - row * sequence, keys.stop - row * sequence
                key_SKD, value_SKD = keys_values_2SKD[:, begin:end].unbind(0)
                outputs.append(
                    attend(
                        chunk_THD[None],
                        key_SKD[None],
                        value_SKD[None],
                        chunk_segments,
                        self.dropout if self.training else 0.0,
                        softcap=softcap,
                    )[0]
                )
        return torch.cat(outputs).view(query_BTHD.shape)


def all_to_all_dims(x: Tensor, split_dim: int, concat_dim: int, group: dist.ProcessGroup) -> Tensor:
    """``x`` with dimension ``split_dim`` sharded and dimension ``concat_dim`` gathered.

    The inverse is the same call with both dimensions exchanged.
    """
    ranks = group.size()
    send_buffer = torch.stack(x.chunk(ranks, split_dim)).flatten(0, 1)
    receive_buffer = all_to_all(send_buffer, None, None, group)
    return torch.cat(receive_buffer.chunk(ranks), concat_dim)
