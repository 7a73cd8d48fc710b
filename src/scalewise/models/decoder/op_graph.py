"""The decoder's operators as it runs them, for the planner: sizes, no tensors."""

from __future__ import annotations

from dataclasses import replace

from scalewise.models import cross_entropy
from scalewise.models.decoder.attention_ops import AttentionOps
from scalewise.models.decoder.config import ActivationKind, DecoderConfig, NormKind, PositionKind
from scalewise.models.decoder.linear_ops import FP32
from scalewise.models.op_graph import ForwardSpec, ModelOpGraphs, OpWork


def decoder_op_graphs(spec: DecoderConfig, forward_spec: ForwardSpec) -> ModelOpGraphs:
    """Returns the operators of a decoder, part by part."""
    longer = replace(
        forward_spec,
        tokens_per_sequence=forward_spec.tokens_per_sequence + forward_spec.prompt_tokens,
    )
    first = OpGraphWriter(spec, forward_spec)
    start, block, last = (OpGraphWriter(spec, longer) for _ in range(3))
    first.add_embedding()
    start.add_block(
        input_requires_grad=start.is_trained("embedding")
        or start.is_trained("position")
        or forward_spec.prompt_tokens > 0
    )
    block.add_block()
    last.add_head()
    rope = spec.position is PositionKind.rope
    rotations = (
        2 * longer.tokens_per_sequence * spec.head_size * forward_spec.rope_element_bytes * rope
    )
    row = forward_spec.tokens_per_sequence * forward_spec.context_ranks
    if forward_spec.sequence_packing:  # rows differ, and each has a mask of whole rows
        rotations = (
            rotations * forward_spec.sequences
            + forward_spec.sequences
            * row
            * (row + forward_spec.prefix_tokens)
            * forward_spec.compute_element_bytes
        )
    elif forward_spec.prefix_tokens:
        rotations += row * (row + forward_spec.prefix_tokens) * forward_spec.compute_element_bytes
    in_pieces = 0 < forward_spec.loss_chunk < forward_spec.num_tokens
    loss = None if in_pieces else cross_entropy.cross_entropy_ops(forward_spec, spec.output_size)
    return ModelOpGraphs(first.graph, start.graph, block.graph, last.graph, loss, rotations)


