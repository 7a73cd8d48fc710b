"""Choice of the attention kernel, for execution and for the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

HALF = 2
"""Bytes per element of the dtypes that flash attention on CUDA supports: bf16 and fp16."""
FLASH_MAX_HEAD_SIZE = 256
"""Features per head that flash attention on CUDA supports."""
FLASH_HEAD_MULTIPLE = 8
"""Divisor of the features per head in flash attention of segments."""
SOFTCAP_QUERIES = 256
"""Queries of a sequence whose soft-capped scores exist at a time."""
MEASURED_TOKENS, MEASURED_HEAD_SIZE = 4096, 128
"""Shape of the attention that ``calibrate`` measures."""
DIAGONAL_TOKENS = 384
"""Tokens per row of the score matrix that a causal kernel spends on the diagonal.

From the forward rates of FlashAttention-2 on an H100 at a head size of 128, which are 191, 260,
298, 319, 333 and 335 TFLOP/s at 512, 1k, 2k, 4k, 8k and 16k tokens (Shah et al., 2024,
FlashAttention-3, figure 5): ``343 * tokens / (tokens + 384)`` is within 5 % of each. cuDNN's rates
fit as well.
"""
SMALL_HEAD_SHARE = 0.88
"""Rate at a head size of 64 relative to 128: 324 of 370 TFLOP/s without a mask (same figure)."""


class AttentionKernel(Enum):
    """Function that computes attention."""

    causal = auto()
    """``scaled_dot_product_attention`` with ``is_causal``: whole sequences."""
    varlen = auto()
    """``torch.nn.attention.varlen``: segments in half precision on CUDA, by flash attention."""
    varlen_cpu = auto()
    """Segments on the CPU, by its flash kernel."""
    segments = auto()
    """``scaled_dot_product_attention`` of each segment: dropout, and fp32 on CUDA."""
    softcap = auto()
    """Matmuls of ``softcap_attention.py``: soft-capped scores, which no kernel of torch has."""


@dataclass(frozen=True)
class AttentionBackend:
    """Kernel, and how keys and values are passed to it."""

    kernel: AttentionKernel
    """Function that computes attention."""
    expands_keys: bool
    """Whether keys and values are repeated for each query head.

    Without flash attention, the fused kernel of CUDA requires as many key heads as query heads; the
    unfused one stores the scores of all pairs of tokens.
    """


@dataclass(frozen=True)
class SoftcapTile:
    """Queries of a segment whose soft-capped scores exist at a time, and all keys that they see."""

    queries: slice
    """Queries, in tokens of all segments."""
    keys: slice
    """Keys, in tokens of all segments; the last one is at the position of the last query."""
    window_start: int
    """Column of the first key in the window of the first query; negative if the tile starts later,
    and at most 0."""


def choose_backend(
    device_type: str,
    element_bytes: int,
    *,
    heads: int,
    key_heads: int,
    head_size: int,
    dropout: float = 0.0,
    has_segments: bool = False,
    has_flash: bool = True,
    has_softcap: bool = False,
) -> AttentionBackend:
    """Return the backend of causal attention.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or ``"meta"``.
        element_bytes: Bytes per element of queries, keys and values.
        heads: Number of query heads.
        key_heads: Number of key heads.
        head_size: Features per head.
        dropout: Dropout probability of the attention weights.
        has_segments: Whether attention is not simply causal within whole sequences.
        has_flash: Whether the CUDA device supports flash attention (compute capability 8.0).
        has_softcap: Whether the scores are soft-capped.
    """
    if has_softcap:
        return AttentionBackend(AttentionKernel.softcap, expands_keys=False)
    on_cuda = device_type == "cuda"
    uses_flash = has_flash and element_bytes == HALF and head_size <= FLASH_MAX_HEAD_SIZE
    if not has_segments:
        kernel = AttentionKernel.causal
    elif not on_cuda and not dropout:
        kernel = AttentionKernel.varlen_cpu
    elif on_cuda and not dropout and uses_flash and head_size % FLASH_HEAD_MULTIPLE == 0:
        kernel = AttentionKernel.varlen
    else:
        kernel = AttentionKernel.segments
    expands_keys = (
        on_cuda and heads != key_heads and (not uses_flash or kernel is AttentionKernel.segments)
    )
    return AttentionBackend(kernel, expands_keys)


def causal_rate_share(keys: int, head_size: int) -> float:
    """Return the rate of a causal CUDA kernel, relative to the shape that ``calibrate`` measures.

    Args:
        keys: Number of keys of a sequence.
        head_size: Features per head.
    """
    by_length = keys / (keys + DIAGONAL_TOKENS)
    measured = MEASURED_TOKENS / (MEASURED_TOKENS + DIAGONAL_TOKENS)
    by_head = SMALL_HEAD_SHARE if head_size < MEASURED_HEAD_SIZE else 1.0
    return by_length / measured * by_head


def iter_softcap_tiles(
    query_lengths: Sequence[int], key_lengths: Sequence[int], window: int | None
) -> Iterator[SoftcapTile]:
    """Yield the tiles of segments, as in ``AttentionSegments``."""
    first_query = first_key = 0
    for queries, keys in zip(query_lengths, key_lengths, strict=True):
        for start in range(0, queries, SOFTCAP_QUERIES):
            stop = min(start + SOFTCAP_QUERIES, queries)
            earliest = 0 if window is None else start + keys - queries - window + 1
            begin = max(0, earliest)
            yield SoftcapTile(
                slice(first_query + start, first_query + stop),
                slice(first_key + begin, first_key + stop + keys - queries),
                earliest - begin if window is not None else -keys,
            )
        first_query, first_key = first_query + queries, first_key + keys
