"""Multi-head latent attention in the operator graph of the decoder, for the planner."""

from __future__ import annotations

from scalewise.models.decoder.attention_ops import AttentionOps
from scalewise.models.decoder.kinds import PositionKind
from scalewise.models.decoder.norm_ops import NormOps
from scalewise.models.op_graph import OpWork


class LatentAttentionOps(AttentionOps, NormOps):
    """Adds the projections of multi-head latent attention to an operator graph."""

    def add_latent_attention(self, features: int) -> int:
        """Add attention up to its output projection; return the tensor that this reads."""
        spec, graph = self.spec, self.graph
        query_input = features
        if spec.query_latent_dim is not None:
            query_input = self._add_latent("query_latent", features, spec.query_latent_dim)
        query_rope = self._add_rotary("attention.query_rope", query_input)
        query = self._add_projection("attention.query", query_input)
        head_bytes = graph.sizes[query_rope] + graph.sizes[query]
        query = self._concatenate(query, query_rope, (query_input,))
        if spec.attention_multiplier is not None:
            query = graph.add_op(
                OpWork.pointwise, (query, query_input), head_bytes, gradients=(query,)
            )
        latent = self._add_latent("kv_latent", features, spec.kv_latent_dim or 0)
        key_rope = self._add_rotary("attention.key_rope", features)
        expanded = graph.add_op(OpWork.pointwise, (key_rope,), 0)
        key = self._add_projection("attention.key", latent)
        key = self._concatenate(key, expanded, (key_rope, latent), head_bytes)
        value = self._add_projection("attention.value", latent)
        value_bytes = graph.sizes[value]
        is_padded = spec.value_size < spec.head_size
        if is_padded:
            value = graph.add_op(OpWork.pointwise, (value, latent), head_bytes, gradients=(value,))
        mixed = self.add_attention(query, key, value)
        return graph.add_op(OpWork.pointwise, (mixed,), value_bytes) if is_padded else mixed

    def _concatenate(
        self, x: int, rotary: int, live_tensors: tuple[int, ...], size: int = 0
    ) -> int:
        """Add the concatenation of both parts of each head.

        The gradient of the rotary part is a view; that of the other part is copied for its matmul.
        """
        size = size or self.graph.sizes[x] + self.graph.sizes[rotary]
        return self.graph.add_op(
            OpWork.pointwise,
            (x, rotary, *live_tensors),
            size,
            gradients=(x, rotary),
            gradient_views=(rotary,),
        )

    def _add_latent(self, name: str, features: int, width: int) -> int:
        """Add the projection of a latent, and its norm."""
        latent = self._add_projection(f"attention.{name}", features)
        return self.add_head_norm(f"attention.{name}_norm", latent, width)

    def _add_rotary(self, name: str, features: int) -> int:
        """Add the projection of features with rotary positions."""
        x = self._add_projection(name, features)
        return self.add_rope(x) if self.spec.position is PositionKind.rope else x

    def _add_projection(self, name: str, x: int) -> int:
        ((out, into),) = (shape for other, *shape in self.spec.attention_linears if other == name)
        return self.add_adapted_linear(name, x, into, out)
