"""Attention with soft-capped scores: ``softmax(cap tanh(query key^T / sqrt(D) / cap)) value``.

No fused kernel of torch has the tanh. Scores exist for the queries of one tile at a time, and the
backward pass computes them again, so that memory is linear in the number of tokens. All operators
are visible to counters of memory and FLOPs.

Shape suffixes: N queries, M keys of all segments, T queries and S keys of a tile, H query heads, K
key heads, P queries of all heads that share a key head, D features. Source: Gemma Team 2024, Gemma
2, section 2; the tiles are those of FlashAttention-2 (Dao, 2023) over queries only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from scalewise.compat.torch import disable_dynamo
from scalewise.models.attention_kernels import SoftcapTile, iter_softcap_tiles
from scalewise.models.attention_segments import AttentionSegments
from scalewise.models.autocast import compute_dtype, without_autocast


@disable_dynamo
def attend_softcapped(
    query_BTHD: Tensor,
    key_BSKD: Tensor,
    value_BSKD: Tensor,
    segments: AttentionSegments | None,
    window: int | None,
    softcap: float,
) -> Tensor:
    """Return ``attention_BTHD`` of causal attention with soft-capped scores.

    Args:
        query_BTHD: Queries.
        key_BSKD: Keys; with segments, flattened over sequences.
        value_BSKD: Values.
        segments: Keys that each query attends to; None: those of its sequence up to its position.
        window: Number of latest keys that a query attends to; None: that of the segments.
        softcap: Bound of the scores.
    """
    dtype = compute_dtype(query_BTHD)
    query_NHD, key_MKD, value_MKD = (
        x.to(dtype).flatten(0, 1) for x in (query_BTHD, key_BSKD, value_BSKD)
    )
    if segments is None:
        sequences = len(query_BTHD)
        lengths = (query_BTHD.shape[1],) * sequences, (key_BSKD.shape[1],) * sequences
    else:
        window = window or segments.window
        if segments.shares_prefix:
            segments, (key_MKD, value_MKD) = segments.repeat_prefix(key_MKD, value_MKD)
        lengths = segments.query_lengths, segments.key_lengths
    tiles = [*iter_softcap_tiles(*lengths, window)]
    attention_NHD: Tensor = SoftcapAttention.apply(  # type: ignore[no-untyped-call]  # torch's
        query_NHD, key_MKD, value_MKD, tiles, softcap
    )
    return attention_NHD.view(query_BTHD.shape)


class SoftcapAttention(torch.autograd.Function):
    """Autograd function that saves queries, keys, values and output, but no scores."""

    @staticmethod
    def forward(
        context: Any,
        query_NHD: Tensor,
        key_MKD: Tensor,
        value_MKD: Tensor,
        tiles: Sequence[SoftcapTile],
        softcap: float,
    ) -> Tensor:
        """Attention of each query, ``attention_NHD``."""
        context.tiles, context.softcap = tiles, softcap
        attention_NHD, key_heads = torch.empty_like(query_NHD), key_MKD.shape[1]
        with without_autocast(query_NHD):
            for tile in tiles:
                query_KPD = _group_heads(query_NHD[tile.queries], key_heads)
                key_KSD = key_MKD[tile.keys].transpose(0, 1)
                scores_KPS = _tanh_of_scores(query_KPD, key_KSD, softcap).mul_(softcap)
                del query_KPD
                weights_KPS = _masked_softmax_(scores_KPS, tile)
                del scores_KPS
                weights_KPS = weights_KPS.to(value_MKD.dtype)
                value_KSD = value_MKD[tile.keys].transpose(0, 1)
                attention_NHD[tile.queries] = _split_groups(
                    _matmul(weights_KPS, value_KSD), query_NHD.shape[1]
                )
                del weights_KPS
        context.save_for_backward(query_NHD, key_MKD, value_MKD, attention_NHD)
        return attention_NHD

    @staticmethod
    def backward(context: Any, gradient_NHD: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values, summed over the tiles in fp32 or wider."""
        query_NHD, key_MKD, value_MKD, attention_NHD = context.saved_tensors
        softcap, key_heads, heads = context.softcap, key_MKD.shape[1], query_NHD.shape[1]
        dtype, wide = query_NHD.dtype, torch.promote_types(query_NHD.dtype, torch.float32)
        query_gradient_NHD = torch.empty_like(query_NHD)
        key_sum_MKD, value_sum_MKD = (torch.zeros_like(x, dtype=wide) for x in (key_MKD, value_MKD))
        scale = 1 / sqrt(query_NHD.shape[-1])
        with without_autocast(query_NHD):
            for tile in context.tiles:
                query_KPD = _group_heads(query_NHD[tile.queries], key_heads)
                gradient_KPD = _group_heads(gradient_NHD[tile.queries], key_heads)
                # Of the softmax: the gradient times the output, summed over its features.
                product_KPD = gradient_KPD * _group_heads(attention_NHD[tile.queries], key_heads)
                correction_KP1 = product_KPD.sum(-1, keepdim=True, dtype=wide)
                del product_KPD
                key_KSD, value_KSD = (x[tile.keys].transpose(0, 1) for x in (key_MKD, value_MKD))
                tanh_KPS = _tanh_of_scores(query_KPD, key_KSD, softcap)
                weights_KPS = _masked_softmax_(tanh_KPS * softcap, tile)
                low_KPS = weights_KPS.to(dtype)
                part_KSD = _matmul(low_KPS.transpose(1, 2), gradient_KPD)
                value_sum_MKD[tile.keys].add_(part_KSD.transpose(0, 1))
                del low_KPS, part_KSD
                scores_KPS = _matmul(gradient_KPD, value_KSD.transpose(1, 2)).to(wide)
                scores_KPS.sub_(correction_KP1).mul_(weights_KPS)
                del weights_KPS, gradient_KPD
                torch.ops.aten.tanh_backward.grad_input(scores_KPS, tanh_KPS, grad_input=scores_KPS)
                del tanh_KPS
                scores_KPS = scores_KPS.to(dtype)
                part_KSD = _matmul(scores_KPS.transpose(1, 2), query_KPD, scale)
                key_sum_MKD[tile.keys].add_(part_KSD.transpose(0, 1))
                del part_KSD
                query_gradient_NHD[tile.queries] = _split_groups(
                    _matmul(scores_KPS, key_KSD, scale), heads
                )
                del scores_KPS, query_KPD
        gradients = query_gradient_NHD, key_sum_MKD.to(dtype), value_sum_MKD.to(dtype)
        return (*gradients, None, None)