class OpGraphWriter(AttentionOps):
    """Writes the tape of one part."""

    def add_embedding(self) -> None:
        """Writes the look-up of tokens, and of their places."""
        spec, run, graph = self.spec, self.forward_spec, self.graph
        size = run.num_tokens * spec.width * run.residual_element_bytes
        count = spec.vocabulary * spec.width * run.gradient_element_bytes
        # Its gradient is made whole, and cut as the weight is.
        weight = (count, count // run.tensor_ranks) if self.is_trained("embedding") else (0, 0)
        x = graph.add_op(OpWork.pointwise, (), size, weight_gradient_bytes=weight)
        x = (
            self._add_prompt(x)
            if run.prompt_tokens
            else self.add_reduction(x, scatter=run.sequence_parallel)
        )
        if spec.position is PositionKind.learned:
            place = spec.context * spec.width * run.gradient_element_bytes
            table = (place, place) if self.is_trained("position") else (0, 0)
            rows = 1 if run.sequence_packing else run.sequences
            row = graph.add_op(
                OpWork.pointwise, (), graph.sizes[x] // rows, weight_gradient_bytes=table
            )
            x = graph.add_op(OpWork.pointwise, (x, row), graph.sizes[x], shares_gradient=True)
        self.add_dropout(x, spec.dropout)

    def add_block(self, *, input_requires_grad: bool = True) -> None:
        """Writes one layer; ``input_requires_grad``: whether something before it is."""
        x = self.graph.add_tensor(self._residual_bytes, requires_grad=input_requires_grad)
        x2 = self._add_residual(
            x, self._add_attention_sublayer(self._add_norm("attention_norm", x))
        )
        self._add_residual(
            x2, self._add_feedforward_sublayer(self._add_norm("feedforward_norm", x2))
        )

    def add_head(self) -> None:
        """Writes the last norm and the logits; with them the loss, if it is taken in pieces."""
        spec, run = self.spec, self.forward_spec
        read = self.add_all_gather(
            self._add_norm("norm", self.graph.add_tensor(self._residual_bytes))
        )
        if run.prompt_tokens:  # which have no logits
            self.forward_spec = run = replace(
                run, tokens_per_sequence=run.tokens_per_sequence - run.prompt_tokens
            )
            read = self.graph.add_op(
                OpWork.pointwise, (read,), run.num_tokens * spec.width * run.residual_element_bytes
            )
        if 0 < run.loss_chunk < run.num_tokens:
            self._add_chunked_loss(read)
        else:
            self._add_adapted_linear("head", read, spec.width, spec.output_size // run.tensor_ranks)

    def is_trained(self, name: str) -> bool:
        """Returns whether a module's own weights are trained."""
        owner = "embedding" if name == "head" and self.spec.tied else name
        return (
            not self.forward_spec.has_frozen_weights
            or owner in self.forward_spec.fully_trained_modules
        )

    @property
    def _residual_bytes(self) -> int:
        """Returns the bytes of what goes from layer to layer."""
        return (
            self.forward_spec.residual_tokens
            * self.spec.width
            * self.forward_spec.residual_element_bytes
        )

    def _add_prompt(self, x: int) -> int:
        """Writes how vectors come before all tokens, of which a tensor rank goes on with some."""
        run, graph = self.forward_spec, self.graph
        x = self.add_reduction(x, scatter=False)
        more = graph.sizes[x] * run.prompt_tokens // run.tokens_per_sequence
        vectors = run.prompt_tokens * self.spec.width * run.gradient_element_bytes
        x = graph.add_op(
            OpWork.pointwise, (x,), graph.sizes[x] + more, weight_gradient_bytes=(more, vectors)
        )
        return (
            graph.add_op(OpWork.communication, (x,), graph.sizes[x] // run.tensor_ranks)
            if run.sequence_parallel
            else x
        )

    def _add_chunked_loss(self, normed: int) -> None:
        """Writes head and loss of a piece of the tokens at a time.

        Made once more for backward, gradients of the head's weight are summed out of place: the
        sum so far, one more, and both. Taken in forward they are summed in place, and held.
        """
        spec, run, graph = self.spec, self.forward_spec, self.graph
        piece = max(1, run.loss_chunk // run.sequences) * run.sequences
        count = spec.width * spec.output_size // run.tensor_ranks
        logits, read = (
            piece * count // spec.width * FP32,
            piece * spec.width * run.compute_element_bytes,
        )
        if run.tensor_ranks > 1 and not run.loss_parallel:
            logits *= run.tensor_ranks
        made = (
            piece
            * count
            // spec.width
            * run.compute_element_bytes
            * (run.compute_element_bytes < FP32)
        )
        flops = 2.0 * count * run.num_tokens
        copy = count * run.compute_element_bytes * run.autocast
        trains = self.is_trained("head")
        gradient = count * run.gradient_element_bytes * trains
        if run.loss_in_forward:
            of_x = graph.sizes[normed] * graph.requires_grad[normed]
            computed = count * run.compute_element_bytes * run.autocast * trains
            last = max(read + gradient + (computed or logits), made + max(logits, read + computed))
            graph.add_op(
                OpWork.matmul,
                (normed,),
                0,
                weight_gradient_bytes=(gradient, gradient),
                extra_output_bytes=(of_x, gradient),
                saves_gradients=True,
                forward_scratch=read + copy + max(made + 2 * logits, 3 * logits, last, of_x),
                flops=(2 + trains) * flops,
            )
            return
        graph.add_op(
            OpWork.matmul,
            (normed,),
            0,
            saved=(normed,),
            weight_gradient_bytes=(gradient, gradient),
            forward_scratch=read + made + 2 * logits + copy,
            backward_scratch=read
            + copy
            + max(3 * logits, logits + read + gradient, 2 * gradient + read),
            flops=flops,
            backward_flops=(2 + trains) * flops,
        )

    def _add_residual(self, x: int, branch: int) -> int:
        branch = self.add_dropout(branch, self.spec.dropout)
        return self.graph.add_op(
            OpWork.pointwise, (x, branch), self.graph.sizes[x], shares_gradient=True
        )

    def _add_norm(self, name: str, x: int) -> int:
        spec, run, graph = self.spec, self.forward_spec, self.graph
        trains = self.is_trained(name)
        size, small = graph.sizes[x], run.residual_tokens * FP32
        biased = spec.bias and spec.norm is NormKind.layernorm
        count = spec.width * (1 + biased) * trains
        weight = (count * run.gradient_element_bytes,) * 2
        if spec.norm is NormKind.layernorm or not run.on_cpu:
            mean = run.residual_tokens * (run.residual_element_bytes if run.on_cpu else FP32)
            extra = (mean, mean) if spec.norm is NormKind.layernorm else (small,)
            return graph.add_op(
                OpWork.pointwise,
                (x,),
                size,
                saved=(x,),
                extra_output_bytes=extra,
                weight_gradient_bytes=weight,
            )
        whole = run.residual_tokens * spec.width * FP32
        wide = self.add_cast(x, whole) if size != whole else x
        square = graph.add_op(
            OpWork.pointwise, (wide,), whole, saved=(wide,), backward_scratch=2 * whole
        )
        mean = graph.add_op(OpWork.pointwise, (square,), small)
        root = graph.add_op(OpWork.pointwise, (mean,), small, saves_output=True)
        scaled = graph.add_op(
            OpWork.pointwise,
            (wide, root),
            whole,
            saved=(wide, root),
            backward_scratch=whole - small,
        )
        out = graph.add_op(
            OpWork.pointwise,
            (scaled,),
            whole,
            saved=(scaled,) if trains else (),
            weight_gradient_bytes=weight,
            backward_scratch=whole * trains,
        )
        return out if size == whole else self.add_cast(out, size)

    def _add_adapted_linear(
        self,
        name: str,
        x: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        row_parallel: bool = False,
        live_tensors: tuple[int, ...] = (),
    ) -> int:
        """Writes a linear layer and, where it is adapted, the two narrow ones beside it.

        ``row_parallel``: whether tensor ranks have parts of its sums, as each reads some of the
        features.
        """
        run, graph = self.forward_spec, self.graph
        scaled = name in run.scaled_layers
        x = self._add_ia3_scale(x, in_features, casts_input=True) if row_parallel and scaled else x
        if name in run.fp8_layers:
            written = self.add_fp8_linear(x, in_features, out_features, live_tensors, bias=bias)
        elif name in run.fake_quantized_layers:
            written = self.add_fake_quantized_linear(x, in_features, out_features, live_tensors)
        elif name in run.packed_layers:
            written = self.add_unpacked_linear(x, in_features, out_features, live_tensors)
        else:
            trains = self.is_trained(name)
            written = self.add_linear(
                x, in_features, out_features, bias=bias, trains=trains, live_tensors=live_tensors
            )
        written = (
            self.add_reduction(
                written, scatter=run.sequence_parallel, live_tensors=(x, *live_tensors)
            )
            if row_parallel
            else written
        )
        if scaled and not row_parallel:
            return self._add_ia3_scale(written, out_features)
        if name not in run.adapted_layers:
            return written
        size = graph.sizes[written]
        if run.has_magnitudes and bias:
            written = graph.add_op(OpWork.pointwise, (written,), size)
        narrow = self.add_linear(
            self.add_dropout(x, run.adapter_dropout), in_features, run.adapter_rank
        )
        narrow = (
            self.add_reduction(narrow, scatter=run.sequence_parallel) if row_parallel else narrow
        )
        wide = self.add_linear(
            narrow,
            run.adapter_rank,
            out_features,
            tokens=run.residual_tokens if row_parallel else run.num_tokens,
        )
        if run.has_magnitudes:
            self._add_dora_norms(in_features, out_features)
        weighed = graph.add_op(OpWork.pointwise, (wide,), size)
        summed = graph.add_op(OpWork.pointwise, (written, weighed), size, shares_gradient=True)
        if not run.has_magnitudes:
            return summed
        grown = self._add_vector_mul(summed, size, out_features)
        return (
            graph.add_op(OpWork.pointwise, (grown,), size, shares_gradient=True) if bias else grown
        )

    def _add_dora_norms(self, in_features: int, out_features: int) -> None:
        """Writes how rows of W + scale B A are measured: of W and A, of A, and of B with that."""
        run, rank = self.forward_spec, self.forward_spec.adapter_rank
        for flops, rows in (
            (in_features * out_features, out_features),
            (in_features * rank, rank),
            (rank * out_features, out_features),
        ):
            self.graph.add_op(
                OpWork.matmul,
                (),
                rows * rank * run.gradient_element_bytes,
                saved_by_selective=True,
                flops=2.0 * rank * flops,
            )

    def _add_ia3_scale(self, x: int, features: int, *, casts_input: bool = False) -> int:
        """Writes PEFT's product of features and scales, made in the format of the scales.

        ``casts_input``: whether what is scaled is cast before, and not by the product itself.
        """
        size = self.graph.sizes[x]
        wide = (
            size
            // self.forward_spec.compute_element_bytes
            * self.forward_spec.gradient_element_bytes
        )
        given = self.add_cast(x, wide) if casts_input and wide != size else x
        scaled = self._add_vector_mul(given, wide, features)
        return scaled if wide == size else self.add_cast(scaled, size)

    def _add_vector_mul(self, x: int, size: int, features: int) -> int:
        """Writes a product, of ``size`` bytes, with a vector that is trained."""
        vector = features * self.forward_spec.gradient_element_bytes
        return self.graph.add_op(
            OpWork.pointwise,
            (x,),
            size,
            saved=(x,),
            weight_gradient_bytes=(vector, vector),
            backward_scratch=size,
        )

    def _add_rope(self, x: int) -> int:
        run, graph = self.forward_spec, self.graph
        size = graph.sizes[x]
        # The table is fp32: in a mixed pass what it multiplies becomes so.
        wide = (
            size
            // run.compute_element_bytes
            * max(run.compute_element_bytes, run.rope_element_bytes)
        )
        rolled = graph.add_op(OpWork.pointwise, (x,), size)
        second = graph.add_op(OpWork.pointwise, (rolled,), wide)
        first = graph.add_op(OpWork.pointwise, (x,), wide)
        total = graph.add_op(
            OpWork.pointwise,
            (second, first, rolled),
            wide,
            gradients=(second, first),
            shares_gradient=True,
        )
        return total if wide == size else self.add_cast(total, size)

    def _add_attention_sublayer(self, normed: int) -> int:
        spec, run = self.spec, self.forward_spec
        read, cut = self.add_all_gather(normed), run.tensor_ranks
        query = self._add_adapted_linear(
            "attention.query", read, spec.width, spec.query_width // cut, bias=spec.bias
        )
        key = self._add_adapted_linear(
            "attention.key", read, spec.width, spec.kv_width // cut, bias=spec.bias
        )
        value = self._add_adapted_linear(
            "attention.value", read, spec.width, spec.kv_width // cut, bias=spec.bias
        )
        if spec.position is PositionKind.rope:
            query, key = self._add_rope(query), self._add_rope(key)
        mixed = self.add_attention(query, key, value)
        return self._add_adapted_linear(
            "attention.output",
            mixed,
            spec.query_width // cut,
            spec.width,
            bias=spec.bias,
            row_parallel=True,
            live_tensors=(read, normed),
        )

    def _add_feedforward_sublayer(self, normed: int) -> int:
        spec, graph, bias = self.spec, self.graph, self.spec.bias
        read, hidden_width = (
            self.add_all_gather(normed),
            self.spec.feedforward // self.forward_spec.tensor_ranks,
        )
        if spec.activation is ActivationKind.swiglu:
            gate = self._add_adapted_linear(
                "feedforward.gate", read, spec.width, hidden_width, bias=bias
            )
            size = graph.sizes[gate]
            opened = graph.add_op(OpWork.pointwise, (gate,), size, saved=(gate,))
            up = self._add_adapted_linear(
                "feedforward.up", read, spec.width, hidden_width, bias=bias
            )
            hidden = graph.add_op(OpWork.pointwise, (opened, up), size, saved=(opened, up))
        else:
            up = self._add_adapted_linear(
                "feedforward.up", read, spec.width, hidden_width, bias=bias
            )
            hidden = graph.add_op(OpWork.pointwise, (up,), graph.sizes[up], saved=(up,))
        return self._add_adapted_linear(
            "feedforward.down",
            hidden,
            hidden_width,
            spec.width,
            bias=bias,
            row_parallel=True,
            live_tensors=(read, normed),
        )
