"""Causal attention of whole sequences or of segments, without a tokens x tokens mask.

Shape suffixes: B sequences, T queries, S keys of a sequence, N queries, M keys of all sequences, H
query heads, K key heads, D features.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from scalewise.compat.torch import disable_dynamo, lower_right_bias
from scalewise.models.attention_kernels import AttentionKernel, choose_backend
from scalewise.models.attention_segments import AttentionSegments, add_window
from scalewise.models.autocast import compute_dtype
from scalewise.models.softcap_attention import attend_softcapped
from scalewise.models.varlen_cpu import varlen_attention_cpu

GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if torch.__version__ >= "2.12" else {}
"""Option of ``varlen_attn`` with fewer key heads; torch 2.11 does not check their number."""


def attend(
    query_BTHD: Tensor,
    key_BSKD: Tensor,
    value_BSKD: Tensor,
    segments: AttentionSegments | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return ``attention_BTHD``, ``softmax(query key^T / sqrt(D)) value`` of the visible keys.

    ``window``: number of latest keys that a query attends to; None: that of the segments.

    ``segments``: keys that each query attends to; None: those up to its position in its sequence.
    Keys of segments are flattened over sequences in order, so that their B and S may be any.

    ``softcap``: bound of the scores, without dropout; None: they have none.
    """
    if softcap is not None:
        assert not dropout
        tensors = query_BTHD, key_BSKD, value_BSKD
        return attend_softcapped(*tensors, segments, window, softcap)
    segments = add_window(segments, window, query_BTHD, key_BSKD)
    dtype, device = compute_dtype(query_BTHD), query_BTHD.device
    heads, key_heads, head_size = query_BTHD.shape[2], key_BSKD.shape[2], query_BTHD.shape[3]
    backend = choose_backend(
        device.type,
        dtype.itemsize,
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        dropout=dropout,
        has_segments=segments is not None,
        has_flash=device.type == "cuda" and _has_flash(device),
    )
    if backend.expands_keys:
        key_BSKD, value_BSKD = (
            x.repeat_interleave(heads // key_heads, dim=2) for x in (key_BSKD, value_BSKD)
        )
    if segments is None:
        attention_BHTD = F.scaled_dot_product_attention(
            query_BTHD.transpose(1, 2),
            key_BSKD.transpose(1, 2),
            value_BSKD.transpose(1, 2),
            dropout_p=dropout,
            is_causal=True,
            enable_gqa=heads != key_BSKD.shape[2],
        )
        return attention_BHTD.transpose(1, 2)
    query_NHD, key_MKD, value_MKD = (
        x.to(dtype).flatten(0, 1) for x in (query_BTHD, key_BSKD, value_BSKD)
    )
    if segments.shares_prefix and backend.kernel is not AttentionKernel.varlen_cpu:
        segments, (key_MKD, value_MKD) = segments.repeat_prefix(key_MKD, value_MKD)
    if backend.kernel is AttentionKernel.varlen_cpu:
        attention_NHD, _ = varlen_attention_cpu(
            query_NHD, key_MKD, value_MKD, segments.cu_seq_q, segments.cu_seq_k, segments.window
        )
    elif backend.kernel is AttentionKernel.varlen:
        attention_NHD = _flash_varlen(query_NHD, key_MKD, value_MKD, segments)
    else:
        attention_NHD = _attend_each_segment(query_NHD, key_MKD, value_MKD, segments, dropout)
    return cast(Tensor, attention_NHD.view(query_BTHD.shape))


def _flash_varlen(
    query_NHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, segments: AttentionSegments
) -> Tensor:
    """Return ``attention_NHD`` of flash attention on CUDA."""
    from torch.nn.attention.varlen import varlen_attn  # loads torch._dynamo

    grouped = query_NHD.shape[1] != key_MKD.shape[1]
    attention_NHD = varlen_attn(
        query_NHD,
        key_MKD,
        value_MKD,
        segments.cu_seq_q,
        segments.cu_seq_k,
        segments.max_q,
        segments.max_k,
        window_size=(segments.window - 1 if segments.window else -1, 0),
        **(GROUPED_HEADS if grouped else {}),
    )
    return cast(Tensor, attention_NHD)


@disable_dynamo
def _attend_each_segment(
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    segments: AttentionSegments,
    dropout: float,
) -> Tensor:
    """Return ``attention_NHD`` by one call per segment; split and cat have linear gradients."""
    outputs = []
    for query_THD, key_SKD, value_SKD in zip(
        query_NHD.split(segments.query_lengths),
        key_MKD.split(segments.key_lengths),
        value_MKD.split(segments.key_lengths),
        strict=True,
    ):
        query_1HTD, key_1KSD, value_1KSD = (
            x.transpose(0, 1)[None] for x in (query_THD, key_SKD, value_SKD)
        )
        mask = _segment_mask(len(query_THD), len(key_SKD), segments.window, query_NHD.device)
        attention_1HTD = F.scaled_dot_product_attention(
            query_1HTD,
            key_1KSD,
            value_1KSD,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            enable_gqa=query_THD.shape[1] != key_SKD.shape[1],
        )
        outputs.append(attention_1HTD[0].transpose(0, 1))
    return torch.cat(outputs)


def _segment_mask(
    queries: int, keys: int, window: int | None, device: torch.device
) -> Tensor | None:
    """Mask of one segment; None: a causal square. On CUDA it is symbolic without a window."""
    windowed = window is not None and window < keys
    if not windowed and (queries == keys or device.type == "cuda"):
        return None if queries == keys else lower_right_bias(queries, keys)
    last = keys - queries
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(last)
    return visible.triu(last - window + 1) if window is not None else visible


def _has_flash(device: torch.device) -> bool:
    """Whether a CUDA device supports flash attention; traces without a device suppose so."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
