"""Variable-length attention on the CPU, as ``torch.nn.attention.varlen`` on CUDA.

Each segment is computed by torch's flash kernel for the CPU, in tiles that need no mask. Partial
results of the same queries are merged by their logsumexp; the backward kernel then takes the merged
output and logsumexp. Memory is linear in the number of tokens.

Shape suffixes: N queries, M keys of all segments, H query heads, K key heads, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from scalewise.compat.torch import flash_attention_cpu, flash_attention_cpu_backward


class Tile(Enum):
    """Visible keys of a tile."""

    causal = auto()
    """Lower triangle of a square, diagonal included; the first tile of its queries and keys."""
    full = auto()
    """All keys."""
    anti_causal = auto()
    """Upper triangle of a square, diagonal included."""


@torch.library.custom_op("scalewise::varlen_attention_cpu", mutates_args=())
def varlen_attention_cpu(
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Attention of segments, see :class:`AttentionSegments`; returns output and logsumexp."""
    output_NHD, logsumexp_HN = _empty_results(query_NHD)
    for queries, keys, tile in _tiles(cu_seq_q, cu_seq_k, window):
        query_1HTD, key_1KSD, value_1KSD = _heads_first(
            tile, (query_NHD, queries), (key_MKD, keys), (value_MKD, keys)
        )
        part_1HTD, part_1HT = flash_attention_cpu(
            query_1HTD, key_1KSD, value_1KSD, tile is not Tile.full
        )
        if tile is Tile.anti_causal:
            part_1HTD, part_1HT = part_1HTD.flip(2), part_1HT.flip(2)
        part_THD, part_HT = part_1HTD[0].transpose(0, 1), part_1HT[0]
        output_THD, logsumexp_HT = output_NHD[queries], logsumexp_HN[:, queries]
        if tile is Tile.causal:
            output_THD.copy_(part_THD)
            logsumexp_HT.copy_(part_HT)
            continue
        total_HT = torch.logaddexp(logsumexp_HT, part_HT)
        old_TH1, new_TH1 = (
            (x_HT - total_HT).exp_().T[..., None] for x_HT in (logsumexp_HT, part_HT)
        )
        output_THD.copy_(output_THD * old_TH1 + part_THD * new_TH1)
        logsumexp_HT.copy_(total_HT)
    return output_NHD, logsumexp_HN


@torch.library.custom_op("scalewise::varlen_attention_cpu_backward", mutates_args=())
def varlen_attention_cpu_backward(
    gradient_NHD: Tensor,
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    output_NHD: Tensor,
    logsumexp_HN: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    sums = tuple(map(torch.zeros_like, (query_NHD, key_MKD, value_MKD)))
    for queries, keys, tile in _tiles(cu_seq_q, cu_seq_k, window):
        gradient_1HTD, query_1HTD, key_1KSD, value_1KSD, output_1HTD = _heads_first(
            tile,
            (gradient_NHD, queries),
            (query_NHD, queries),
            (key_MKD, keys),
            (value_MKD, keys),
            (output_NHD, queries),
        )
        logsumexp_1HT = logsumexp_HN[None, :, queries]
        if tile is Tile.anti_causal:
            logsumexp_1HT = logsumexp_1HT.flip(2)
        parts = flash_attention_cpu_backward(
            gradient_1HTD,
            query_1HTD,
            key_1KSD,
            value_1KSD,
            output_1HTD,
            logsumexp_1HT,
            tile is not Tile.full,
        )
        for total, part_1HTD, where in zip(sums, parts, (queries, keys, keys), strict=True):
            part_1HTD = part_1HTD.flip(2) if tile is Tile.anti_causal else part_1HTD
            part_THD = part_1HTD[0].transpose(0, 1)
            if tile is Tile.causal:
                total[where].copy_(part_THD)
            else:
                total[where].add_(part_THD)
    return sums[0], sums[1], sums[2]


def _tiles(
    cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None
) -> Iterator[tuple[slice, slice, Tile]]:
    """Yield the queries, the keys and the visible keys of each tile.

    Queries are divided at the multiples of the window. Their keys are then in at most two blocks:
    in the block of the queries up to the diagonal, and in the block before it from the diagonal
    that is a window earlier.
    """
    starts_q, starts_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    shared: list[tuple[int, slice]] = []  # first query and keys of shared prefixes
    for first_q, end_q, first_k, end_k in zip(
        starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False
    ):
        if first_q == end_q and first_k == end_k:
            continue
        if first_q == end_q:
            shared.append((first_q, slice(first_k, end_k)))
            continue
        width = min(window or end_k - first_k, end_k - first_k)
        shift = end_k - end_q  # from a query to the key at its position
        start = first_q + shift
        while start < end_k:
            block = first_k + (start - first_k) // width * width
            stop = min(block + width, end_k)
            queries = slice(start - shift, stop - shift)
            yield queries, slice(start, stop), Tile.causal
            if block < start:
                yield queries, slice(block, start), Tile.full
            if block > first_k:
                earliest = start - width + 1
                size = min(stop - start, block - earliest)
                if size:
                    diagonal = slice(queries.start, queries.start + size)
                    yield diagonal, slice(earliest, earliest + size), Tile.anti_causal
                if earliest + size < block:
                    yield queries, slice(earliest + size, block), Tile.full
            start = stop
    ends = [first_q for first_q, _ in shared[1:]] + starts_q[-1:]
    for (first_q, keys), end_q in zip(shared, ends, strict=False):
        yield slice(first_q, end_q), keys, Tile.full


def _heads_first(tile: Tile, *operands: tuple[Tensor, slice]) -> list[Tensor]:
    """Rows of operands as ``x_1HTD``; in reverse order for an anti-causal tile."""
    rows = [x_NHD[where].transpose(0, 1)[None] for x_NHD, where in operands]
    return [x_1HTD.flip(2) for x_1HTD in rows] if tile is Tile.anti_causal else rows


def _empty_results(query_NHD: Tensor) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, which has the dtype of the kernel's accumulator."""
    dtype = torch.promote_types(query_NHD.dtype, torch.float32)
    shape = query_NHD.shape[1::-1]
    return torch.empty_like(query_NHD), query_NHD.new_empty(shape, dtype=dtype)


@varlen_attention_cpu.register_fake
def _fake(query_NHD: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _empty_results(query_NHD)


@varlen_attention_cpu_backward.register_fake
def _fake_backward(
    gradient_NHD: Tensor, query_NHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query_NHD), torch.empty_like(key_MKD), torch.empty_like(value_MKD)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _backward(ctx: Any, gradient_NHD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = varlen_attention_cpu_backward(gradient_NHD, *ctx.saved_tensors, ctx.window)
    return (*gradients, None, None, None)


varlen_attention_cpu.register_autograd(_backward, setup_context=_save_for_backward)