def _tanh_of_scores(query_KPD: Tensor, key_KSD: Tensor, softcap: float) -> Tensor:
    """``tanh(scores / softcap)`` as ``x_KPS``, in fp32 or wider."""
    scale = 1 / (sqrt(query_KPD.shape[-1]) * softcap)
    wide = torch.promote_types(query_KPD.dtype, torch.float32)
    return _matmul(query_KPD, key_KSD.transpose(1, 2)).to(wide).mul_(scale).tanh_()


def _masked_softmax_(scores_KPS: Tensor, tile: SoftcapTile) -> Tensor:
    """Softmax over the visible keys; overwrites the hidden scores."""
    tokens = tile.queries.stop - tile.queries.start
    scores_KGTS = scores_KPS.unflatten(1, (-1, tokens))
    ones_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=scores_KPS.device)
    scores_KGTS[..., -tokens:].masked_fill_(ones_TT.triu(1), -torch.inf)
    if tile.window_start + tokens > 1:  # hidden from the last query
        hidden = ones_TT.tril(tile.window_start - 1)[:, : scores_KPS.shape[-1]]
        scores_KGTS[..., :tokens].masked_fill_(hidden, -torch.inf)
    return scores_KPS.softmax(-1)


def _matmul(left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
    """Batched ``factor * left @ right``, by an operator that selective checkpointing repeats.

    It would store the result of ``bmm``, the scores of all tiles.
    """
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=factor)


def _group_heads(x_THD: Tensor, key_heads: int) -> Tensor:
    """Contiguous ``x_KPD``: the tokens of all heads that share a key head."""
    x_HTD = x_THD.transpose(0, 1)
    return x_HTD.reshape(key_heads, -1, x_THD.shape[-1]).contiguous()


def _split_groups(x_KPD: Tensor, heads: int) -> Tensor:
    """``x_THD``, the inverse of ``_group_heads``."""
    return x_KPD.view(heads, -1, x_KPD.shape[-1]).transpose(0, 1)
