"""Operator graphs of the decoder, for the planner."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import PositionKind, QKNorm, Residual
from scalewise.models.decoder.latent_attention_ops import LatentAttentionOps
from scalewise.models.decoder.moe_ops import ExpertOps
from scalewise.models.linear_ops import FP32
from scalewise.models.loss_ops import cross_entropy_ops
from scalewise.models.op_graph import (
    ForwardSpec,
    ModelOpGraphs,
    OpGraph,
    OpWork,
    build_op_graphs,
)


@build_op_graphs.register(DecoderConfig)
def _decoder_op_graphs(spec: DecoderConfig, forward_spec: ForwardSpec) -> ModelOpGraphs:
    """Return the operator graph of each part of a decoder."""
    prompted = replace(
        forward_spec,
        tokens_per_sequence=forward_spec.tokens_per_sequence + forward_spec.prompt_tokens,
    )
    embedding = OpGraphWriter(spec, forward_spec)
    head = OpGraphWriter(spec, prompted)
    embedding.add_embedding()
    block = _block_graph(spec, prompted)
    is_trained = head.is_trained("embedding") or head.is_trained("position")
    is_first_frozen = not is_trained and forward_spec.prompt_tokens == 0
    first_block, blocks = block, tuple[OpGraph, ...]()
    if not spec.has_equal_blocks:
        first_block = _block_graph(spec, prompted, experts=spec.has_experts(0))
        dense = (first_block,) * min(spec.dense_layers, spec.layers)
        blocks = (*dense, *(block,) * (spec.layers - len(dense)))
    if is_first_frozen:
        has_experts = spec.has_experts(0)
        graph = _block_graph(spec, prompted, experts=has_experts, input_requires_grad=False)
        first_block, blocks = graph, (graph, *blocks[1:]) if blocks else ()
    head.add_head()
    shared_bytes = (
        2
        * prompted.tokens_per_sequence
        * spec.rope_table_size
        * forward_spec.rope_element_bytes
        * spec.rope_tables
    )
    if forward_spec.sequence_packing:  # each sequence has its own positions
        shared_bytes *= forward_spec.sequences
    is_chunked = 0 < forward_spec.loss_chunk < forward_spec.num_tokens
    loss = None if is_chunked else cross_entropy_ops(forward_spec, spec.output_size)
    return ModelOpGraphs(
        embedding.graph, first_block, block, head.graph, loss, shared_bytes, blocks
    )


def _block_graph(
    spec: DecoderConfig,
    forward_spec: ForwardSpec,
    *,
    experts: bool | None = None,
    input_requires_grad: bool = True,
) -> OpGraph:
    """Return the graph of a block; ``experts``: whether it has experts, None: the last block."""
    writer = OpGraphWriter(spec, forward_spec)
    experts = bool(spec.experts) if experts is None else experts
    writer.add_block(experts=experts, input_requires_grad=input_requires_grad)
    return writer.graph


class OpGraphWriter(LatentAttentionOps, ExpertOps):
    """Adds the operators of one part of a decoder to its operator graph."""

    def add_embedding(self) -> None:
        """Add the lookup of token embeddings, and of learned positions."""
        spec, forward_spec, graph = self.spec, self.forward_spec, self.graph
        size = forward_spec.num_tokens * spec.width * forward_spec.residual_element_bytes
        gradient_bytes = spec.vocabulary * spec.width * forward_spec.gradient_element_bytes
        stored_bytes = gradient_bytes // forward_spec.tensor_ranks
        # torch computes the gradient unsharded, and stores it sharded like the weight.
        computed_bytes = stored_bytes if forward_spec.has_megatron_layers else gradient_bytes
        weight = (computed_bytes, stored_bytes) if self.is_trained("embedding") else (0, 0)
        looked_up = (
            size // forward_spec.residual_element_bytes * forward_spec.gradient_element_bytes
        )
        x = graph.add_op(OpWork.pointwise, (), looked_up, weight_gradient_bytes=weight)
        if looked_up != size:
            x = self.add_cast(x, size)
        if spec.embedding_multiplier != 1.0:
            x = graph.add_op(OpWork.pointwise, (x,), size)
        x = (
            self._add_prompt(x)
            if forward_spec.prompt_tokens
            else self.add_reduction(x, scatter=forward_spec.sequence_parallel)
        )
        if spec.position is PositionKind.learned:
            table_bytes = spec.context * spec.width * forward_spec.gradient_element_bytes
            table = (table_bytes, table_bytes) if self.is_trained("position") else (0, 0)
            broadcast = 1 if forward_spec.sequence_packing else forward_spec.sequences
            positions = graph.add_op(
                OpWork.pointwise, (), looked_up // broadcast, weight_gradient_bytes=table
            )
            if looked_up != size:
                positions = self.add_cast(positions, size // broadcast)
            x = graph.add_op(OpWork.pointwise, (x, positions), graph.sizes[x], shares_gradient=True)
        self.add_dropout(x, spec.dropout)

    def add_block(self, *, experts: bool, input_requires_grad: bool) -> None:
        """Add one block, dense or with experts.

        ``input_requires_grad``: whether anything before it is trained.
        """
        x = self.graph.add_tensor(self._residual_bytes, requires_grad=input_requires_grad)
        if self.spec.residual is not Residual.sequential:
            normed = self.add_norm("attention_norm", x)
            attended = self._add_residual(x, self._add_attention_sublayer(normed))
            if self.spec.residual is Residual.parallel:
                normed = self.add_norm("feedforward_norm", x)
            self._add_residual(attended, self._add_feedforward_sublayer(normed, experts=experts))
            return
        add_feedforward = partial(self._add_feedforward_sublayer, experts=experts)
        for name, add_sublayer in (
            ("attention", self._add_attention_sublayer),
            ("feedforward", add_feedforward),
        ):
            norm, post_norm = f"{name}_norm", f"{name}_post_norm"
            normed = self.add_norm(norm, x) if norm in self.spec.block_norms else x
            branch = add_sublayer(normed)
            if post_norm in self.spec.block_norms:
                branch = self.add_norm(post_norm, branch, keeps_input=True)
            x = self._add_residual(x, branch)

    def add_head(self) -> None:
        """Add the final norm and the logits, with the loss if it is chunked."""
        spec, forward_spec = self.spec, self.forward_spec
        features = self.add_all_gather(
            self.add_norm("norm", self.graph.add_tensor(self._residual_bytes))
        )
        if forward_spec.prompt_tokens:  # prompt tokens have no logits
            self.forward_spec = forward_spec = replace(
                forward_spec,
                tokens_per_sequence=forward_spec.tokens_per_sequence - forward_spec.prompt_tokens,
            )
            features = self.graph.add_op(
                OpWork.pointwise,
                (features,),
                forward_spec.num_tokens * spec.width * forward_spec.residual_element_bytes,
            )
        if spec.feature_divisor != 1.0:
            features = self.graph.add_op(OpWork.pointwise, (features,), self.graph.sizes[features])
        if 0 < forward_spec.loss_chunk < forward_spec.num_tokens:
            self._add_chunked_loss(features)
        else:
            logits = self.add_adapted_linear(
                "head",
                features,
                spec.width,
                spec.output_size // forward_spec.tensor_ranks,
                bias=spec.head_bias,
            )
            if spec.logit_softcap is not None:
                gathers = not forward_spec.loss_parallel
                size = self.graph.sizes[logits] * (forward_spec.tensor_ranks if gathers else 1)
                tanh = self.graph.add_op(OpWork.pointwise, (logits,), size, saves_output=True)
                self.graph.add_op(OpWork.pointwise, (tanh,), size)

    @property
    def _residual_bytes(self) -> int:
        """Bytes of the residual stream between layers."""
        return (
            self.forward_spec.residual_tokens
            * self.spec.width
            * self.forward_spec.residual_element_bytes
        )

    def _add_prompt(self, x: int) -> int:
        """Add the prompt vectors; with sequence parallelism this rank continues with its shard."""
        forward_spec, graph = self.forward_spec, self.graph
        x = self.add_reduction(x, scatter=False)
        prompt_bytes = graph.sizes[x] * forward_spec.prompt_tokens
        prompt_bytes //= forward_spec.tokens_per_sequence
        vectors = forward_spec.prompt_tokens * self.spec.width * forward_spec.gradient_element_bytes
        x = graph.add_op(
            OpWork.pointwise,
            (x,),
            graph.sizes[x] + prompt_bytes,
            weight_gradient_bytes=(prompt_bytes, vectors),
        )
        return (
            graph.add_op(OpWork.communication, (x,), graph.sizes[x] // forward_spec.tensor_ranks)
            if forward_spec.sequence_parallel
            else x
        )

    def _add_chunked_loss(self, normed: int) -> None:
        """Add the head and the loss of one chunk of tokens at a time.

        If backward recomputes the logits, it accumulates the gradient of the head weight out of
        place: the sum so far, the next gradient and the new sum exist at once. If forward computes
        the gradients, it accumulates them in place and saves the sum. A compiled loss has logits
        and their gradient in the compute format only.
        """
        spec, forward_spec, graph = self.spec, self.forward_spec, self.graph
        chunk = max(1, forward_spec.loss_chunk // forward_spec.sequences) * forward_spec.sequences
        weight_numel = spec.width * spec.output_size // forward_spec.tensor_ranks
        logits, features = (
            chunk * weight_numel // spec.width * FP32,
            chunk * spec.width * forward_spec.compute_element_bytes,
        )
        if forward_spec.tensor_ranks > 1 and not forward_spec.loss_parallel:
            logits *= forward_spec.tensor_ranks
        low_precision_logits = (
            chunk
            * weight_numel
            // spec.width
            * forward_spec.compute_element_bytes
            * (forward_spec.compute_element_bytes < FP32)
        )
        # Peaks of eager loss: logits in both formats and log-probabilities, or three in fp32.
        loss_forward = low_precision_logits + 2 * logits
        loss_backward = 3 * logits
        if forward_spec.is_loss_compiled:
            logits = low_precision_logits or logits
            loss_forward, loss_backward = logits, 2 * logits
        flops = 2.0 * weight_numel * forward_spec.num_tokens
        weight_cast = weight_numel * forward_spec.compute_element_bytes * forward_spec.autocast
        trains = self.is_trained("head")
        gradient = weight_numel * forward_spec.gradient_element_bytes * trains
        loss_ops = cross_entropy_ops(forward_spec, spec.output_size)
        loss_traffic = [
            sum(count(operator) for operator in loss_ops.operators)
            for count in (loss_ops.forward_bytes, loss_ops.backward_bytes)
        ]
        if spec.logit_softcap is not None:  # backward reads the tanh of the logits
            tanh = low_precision_logits or logits
            loss_backward += tanh
            loss_forward += tanh * forward_spec.loss_in_forward
            tanh_traffic = tanh * forward_spec.num_tokens // chunk
            loss_traffic = [loss_traffic[0] + 4 * tanh_traffic, loss_traffic[1] + 5 * tanh_traffic]
        # Each chunk but the first adds its weight gradient: cast, then sum and addend are read.
        gradient_traffic = (-(-forward_spec.num_tokens // chunk) - 1) * (
            (weight_cast * trains + gradient) * forward_spec.autocast + 3 * gradient
        )
        if forward_spec.loss_in_forward:
            input_gradient = graph.sizes[normed] * graph.requires_grad[normed]
            gradient_cast = weight_cast * trains
            last_matmul = max(
                features + gradient + (gradient_cast or logits),
                low_precision_logits + max(logits, features + gradient_cast),
            )
            if forward_spec.is_loss_compiled:
                last_matmul = features + max(
                    gradient + (gradient_cast or logits), logits + gradient_cast
                )
            graph.add_op(
                OpWork.matmul,
                (normed,),
                0,
                weight_gradient_bytes=(gradient, gradient),
                extra_output_bytes=(input_gradient, gradient),
                saves_gradients=True,
                elementwise_bytes=(
                    sum(loss_traffic) + gradient_traffic,
                    2 * (input_gradient + gradient),
                ),
                forward_scratch=features
                + weight_cast
                + max(loss_forward, loss_backward, last_matmul, input_gradient),
                flops=(2 + trains) * flops,
            )
            return
        graph.add_op(
            OpWork.matmul,
            (normed,),
            0,
            saved=(normed,),
            weight_gradient_bytes=(gradient, gradient),
            forward_scratch=features + loss_forward + weight_cast,
            backward_scratch=features
            + weight_cast
            + max(loss_backward, logits + features + gradient, 2 * gradient + features),
            elementwise_bytes=(loss_traffic[0], sum(loss_traffic) + gradient_traffic),
            flops=flops,
            backward_flops=(2 + trains) * flops,
        )

    def _add_residual(self, x: int, branch: int) -> int:
        branch = self.add_dropout(branch, self.spec.dropout)
        if self.spec.residual_multiplier != 1.0:
            branch = self.graph.add_op(OpWork.pointwise, (branch,), self.graph.sizes[branch])
        return self.graph.add_op(
            OpWork.pointwise, (x, branch), self.graph.sizes[x], shares_gradient=True
        )

    def _add_attention_sublayer(self, normed: int) -> int:
        spec, forward_spec = self.spec, self.forward_spec
        features, ranks = self.add_all_gather(normed), forward_spec.tensor_ranks
        if spec.has_latent_attention:
            mixed = self.add_latent_attention(features)
        else:
            mixed = self.add_attention(*self._add_projections(features))
        return self.add_adapted_linear(
            "attention.output",
            mixed,
            spec.value_width // ranks,
            spec.width,
            bias=spec.bias,
            row_parallel=True,
            live_tensors=(features, normed),
        )

    def _add_projections(self, features: int) -> tuple[int, int, int]:
        """Add queries, keys and values with their norms and rotary positions."""
        spec, ranks = self.spec, self.forward_spec.tensor_ranks
        heads = []
        for (name, out_features, _), width in zip(
            spec.attention_linears[:3], (*spec.qk_norm_sizes, None), strict=True
        ):
            x = self.add_adapted_linear(
                name, features, spec.width, out_features // ranks, bias=spec.has_bias(name)
            )
            if spec.qk_norm is not QKNorm.none and width is not None:
                x = self.add_head_norm(f"{name}_norm", x, width)
            heads.append(x)
        query, key, value = heads
        if spec.attention_multiplier is not None or spec.head_width_ratio != 1.0:
            query = self.graph.add_op(OpWork.pointwise, (query,), self.graph.sizes[query])
        if spec.position is PositionKind.rope:
            query, key = self.add_rope(query), self.add_rope(key)
        return query, key, value

    def _add_feedforward_sublayer(self, normed: int, *, experts: bool) -> int:
        spec, graph, features = self.spec, self.graph, self.add_all_gather(normed)
        live_tensors = (features, normed)
        if not experts:
            return self._add_dense_feedforward(
                features, live_tensors, "feedforward", spec.feedforward
            )
        output = self.add_experts(features)
        if spec.shared_experts:
            hidden = spec.shared_experts * spec.hidden_dim
            shared = self._add_dense_feedforward(
                features, live_tensors, "feedforward.shared", hidden, reduces=False
            )
            output = graph.add_op(
                OpWork.pointwise, (output, shared), graph.sizes[output], shares_gradient=True
            )
        scatter = self.forward_spec.sequence_parallel
        return self.add_reduction(output, scatter=scatter, live_tensors=live_tensors)

    def _add_dense_feedforward(
        self,
        features: int,
        live_tensors: tuple[int, ...],
        name: str,
        width: int,
        *,
        reduces: bool = True,
    ) -> int:
        spec, graph, bias = self.spec, self.graph, self.spec.bias
        hidden_width = width // self.forward_spec.tensor_ranks
        if spec.has_gate:
            gate = self.add_adapted_linear(
                f"{name}.gate", features, spec.width, hidden_width, bias=bias
            )
            size = graph.sizes[gate]
            activated = graph.add_op(OpWork.pointwise, (gate,), size, saved=(gate,))
            up = self.add_adapted_linear(
                f"{name}.up", features, spec.width, hidden_width, bias=bias
            )
            hidden = graph.add_op(OpWork.pointwise, (activated, up), size, saved=(activated, up))
        else:
            up = self.add_adapted_linear(
                f"{name}.up", features, spec.width, hidden_width, bias=bias
            )
            hidden = graph.add_op(OpWork.pointwise, (up,), graph.sizes[up], saved=(up,))
        return self.add_adapted_linear(
            f"{name}.down",
            hidden,
            hidden_width,
            spec.width,
            bias=bias,
            row_parallel=True,
            reduces=reduces,
            live_tensors=live_tensors,
        )
