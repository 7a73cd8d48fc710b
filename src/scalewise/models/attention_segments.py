"""Segments of causal attention: texts of packed sequences, prefix keys, windows, context shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from scalewise.compat.torch import disable_dynamo, has_no_values


@dataclass(eq=False)
class AttentionSegments:
    """Which keys each query attends to, without a tokens x tokens mask.

    Queries and keys are flattened over the sequences of a micro-batch. Segment i contains the next
    ``query_lengths[i]`` queries and ``key_lengths[i]`` keys. Its last query is at the position of
    its last key, and a query attends to the key at its own position and to those before it in its
    segment (lower-right causal). Keys before the first query are prefix keys, or keys of other
    context ranks.

    A segment without queries contains prefix keys that several texts share: the queries of the
    segments up to the next one of its kind attend to all of them, whatever the window.

    ``torch.compile`` guards on the attributes that compiled code reads: the tensors and the maxima,
    not the lengths. The number of cumulative lengths and the maxima are rounded up to powers of
    two, so that other texts seldom need a recompilation; added segments are empty.
    """

    query_lengths: tuple[int, ...]
    """Number of queries of each segment; 0: shared prefix keys."""
    key_lengths: tuple[int, ...]
    """Number of keys of each segment, at least that of its queries."""
    cu_seq_q: Tensor
    """Cumulative number of queries before each segment, and in total: int32, on the device."""
    cu_seq_k: Tensor
    """Cumulative number of keys before each segment, and in total: int32."""
    window: int | None = None
    """Number of latest keys that a query attends to, its own included; None: all before it."""
    max_q: int = field(init=False)
    """Upper bound on the queries of a segment."""
    max_k: int = field(init=False)
    """Upper bound on the keys of a segment."""
    shares_prefix: bool = field(init=False)
    """Whether a segment contains shared prefix keys."""
    _slices: dict[tuple[int, int], tuple[AttentionSegments, slice]] = field(
        init=False, default_factory=dict
    )
    _windowed: dict[int, AttentionSegments] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.max_q = _round_up(max(self.query_lengths))
        self.max_k = _round_up(max(self.key_lengths))
        self.shares_prefix = 0 in self.query_lengths

    @classmethod
    def from_lengths(
        cls,
        query_lengths: Iterable[int],
        key_lengths: Iterable[int],
        device: torch.device,
        window: int | None = None,
    ) -> AttentionSegments:
        """Segments of the given lengths, with their cumulative lengths on ``device``."""
        queries, keys = tuple(query_lengths), tuple(key_lengths)
        padding = [0] * (_round_up(len(queries)) - len(queries))
        cu_seq_q, cu_seq_k = (
            torch.tensor(
                [*accumulate([*lengths, *padding], initial=0)], dtype=torch.int32, device="cpu"
            ).to(device, non_blocking=True)
            for lengths in (queries, keys)
        )
        return cls(queries, keys, cu_seq_q, cu_seq_k, window)

    @disable_dynamo
    def repeat_prefix(self, *tensors: Tensor) -> tuple[AttentionSegments, list[Tensor]]:
        """Equal segments with their own copies of the shared prefix keys, and the copied tensors.

        ``tensors``: keys and values, flattened. A window would hide the copies.
        """
        assert self.window is None
        query_lengths, key_lengths, prefix_tokens = [], [], 0
        for queries, keys in zip(self.query_lengths, self.key_lengths, strict=True):
            prefix_tokens = prefix_tokens if queries else keys
            if queries:
                query_lengths.append(queries)
                key_lengths.append(prefix_tokens + keys)
        copies = []
        for x_MKD in tensors:
            parts: list[Tensor] = []
            prefix_PKD = x_MKD[:0]
            for queries, x_SKD in zip(
                self.query_lengths, x_MKD.split(self.key_lengths), strict=True
            ):
                prefix_PKD = prefix_PKD if queries else x_SKD
                parts += (prefix_PKD, x_SKD) if queries else ()
            copies.append(torch.cat(parts))
        device = self.cu_seq_q.device
        return AttentionSegments.from_lengths(query_lengths, key_lengths, device), copies

    @disable_dynamo
    def with_window(self, window: int) -> AttentionSegments:
        """Segments of the same lengths, with a window."""
        if window not in self._windowed:
            self._windowed[window] = replace(self, window=window)
        return self._windowed[window]

    def slice_queries(self, start: int, stop: int) -> tuple[AttentionSegments, slice]:
        """Segments of the queries ``start:stop``, and the contiguous keys that belong to them.

        Every segment has as many keys as queries.
        """
        if (start, stop) not in self._slices:
            queries, keys, first_key = [], [], stop
            for begin, length in zip(
                accumulate(self.query_lengths, initial=0), self.query_lengths, strict=False
            ):
                first, last = max(begin, start), min(begin + length, stop)
                if first < last:
                    queries.append(last - first)
                    keys.append(last - begin)
                    first_key = min(first_key, begin)
            segments = AttentionSegments.from_lengths(
                queries, keys, self.cu_seq_q.device, self.window
            )
            self._slices[start, stop] = segments, slice(first_key, stop)
        return self._slices[start, stop]


def _round_up(count: int) -> int:
    """Smallest power of two that is not less than a positive number."""
    return 1 << (count - 1).bit_length()


def equal_segments(
    sequences: int, queries: int, keys: int, device: torch.device, window: int | None = None
) -> AttentionSegments:
    """One segment per sequence; cumulative lengths are computed on ``device``."""
    cu_seq_q, cu_seq_k = (
        torch.arange(0, (sequences + 1) * length, length, dtype=torch.int32, device=device)
        for length in (queries, keys)
    )
    lengths = (queries,) * sequences, (keys,) * sequences
    return AttentionSegments(*lengths, cu_seq_q, cu_seq_k, window)


def add_window(
    segments: AttentionSegments | None, window: int | None, query_BTHD: Tensor, key_BSKD: Tensor
) -> AttentionSegments | None:
    """Segments with a window; those of whole sequences if there are none and it hides keys."""
    if segments is not None:
        return segments if window in (None, segments.window) else segments.with_window(window)
    sequences, keys = key_BSKD.shape[:2]
    if window is None or window >= keys:
        return None
    return equal_segments(sequences, query_BTHD.shape[1], keys, key_BSKD.device, window)


@disable_dynamo
def packed_segments(
    positions_BS: Tensor, device: torch.device, prefix_tokens: int = 0
) -> AttentionSegments:
    """One segment per text of packed sequences, after the shared prefix keys of each sequence.

    ``positions_BS``: position of each token in its text, on the CPU, so that reading them does not
    wait for a CUDA device.
    """
    lengths = text_lengths(positions_BS)
    if not prefix_tokens:
        return AttentionSegments.from_lengths(lengths, lengths, device)
    queries, keys, tokens = [], [], 0
    for length in lengths:
        if tokens % positions_BS.shape[1] == 0:
            queries.append(0)
            keys.append(prefix_tokens)
        queries.append(length)
        keys.append(length)
        tokens += length
    return AttentionSegments.from_lengths(queries, keys, device)


def text_lengths(positions_BS: Tensor) -> Sequence[int]:
    """Lengths of the texts of packed sequences, in order; a text starts at position 0.

    Fake and meta tensors have no values: each sequence then counts as one text.
    """
    sequences, tokens = positions_BS.shape
    if has_no_values(positions_BS):
        return (tokens,) * sequences
    is_first = positions_BS == 0
    is_first[:, 0] = True
    starts = is_first.flatten().nonzero().flatten().tolist()
    return [
        stop - start for start, stop in zip(starts, [*starts[1:], sequences * tokens], strict=True)
    ]
