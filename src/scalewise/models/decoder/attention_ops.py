"""Attention in the operator graph of the decoder, for the planner."""

from __future__ import annotations

from scalewise.models.attention_kernels import AttentionKernel, causal_rate_share, choose_backend
from scalewise.models.decoder.softcap_ops import SoftcapOps
from scalewise.models.linear_ops import FP32
from scalewise.models.op_graph import OpWork


class AttentionOps(SoftcapOps):
    """Adds attention and its rotary position embedding to an operator graph."""

    def add_attention(self, query: int, key: int, value: int) -> int:
        """Add attention with its context-parallel collectives."""
        spec, forward_spec, graph = self.spec, self.forward_spec, self.graph
        total_keys = (
            forward_spec.tokens_per_sequence * forward_spec.context_ranks
            + forward_spec.prefix_tokens
        )
        shards_context = forward_spec.context_ranks > 1
        gathers = shards_context and forward_spec.gathers_keys
        backend = choose_backend(
            "cpu" if forward_spec.on_cpu else "cuda",
            forward_spec.compute_element_bytes,
            heads=spec.heads,
            key_heads=spec.key_heads,
            head_size=spec.head_size,
            dropout=spec.dropout,
            has_segments=forward_spec.sequence_packing
            or forward_spec.prefix_tokens > 0
            or gathers
            or (spec.window is not None and spec.window < total_keys),
            has_softcap=spec.attention_softcap is not None,
        )
        groups = spec.heads // spec.key_heads if backend.expands_keys else 1
        if forward_spec.prefix_tokens:
            key, value = self._add_prefix(key), self._add_prefix(value)
        if gathers:
            gathered_bytes = graph.sizes[key] * forward_spec.context_ranks * 2
            gathered = graph.add_op(
                OpWork.communication,
                (key, value),
                gathered_bytes,
                forward_scratch=2 * gathered_bytes,
                backward_scratch=gathered_bytes,
            )
            reads: tuple[int, ...] = (query, self._add_expansion(gathered, groups))
        elif shards_context:
            heads = spec.key_heads // forward_spec.tensor_ranks
            if heads % forward_spec.context_ranks:
                kv_bytes, groups = graph.sizes[query], 1
            else:
                kv_bytes = graph.sizes[key]
            query = self.add_all_to_all(query, graph.sizes[query])
            key, value = (self.add_all_to_all(x, kv_bytes) for x in (key, value))
            reads = (query, self._add_expansion(key, groups), self._add_expansion(value, groups))
        else:
            reads = (query, self._add_expansion(key, groups), self._add_expansion(value, groups))
        if (
            forward_spec.sequence_packing
            and forward_spec.prefix_tokens
            and backend.kernel is not AttentionKernel.varlen_cpu
        ):  # each text has a copy of the prefix; their number is unknown
            copies = (graph.add_op(OpWork.pointwise, (x,), graph.sizes[x]) for x in reads[1:])
            reads = (query, *copies)
        if backend.kernel is AttentionKernel.softcap:
            return self._add_context_output(self.add_softcap_attention(reads, total_keys))
        is_fused = not ((spec.dropout and forward_spec.on_cpu) or forward_spec.stores_scores)
        # A causal kernel skips half of the scores of the tokens, and none of those of the prefix.
        keys = spec.mean_keys(total_keys) + forward_spec.prefix_tokens
        pairs = forward_spec.num_tokens * keys / 2
        flops = (4.0 * pairs if is_fused else 4.0 * forward_spec.num_tokens * total_keys) * (
            spec.query_width / forward_spec.tensor_ranks
        )
        if is_fused:
            logsumexp = forward_spec.num_tokens * spec.heads // forward_spec.tensor_ranks * FP32
            mixed = graph.add_op(
                OpWork.attention,
                reads,
                graph.sizes[query],
                saved=reads,
                saves_output=True,
                extra_output_bytes=(logsumexp,),
                saved_by_selective=True,
                flops=flops,
                backward_flops=2.5 * flops,
                rate_share=1.0
                if forward_spec.on_cpu
                else causal_rate_share(total_keys, spec.head_size),
            )
        elif forward_spec.stores_scores:
            mixed = self._add_stored_scores(reads, total_keys, flops)
        else:
            mixed = self._add_unfused_attention(reads, total_keys, flops)
        if backend.kernel is AttentionKernel.segments and not gathers:
            mixed = graph.add_op(OpWork.pointwise, (mixed,), graph.sizes[mixed])
        return self._add_context_output(mixed)

    def _add_context_output(self, mixed: int) -> int:
        """Add what context-parallel ranks do with the outputs of attention."""
        forward_spec, graph = self.forward_spec, self.graph
        if forward_spec.context_ranks == 1:
            return mixed
        if forward_spec.gathers_keys:  # concatenates the outputs of the two chunks
            return graph.add_op(OpWork.pointwise, (mixed,), graph.sizes[mixed])
        return self.add_all_to_all(mixed, graph.sizes[mixed])

    def _add_expansion(self, x: int, groups: int) -> int:
        """Add the repetition of keys or values for each query head of their group."""
        if groups == 1:
            return x
        return self.graph.add_op(OpWork.pointwise, (x,), self.graph.sizes[x] * groups)

    def _add_unfused_attention(self, inputs: tuple[int, ...], total_keys: int, flops: float) -> int:
        """Add CPU attention with dropout: fp32 operators, since torch has no fused kernel for it.

        Follows ``at::_scaled_dot_product_attention_math``; each matmul reads copies.
        """
        spec, forward_spec, graph = self.spec, self.forward_spec, self.graph
        size = graph.sizes[inputs[0]]
        query_bytes = size // forward_spec.compute_element_bytes * FP32
        shards_heads = forward_spec.context_ranks > 1 and not forward_spec.gathers_keys
        key_bytes = (
            query_bytes
            if shards_heads
            else query_bytes * total_keys // forward_spec.tokens_per_sequence
        )
        score_bytes = (
            forward_spec.num_tokens * total_keys * spec.heads // forward_spec.tensor_ranks * FP32
        )
        query = graph.add_op(OpWork.pointwise, inputs[:1], query_bytes)
        key = graph.add_op(OpWork.pointwise, inputs[1:2], key_bytes)
        scores = self._add_bmm(query, key, score_bytes, flops / 2)
        mask = forward_spec.tokens_per_sequence * total_keys * FP32
        probabilities = graph.add_op(
            OpWork.pointwise,
            (scores,),
            score_bytes,
            saves_output=True,
            forward_scratch=score_bytes + mask,
        )
        dropped = self.add_dropout(probabilities, spec.dropout)
        value = graph.add_op(OpWork.pointwise, inputs[-1:], key_bytes)
        mixed = self._add_bmm(dropped, value, query_bytes, flops / 2)
        return mixed if size == query_bytes else graph.add_op(OpWork.pointwise, (mixed,), size)

    def _add_stored_scores(self, inputs: tuple[int, ...], total_keys: int, flops: float) -> int:
        """Add two batched matmuls, and a kernel that scales, masks and normalizes their scores.

        It saves probabilities, and a mask and a copy of them for dropout (Korthikanti et al., 2022,
        section 4.1: ``5 a s^2 b`` bytes).
        """
        spec, forward_spec = self.spec, self.forward_spec
        heads = spec.heads // forward_spec.tensor_ranks
        numel = forward_spec.num_tokens * total_keys * heads
        score_bytes = numel * forward_spec.compute_element_bytes
        scores = self._add_bmm(inputs[0], inputs[1], score_bytes, flops / 2)
        probabilities = self.graph.add_op(
            OpWork.pointwise, (scores,), score_bytes, saves_output=True
        )
        dropped = self.add_dropout(probabilities, spec.dropout)
        return self._add_bmm(dropped, inputs[-1], self.graph.sizes[inputs[0]], flops / 2)

    def _add_bmm(self, left: int, right: int, size: int, flops: float) -> int:
        """Add a batched matmul; an operand is saved if the other one needs a gradient."""
        graph = self.graph
        pairs = ((left, right), (right, left))
        return graph.add_op(
            OpWork.attention,
            (left, right),
            size,
            saved=tuple(operand for operand, other in pairs if graph.requires_grad[other]),
            saved_by_selective=True,
            flops=flops,
            backward_flops=2.0 * flops,
        )

    def _add_prefix(self, x: int) -> int:
        """Add the concatenation of prefix vectors with the keys, or the values, of a sequence."""
        forward_spec, size = self.forward_spec, self.graph.sizes[x]
        numel = forward_spec.prefix_tokens * self.spec.kv_width // forward_spec.tensor_ranks
        return self.graph.add_op(
            OpWork.pointwise,
            (x,),
            size + size * forward_spec.prefix_tokens // forward_spec.tokens_per_sequence,
            weight_gradient_bytes=(
                numel * forward_spec.compute_element_bytes,
                numel * forward_spec.gradient_element_bytes,
            ),
            weight_gradient_first=False,
        )

    def add_rope(self, x: int) -> int:
        """Add the rotary position embedding of queries or keys."""
        forward_spec, graph = self.forward_spec, self.graph
        size = graph.sizes[x]
        # The table is fp32: in mixed precision the product is promoted to fp32.
        wide = (
            size
            // forward_spec.compute_element_bytes
            * max(forward_spec.compute_element_bytes, forward_spec.rope_element_bytes)
        )
        # The frames of the module and of the function keep the input, and the cast ``rolled``.
        held_bytes = 0 if forward_spec.is_compiled else size
        rolled = graph.add_op(OpWork.pointwise, (x,), size)
        second = graph.add_op(OpWork.pointwise, (rolled,), wide)
        first = graph.add_op(OpWork.pointwise, (x,), wide)
        total = graph.add_op(
            OpWork.pointwise,
            (second, first, rolled),
            wide,
            gradients=(second, first),
            shares_gradient=True,
            forward_scratch=held_bytes,
        )
        if wide == size:
            return total
        return graph.add_op(OpWork.pointwise, (total,), size, forward_scratch=held_bytes + size)
