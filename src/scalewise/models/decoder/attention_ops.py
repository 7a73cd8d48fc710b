"""Attention of a decoder, and what is dropped, as they run, for the planner: sizes, no tensors."""

from __future__ import annotations

from scalewise.models.decoder.comm_ops import CommOps
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.linear_ops import FP32
from scalewise.models.op_graph import ForwardSpec, OpWork


class AttentionOps(CommOps):
    """Writes how a token becomes a mix of others onto a tape."""

    def __init__(self, spec: DecoderConfig, forward_spec: ForwardSpec) -> None:
        super().__init__(forward_spec)
        self.spec = spec

    def add_attention(self, query: int, key: int, value: int) -> int:
        """Writes attention, and what brings it the tokens of other context ranks."""
        spec, run, graph = self.spec, self.forward_spec, self.graph
        whole, mask = run.tokens_per_sequence * run.context_ranks + run.prefix_tokens, 0
        if run.prefix_tokens:
            key, value = self._add_prefix(key), self._add_prefix(value)
        if run.context_ranks > 1 and run.gathers_keys:
            both = graph.sizes[key] * run.context_ranks * 2
            gathered = graph.add_op(
                OpWork.communication,
                (key, value),
                both,
                forward_scratch=2 * both,
                backward_scratch=both,
            )
            read: tuple[int, ...] = (query, gathered)
            piece = (
                run.tokens_per_sequence // 2
            )  # of either end; the mask says which of the keys each sees
            mask = (
                piece
                * piece
                * (2 * run.context_ranks + 1)
                * run.compute_element_bytes
                * (not run.sequence_packing)
            )
        elif run.context_ranks > 1:
            heads = spec.key_heads // run.tensor_ranks
            wide = graph.sizes[key] if heads % run.context_ranks == 0 else graph.sizes[query]
            read = (
                self.add_all_to_all(query, graph.sizes[query]),
                self.add_all_to_all(key, wide),
                self.add_all_to_all(value, wide),
            )
        else:
            read = (query, key, value)
        masked = run.sequence_packing or run.prefix_tokens > 0
        skips = not masked or (
            run.context_ranks > 1 and run.gathers_keys
        )  # half, as what comes later
        fused = not (spec.dropout and run.on_cpu)
        products = 2.0 if skips and fused else 4.0  # a mask hides what was computed
        flops = products * run.num_tokens * whole * spec.query_width / run.tensor_ranks
        if fused:
            mixed = graph.add_op(
                OpWork.attention,
                read,
                graph.sizes[query],
                saved=read,
                saves_output=True,
                extra_output_bytes=(run.num_tokens * spec.heads // run.tensor_ranks * FP32, mask),
                saved_by_selective=True,
                flops=flops,
                backward_flops=2.5 * flops,
            )
        else:
            mixed = self._add_unfused_attention(read, whole, masked, flops)
        if run.context_ranks == 1:
            return mixed
        if run.gathers_keys:  # the halves of the tokens are put together
            return graph.add_op(OpWork.pointwise, (mixed,), graph.sizes[mixed])
        return self.add_all_to_all(mixed, graph.sizes[mixed])

    def _add_unfused_attention(
        self, inputs: tuple[int, ...], total_keys: int, masked: bool, flops: float
    ) -> int:
        """Writes attention with dropout as torch has it on the CPU: no kernel of its own, in fp32.

        After ``at::_scaled_dot_product_attention_math``; each product reads copies.
        """
        spec, run, graph = self.spec, self.forward_spec, self.graph
        size = graph.sizes[inputs[0]]
        queries = size // run.compute_element_bytes * FP32
        spread = run.context_ranks > 1 and not run.gathers_keys  # some heads of all tokens
        keys = queries if spread else queries * total_keys // run.tokens_per_sequence
        scores = run.num_tokens * total_keys * spec.heads // run.tensor_ranks * FP32
        query = graph.add_op(OpWork.pointwise, inputs[:1], queries)
        key = graph.add_op(OpWork.pointwise, inputs[1:2], keys)
        products = self._add_bmm(query, key, scores, flops / 2)
        mask = 0 if masked else run.tokens_per_sequence * total_keys * FP32
        shares = graph.add_op(
            OpWork.pointwise, (products,), scores, saves_output=True, forward_scratch=scores + mask
        )
        dropped = self.add_dropout(shares, spec.dropout)
        value = graph.add_op(OpWork.pointwise, inputs[-1:], keys)
        mixed = self._add_bmm(dropped, value, queries, flops / 2)
        return mixed if size == queries else graph.add_op(OpWork.pointwise, (mixed,), size)

    def _add_bmm(self, one: int, other: int, size: int, flops: float) -> int:
        """Writes a product of two tensors, of which backward reads each for the other's sake."""
        graph = self.graph
        pairs = ((one, other), (other, one))
        return graph.add_op(
            OpWork.attention,
            (one, other),
            size,
            saved=tuple(each for each, partner in pairs if graph.requires_grad[partner]),
            saved_by_selective=True,
            flops=flops,
            backward_flops=2.0 * flops,
        )

    def _add_prefix(self, x: int) -> int:
        """Writes how what is learnt comes before the keys, or the values, of each row."""
        run, size = self.forward_spec, self.graph.sizes[x]
        count = run.prefix_tokens * self.spec.kv_width // run.tensor_ranks
        return self.graph.add_op(
            OpWork.pointwise,
            (x,),
            size + size * run.prefix_tokens // run.tokens_per_sequence,
            weight_gradient_bytes=(
                count * run.compute_element_bytes,
                count * run.gradient_element_bytes,
            ),
            weight_gradient_first=False,
        )

    def add_dropout(self, x: int, probability: float) -> int:
        """Writes how a share of the numbers is dropped."""
        if not probability:
            return x
        size = self.graph.sizes[x]
        as_numbers = self.forward_spec.on_cpu and not self.forward_spec.is_compiled
        mask = size if as_numbers else size // self.forward_spec.residual_element_bytes
        return self.graph.add_op(OpWork.pointwise, (x,), size, extra_output_bytes=(mask,))
