"""Linear layers with adapters, and collectives, in the operator graph of the decoder."""

from __future__ import annotations

from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.linear_ops import LinearOps
from scalewise.models.op_graph import ForwardSpec, OpWork


class AdapterOps(LinearOps):
    """Adds adapted linear layers, and the collectives of a tensor or context parallel rank."""

    def __init__(self, spec: DecoderConfig, forward_spec: ForwardSpec) -> None:
        super().__init__(forward_spec)
        self.spec = spec

    def add_all_gather(self, x: int) -> int:
        """Add the all-gather of sequence-parallel tokens; its backward is a reduce-scatter."""
        forward_spec, graph = self.forward_spec, self.graph
        if forward_spec.tensor_ranks == 1 or not forward_spec.sequence_parallel:
            return x
        size = graph.sizes[x] * forward_spec.tensor_ranks
        gathered = graph.add_op(
            OpWork.communication, (x,), size, forward_scratch=size, backward_scratch=size
        )
        if forward_spec.has_megatron_layers:
            self.token_shards[gathered] = x
        return gathered

    def add_reduction(self, x: int, *, scatter: bool, live_tensors: tuple[int, ...] = ()) -> int:
        """Add the all-reduce, or reduce-scatter, of partial sums on tensor-parallel ranks.

        Args:
            x: Partial sum.
            scatter: Whether the result is sharded by tokens (reduce-scatter).
            live_tensors: Tensors that stay alive during the collective.
        """
        forward_spec, graph = self.forward_spec, self.graph
        if forward_spec.tensor_ranks == 1:
            return x
        size = graph.sizes[x]
        if not scatter:
            return graph.add_op(
                OpWork.communication,
                (x, *live_tensors),
                size,
                gradients=(x,),
                shares_gradient=True,
                saved_by_selective=True,
            )
        return graph.add_op(
            OpWork.communication,
            (x, *live_tensors),
            size // forward_spec.tensor_ranks,
            gradients=(x,),
            forward_scratch=size,
            backward_scratch=size,
            saved_by_selective=True,
        )

    def add_all_to_all(self, x: int, size: int) -> int:
        """Add an all-to-all with its packing, unpacking and transposition."""
        return self.graph.add_op(
            OpWork.communication,
            (x,),
            size,
            forward_scratch=2 * size,
            backward_scratch=2 * size,
            saved_by_selective=True,
        )

    def is_trained(self, name: str) -> bool:
        """Whether the weights of a module are trained; adapter weights do not count."""
        owner = "embedding" if name == "head" and self.spec.tied else name
        return (
            not self.forward_spec.has_frozen_weights
            or owner in self.forward_spec.fully_trained_modules
        )

    def add_dropout(self, x: int, probability: float) -> int:
        """Add dropout, unless ``probability`` is 0."""
        if not probability:
            return x
        size = self.graph.sizes[x]
        # Without torch.compile, the CPU's mask has the dtype of its input; others are boolean.
        has_float_mask = self.forward_spec.on_cpu and not self.forward_spec.is_compiled
        mask = size if has_float_mask else size // self.forward_spec.residual_element_bytes
        return self.graph.add_op(OpWork.pointwise, (x,), size, extra_output_bytes=(mask,))

    def add_adapted_linear(
        self,
        name: str,
        x: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        row_parallel: bool = False,
        reduces: bool = True,
        live_tensors: tuple[int, ...] = (),
    ) -> int:
        """Add a linear layer and, if it is adapted, the two matmuls of its adapter.

        ``row_parallel``: whether tensor-parallel ranks compute partial sums of the output, since
        the input features are sharded. ``reduces``: whether they are summed here.
        """
        forward_spec, graph = self.forward_spec, self.graph
        scaled = name in forward_spec.scaled_layers
        x = self._add_ia3_scale(x, in_features, casts_input=True) if row_parallel and scaled else x
        if name in forward_spec.fp8_layers:
            fused = forward_spec.fuses_fp8_casts
            add_linear = self.add_fused_fp8_linear if fused else self.add_fp8_linear
            trains = self.is_trained(name) or not fused
            output = add_linear(
                x, in_features, out_features, live_tensors, bias=bias, trains=trains
            )
        elif name in forward_spec.fake_quantized_layers:
            output = self.add_fake_quantized_linear(x, in_features, out_features, live_tensors)
        elif name in forward_spec.packed_layers:
            output = self.add_unpacked_linear(x, in_features, out_features, live_tensors)
        else:
            trains = self.is_trained(name)
            output = self.add_linear(
                x, in_features, out_features, bias=bias, trains=trains, live_tensors=live_tensors
            )
        output = (
            self.add_reduction(
                output, scatter=forward_spec.sequence_parallel, live_tensors=(x, *live_tensors)
            )
            if row_parallel and reduces
            else output
        )
        if scaled and not row_parallel:
            return self._add_ia3_scale(output, out_features)
        if name not in forward_spec.adapted_layers:
            return output
        size = graph.sizes[output]
        if forward_spec.has_magnitudes and bias:
            output = graph.add_op(OpWork.pointwise, (output,), size)
        narrow = self.add_linear(
            self.add_dropout(x, forward_spec.adapter_dropout),
            in_features,
            forward_spec.adapter_rank,
        )
        reduces_narrow = row_parallel and reduces
        if reduces_narrow:
            narrow = self.add_reduction(narrow, scatter=forward_spec.sequence_parallel)
        wide = self.add_linear(
            narrow,
            forward_spec.adapter_rank,
            out_features,
            tokens=forward_spec.residual_tokens if reduces_narrow else forward_spec.num_tokens,
        )
        if forward_spec.has_magnitudes:
            self._add_dora_norms(in_features, out_features)
        scaled_update = graph.add_op(OpWork.pointwise, (wide,), size)
        summed = graph.add_op(OpWork.pointwise, (output, scaled_update), size, shares_gradient=True)
        if not forward_spec.has_magnitudes:
            return summed
        rescaled = self._add_vector_mul(summed, size, out_features)
        return (
            graph.add_op(OpWork.pointwise, (rescaled,), size, shares_gradient=True)
            if bias
            else rescaled
        )

    def _add_dora_norms(self, in_features: int, out_features: int) -> None:
        """Add the row norms of W + scale B A: matmuls with W and A, with A, and with B and A."""
        forward_spec, rank = self.forward_spec, self.forward_spec.adapter_rank
        for numel, rows in (
            (in_features * out_features, out_features),
            (in_features * rank, rank),
            (rank * out_features, out_features),
        ):
            self.graph.add_op(
                OpWork.matmul,
                (),
                rows * rank * forward_spec.gradient_element_bytes,
                saved_by_selective=True,
                flops=2.0 * rank * numel,
            )

    def _add_ia3_scale(self, x: int, features: int, *, casts_input: bool = False) -> int:
        """Add PEFT's product of features and an IA3 vector, in the dtype of the vector.

        ``casts_input``: whether a separate operator casts the features before the product.
        """
        size = self.graph.sizes[x]
        wide = (
            size
            // self.forward_spec.compute_element_bytes
            * self.forward_spec.gradient_element_bytes
        )
        features_cast = self.add_cast(x, wide) if casts_input and wide != size else x
        scaled = self._add_vector_mul(features_cast, wide, features)
        return scaled if wide == size else self.add_cast(scaled, size)

    def _add_vector_mul(self, x: int, size: int, features: int) -> int:
        """Add the product, of ``size`` bytes, with a trained vector."""
        vector = features * self.forward_spec.gradient_element_bytes
        return self.graph.add_op(
            OpWork.pointwise,
            (x,),
            size,
            saved=(x,),
            weight_gradient_bytes=(vector, vector),
            backward_scratch=size,
        )
