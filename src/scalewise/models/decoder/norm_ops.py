"""Normalization layers in the operator graph of the decoder, for the planner."""

from __future__ import annotations

from scalewise.models.decoder.adapter_ops import AdapterOps
from scalewise.models.decoder.kinds import NormKind
from scalewise.models.linear_ops import FP32
from scalewise.models.op_graph import OpWork


class NormOps(AdapterOps):
    """Adds RMSNorm and LayerNorm to an operator graph."""

    def add_norm(self, name: str, x: int, *, keeps_input: bool = False) -> int:
        """Add a norm of the residual stream, or of the output of a sublayer.

        ``keeps_input``: whether only the call of the norm keeps its input alive.
        """
        forward_spec, spec = self.forward_spec, self.spec
        element_bytes = forward_spec.residual_element_bytes
        return self._add_norm(
            name,
            x,
            spec.norm,
            forward_spec.residual_tokens,
            spec.width,
            element_bytes,
            keeps_input=keeps_input,
        )

    def add_head_norm(self, name: str, x: int, width: int) -> int:
        """Add the RMSNorm of queries or keys, over ``width`` features."""
        element_bytes = self.forward_spec.compute_element_bytes
        rows = self.graph.sizes[x] // element_bytes // width
        return self._add_norm(
            name, x, NormKind.rmsnorm, rows, width, element_bytes, keeps_input=True
        )

    def _add_norm(
        self,
        name: str,
        x: int,
        norm: NormKind,
        rows: int,
        width: int,
        element_bytes: int,
        *,
        keeps_input: bool = False,
    ) -> int:
        forward_spec, graph, trains = self.forward_spec, self.graph, self.is_trained(name)
        size, small = graph.sizes[x], rows * FP32
        biased = self.spec.bias and norm is NormKind.layernorm
        trained_numel = width * (1 + biased) * trains
        weight = (trained_numel * forward_spec.gradient_element_bytes,) * 2
        is_fused = not (forward_spec.on_cpu or forward_spec.unfused_norms)
        if norm is NormKind.layernorm or is_fused:
            mean = rows * (element_bytes if forward_spec.on_cpu else FP32)
            extra = (mean, mean) if norm is NormKind.layernorm else (small,)
            return graph.add_op(
                OpWork.pointwise,
                (x,),
                size,
                saved=(x,),
                extra_output_bytes=extra,
                weight_gradient_bytes=weight,
            )
        fp32_bytes = rows * width * FP32
        fp32 = self.add_cast(x, fp32_bytes) if size != fp32_bytes else x
        square = graph.add_op(
            OpWork.pointwise, (fp32,), fp32_bytes, saved=(fp32,), backward_scratch=2 * fp32_bytes
        )
        mean = graph.add_op(OpWork.pointwise, (square,), small)
        root = graph.add_op(OpWork.pointwise, (mean,), small, saves_output=True)
        # The composite operator keeps them until it returns; a residual stream is live anyway.
        live_tensors = (*dict.fromkeys((x, fp32)), root) if keeps_input else ()
        scaled = graph.add_op(
            OpWork.pointwise,
            (fp32, root),
            fp32_bytes,
            saved=(fp32, root),
            backward_scratch=fp32_bytes - small,
        )
        out = graph.add_op(
            OpWork.pointwise,
            (scaled, *live_tensors),
            fp32_bytes,
            saved=(scaled,) if trains else (),
            gradients=(scaled,),
            weight_gradient_bytes=weight,
            backward_scratch=fp32_bytes * trains,
        )
        if size == fp32_bytes:
            return out
        return graph.add_op(OpWork.pointwise, (out, *live_tensors), size, gradients=(out,))
