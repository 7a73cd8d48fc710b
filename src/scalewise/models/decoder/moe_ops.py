"""Mixture of experts in the operator graph of the decoder, for the planner."""

from __future__ import annotations

from scalewise.models.decoder.adapter_ops import AdapterOps
from scalewise.models.decoder.moe_config import EXPERTS_MODULE, RouterScore
from scalewise.models.linear_ops import FP32
from scalewise.models.op_graph import OpWork

INT64, BF16 = 8, 2
"""Bytes per element."""


class ExpertOps(AdapterOps):
    """Adds routing and experts to an operator graph.

    Sizes do not depend on the balance of experts. Without capacity, the rows of all experts
    together are the assignments: the tokens times the experts per token. With expert parallelism,
    those of a rank depend on it; the load is balanced here. With capacity, each expert has as many.
    """

    @property
    def _num_assignments(self) -> int:
        return self.forward_spec.num_tokens * self.spec.experts_per_token

    @property
    def _num_rows(self) -> int:
        """Number of rows of all experts, for the tokens of this rank."""
        capacity = self.spec.expert_capacity(self.forward_spec.num_tokens)
        return self._num_assignments if capacity is None else capacity * self.spec.routed_experts

    def add_experts(self, x: int) -> int:
        """Add the router, the routed experts and the weighted sum of their outputs.

        ``x``: all tokens; tensor-parallel ranks compute a part of each expert, and a partial sum.
        """
        spec, forward_spec, graph = self.spec, self.forward_spec, self.graph
        tokens = forward_spec.num_tokens
        num_rows, num_assignments = self._num_rows, self._num_assignments
        is_limited = spec.capacity_factor is not None
        row_bytes = num_rows * spec.width * forward_spec.compute_element_bytes
        hidden_dim = spec.hidden_dim // forward_spec.tensor_ranks
        weights, order, inverse = self._add_routing(x)
        sorted_rows = graph.add_op(
            OpWork.pointwise,
            (x, order, inverse),
            num_rows * graph.sizes[x] // tokens,
            saved=(inverse,),
            gradients=(x,),
            forward_scratch=num_rows * INT64,
            backward_scratch=num_assignments * (graph.sizes[x] // tokens + INT64 * is_limited),
        )
        order_rows = None
        if forward_spec.expert_ranks > 1:
            sorted_rows, order_rows = self._send(sorted_rows)
        gate = self._add_expert_linear("gate", sorted_rows, spec.width, hidden_dim)
        size = graph.sizes[gate]
        activated = graph.add_op(OpWork.pointwise, (gate,), size, saved=(gate,))
        up = self._add_expert_linear("up", sorted_rows, spec.width, hidden_dim)
        hidden = graph.add_op(
            OpWork.pointwise,
            (activated, up, sorted_rows),
            size,
            saved=(activated, up),
            gradients=(activated, up),
        )
        output = self._add_expert_linear("down", hidden, hidden_dim, spec.width)
        if order_rows is not None:
            output = self._permute(output, *reversed(order_rows))
            output = self._add_all_to_all(output, row_bytes)
        if graph.sizes[weights] != num_rows * forward_spec.compute_element_bytes:
            weights = self.add_cast(weights, num_rows * forward_spec.compute_element_bytes)
        weighted = graph.add_op(
            OpWork.pointwise,
            (output, weights),
            row_bytes,
            saved=(
                *((output,) if graph.requires_grad[weights] else ()),
                *((weights,) if graph.requires_grad[output] else ()),
            ),
            backward_scratch=row_bytes,
        )
        token_bytes = tokens * spec.width * forward_spec.compute_element_bytes
        if is_limited:
            return graph.add_op(
                OpWork.pointwise,
                (weighted, order, inverse, x),
                token_bytes,
                saved=(order, inverse),
                gradients=(weighted,),
                forward_scratch=num_assignments * (token_bytes // tokens + INT64),
                backward_scratch=num_rows * INT64,
            )
        by_token = graph.add_op(
            OpWork.pointwise,
            (weighted, inverse),
            row_bytes,
            gradients=(weighted,),
            shares_gradient=True,
        )
        return graph.add_op(
            OpWork.pointwise,
            (by_token, weighted, order, x),
            token_bytes,
            saved=(order, inverse),
            gradients=(by_token,),
            backward_scratch=num_rows * INT64,
        )

    def _send(self, rows: int) -> tuple[int, tuple[int, int]]:
        """Add the all-to-all of rows to their experts.

        Returns the received rows, sorted by expert, and their order with its inverse.
        """
        graph, num_rows = self.graph, self._num_expert_rows
        indices = num_rows * INT64
        order = graph.add_op(
            OpWork.pointwise, (rows,), indices, gradients=(), forward_scratch=2 * indices
        )
        inverse = graph.add_op(
            OpWork.pointwise, (order,), indices, gradients=(), forward_scratch=indices
        )
        received = self._add_all_to_all(rows, graph.sizes[rows] * num_rows // self._num_rows)
        return self._permute(received, order, inverse), (order, inverse)

    @property
    def _num_expert_rows(self) -> int:
        """Number of rows of the experts of this rank."""
        load = 1.0 if self.spec.capacity_factor is not None else self.forward_spec.expert_load
        return round(self._num_rows * load)

    def _add_all_to_all(self, rows: int, size: int) -> int:
        return self.graph.add_op(OpWork.communication, (rows,), size, saved_by_selective=True)

    def _permute(self, rows: int, order: int, inverse: int) -> int:
        return self.graph.add_op(
            OpWork.pointwise,
            (rows, order),
            self.graph.sizes[rows],
            saved=(inverse,),
            gradients=(rows,),
        )

    def _add_routing(self, x: int) -> tuple[int, int, int]:
        """Add the router; return the tensors of weights, order and inverse order of the rows."""
        spec, graph, tokens = self.spec, self.graph, self.forward_spec.num_tokens
        num_assignments, num_rows = self._num_assignments, self._num_rows
        trains = self.is_trained("feedforward.router")
        logits = self.add_linear(x, spec.width, spec.routed_experts, trains=trains)
        score_bytes, weight_bytes = tokens * spec.routed_experts * FP32, num_assignments * FP32
        if graph.sizes[logits] != score_bytes:
            logits = self.add_cast(logits, score_bytes)
        scores = graph.add_op(OpWork.pointwise, (logits,), score_bytes, saves_output=True)
        experts = num_assignments * INT64
        weights = graph.add_op(
            OpWork.pointwise, (scores,), weight_bytes, extra_output_bytes=(experts,)
        )
        if spec.norm_topk:
            total = graph.add_op(OpWork.pointwise, (weights,), tokens * FP32)
            weights = graph.add_op(
                OpWork.pointwise, (weights, total), weight_bytes, saved=(weights, total)
            )
        if spec.routed_scaling != 1.0:
            weights = graph.add_op(OpWork.pointwise, (weights,), weight_bytes)
        if spec.aux_loss:
            is_sigmoid = spec.router_score is RouterScore.sigmoid
            weights = graph.add_op(
                OpWork.pointwise,
                (weights, scores),
                weight_bytes,
                shares_gradient=True,
                forward_scratch=score_bytes * is_sigmoid,
                backward_scratch=score_bytes,
            )
        if spec.router_z_loss:
            weights = graph.add_op(
                OpWork.pointwise,
                (weights, logits),
                weight_bytes,
                saved=(logits,),
                shares_gradient=True,
                backward_scratch=score_bytes,
            )
        order = graph.add_op(
            OpWork.pointwise, (weights,), experts, gradients=(), forward_scratch=2 * experts
        )
        inverse = graph.add_op(
            OpWork.pointwise, (order,), experts, gradients=(), forward_scratch=experts
        )
        if spec.capacity_factor is not None:
            order = graph.add_op(
                OpWork.pointwise,
                (inverse,),
                num_rows * INT64,
                gradients=(),
                forward_scratch=num_rows * INT64,
            )
            filled = graph.add_op(OpWork.pointwise, (order,), num_rows, gradients=())
            weights = graph.add_op(
                OpWork.pointwise,
                (weights, order),
                num_rows * FP32,
                saved=(order,),
                gradients=(weights,),
            )
            sorted_weights = graph.add_op(
                OpWork.pointwise,
                (weights, filled),
                num_rows * FP32,
                saved=(filled,),
                gradients=(weights,),
            )
            return sorted_weights, order, inverse
        sorted_weights = graph.add_op(
            OpWork.pointwise, (weights, order), weight_bytes, saved=(order,), gradients=(weights,)
        )
        return sorted_weights, order, inverse

    def _add_expert_linear(self, name: str, x: int, in_features: int, out_features: int) -> int:
        """Add the matmul of all experts and, if they are adapted, those of their LoRA factors."""
        forward_spec, graph, layer = self.forward_spec, self.graph, f"{EXPERTS_MODULE}.{name}"
        trains = self.is_trained(layer)
        output = self._add_grouped_mm(x, in_features, out_features, trains=trains)
        if layer not in forward_spec.adapted_layers:
            return output
        narrow = self._add_grouped_mm(x, in_features, forward_spec.adapter_rank)
        scaled = graph.add_op(OpWork.pointwise, (narrow, x), graph.sizes[narrow])
        update = self._add_grouped_mm(scaled, forward_spec.adapter_rank, out_features)
        size = graph.sizes[output]
        return graph.add_op(OpWork.pointwise, (output, update), size, shares_gradient=True)

    def _add_grouped_mm(
        self, x: int, in_features: int, out_features: int, *, trains: bool = True
    ) -> int:
        forward_spec = self.forward_spec
        return self.add_linear(
            x,
            in_features,
            out_features,
            trains=trains,
            tokens=self._num_expert_rows,
            matrices=self.spec.routed_experts // forward_spec.expert_ranks,
            scales_gradient=forward_spec.expert_ranks > 1,
            # CUDA's kernel of bf16 matmuls is part of torch; the loop over experts is not.
            has_joint_backward=forward_spec.on_cpu or forward_spec.compute_element_bytes != BF16,
        )
