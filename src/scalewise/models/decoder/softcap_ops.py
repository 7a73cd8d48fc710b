"""Attention with soft-capped scores in the operator graph of the decoder, for the planner."""

from __future__ import annotations

from functools import cache

from scalewise.models.attention_kernels import SOFTCAP_QUERIES, iter_softcap_tiles
from scalewise.models.decoder.adapter_ops import AdapterOps
from scalewise.models.linear_ops import FP32
from scalewise.models.op_graph import OpWork

WIDE_PASSES = (8, 18)
"""Times that elementwise kernels read or write the fp32 scores of a tile, in forward and backward:
factor, tanh, cap and softmax; in backward also the gradients of softmax and tanh."""
MATMUL_PASSES = (2, 5)
"""Times that matmuls write or read scores, in the compute format."""


class SoftcapOps(AdapterOps):
    """Adds attention with soft-capped scores to an operator graph."""

    def add_softcap_attention(self, reads: tuple[int, ...], total_keys: int) -> int:
        """Add ``softcap_attention.SoftcapAttention``, which has the scores of one tile at a time.

        Selective checkpointing repeats it. A packed sequence counts as one text.

        Args:
            reads: Queries, and keys and values together or apart.
            total_keys: Keys of a sequence, with those of a prefix.
        """
        spec, forward_spec, graph = self.spec, self.forward_spec, self.graph
        element_bytes = forward_spec.compute_element_bytes
        casts = element_bytes < FP32
        windows = {layer: spec.layer_window(layer) for layer in range(spec.layers)}.values()
        heads, queries = spec.heads // forward_spec.tensor_ranks, forward_spec.tokens_per_sequence
        all_queries = total_keys - forward_spec.prefix_tokens
        pairs = sum(sum(_tile_pairs(all_queries, total_keys, window)) for window in windows) * (
            heads * forward_spec.sequences / (len(windows) * forward_spec.context_ranks)
        )
        if forward_spec.context_ranks > 1 and forward_spec.gathers_keys:
            queries //= 2  # chunks of a rank, one after the other
        elif forward_spec.context_ranks > 1:
            heads, queries = heads // forward_spec.context_ranks, all_queries
        scores = max(max(_tile_pairs(queries, total_keys, window)) for window in windows) * heads
        queries = min(queries, SOFTCAP_QUERIES)
        features = heads * queries * spec.head_size * element_bytes
        masks = queries**2 * (1 if None in windows else 2)
        key_value_bytes = sum(graph.sizes[tensor] for tensor in reads[1:])
        # Gradients of keys and values are summed in fp32; the graph has those in their own format.
        sums = key_value_bytes * FP32 // element_bytes * casts
        backward = 3 * FP32 * scores + max(masks, element_bytes * scores * casts)
        backward += 2 * features + heads * queries * FP32
        forward_passes, backward_passes = (
            wide * FP32 + narrow * element_bytes + casts * casts_of * (FP32 + element_bytes)
            for wide, narrow, casts_of in zip(WIDE_PASSES, MATMUL_PASSES, (2, 4), strict=True)
        )
        flops = 4.0 * pairs * spec.head_size
        return graph.add_op(
            OpWork.attention,
            reads,
            graph.sizes[reads[0]],
            saved=reads,
            saves_output=True,
            forward_scratch=2 * FP32 * scores + masks,
            backward_scratch=max(backward - key_value_bytes * casts, 0) + sums,
            elementwise_bytes=(round(pairs * forward_passes), round(pairs * backward_passes)),
            flops=flops,
            backward_flops=2.5 * flops,
        )


@cache
def _tile_pairs(queries: int, keys: int, window: int | None) -> tuple[int, ...]:
    """Return the pairs of queries and keys in each tile of a sequence, hidden ones included."""
    return tuple(
        (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
        for tile in iter_softcap_tiles((queries,), (keys,), window)
    )
