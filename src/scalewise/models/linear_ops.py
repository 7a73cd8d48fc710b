"""Linear layers in operator graphs, for the planner."""

from __future__ import annotations

from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork

FP32 = 4
EAGER_FP8_CAST_BYTES = 33
"""Bytes that torch's eager operators move per element that torchao casts to fp8.

From bf16: magnitude 4, maximum 2, conversion to fp32 6, scaling 8, saturation 8, cast 5. From fp32:
magnitude 8, maximum 4, and no conversion.
"""


class LinearOps:
    """Adds the matmuls of linear layers to an operator graph, in their compute format."""

    def __init__(self, forward_spec: ForwardSpec) -> None:
        self.forward_spec, self.graph = forward_spec, OpGraph()
        self.token_shards: dict[int, int] = {}
        """Tensors saved in the place of gathered ones, which backward gathers again."""
        self._num_matmuls, self._masked_inputs, self._fp8_inputs = 0, set[int](), set[int]()

    def add_linear(
        self,
        x: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        trains: bool = True,
        tokens: int | None = None,
        matrices: int = 1,
        scales_gradient: bool = False,
        has_joint_backward: bool = False,
        live_tensors: tuple[int, ...] = (),
    ) -> int:
        """Add a linear layer; under autocast with the casts of its weight, bias and input.

        ``matrices``: number of stacked matrices, each token being multiplied by one of them. Their
        cast is freed after the matmul; autocast keeps that of a single one. ``scales_gradient``:
        whether the gradient of the weight is multiplied by a number, out of place.
        ``has_joint_backward``: as in ``Op``.
        """
        forward_spec, graph = self.forward_spec, self.graph
        tokens = tokens or forward_spec.num_tokens
        weight_numel, bias_numel = in_features * out_features * matrices, out_features * bias
        saved, matmul_input = [], x
        if forward_spec.autocast:
            if bias:
                graph.add_op(
                    OpWork.pointwise, (), out_features * forward_spec.compute_element_bytes
                )
            weight_bytes = weight_numel * forward_spec.compute_element_bytes
            weight_cast = graph.add_op(OpWork.pointwise, (), weight_bytes)
            graph.weight_casts.add(weight_cast)
            if graph.requires_grad[x]:
                saved.append(weight_cast)
            input_bytes = tokens * in_features * forward_spec.compute_element_bytes
            if graph.sizes[x] != input_bytes:
                matmul_input = self.add_cast(x, input_bytes)
        trained_numel = (weight_numel + bias_numel) * trains
        kept = self.token_shards.get(matmul_input, matmul_input)
        gathered_bytes = graph.sizes[matmul_input] * (trains and kept != matmul_input)
        flops = 2.0 * in_features * out_features * tokens
        return graph.add_op(
            OpWork.matmul,
            (matmul_input, *(saved if matrices > 1 else ()), *live_tensors),
            tokens * out_features * forward_spec.compute_element_bytes,
            saved=(*((kept,) if trains else ()), *saved),
            gradients=(matmul_input,),
            weight_gradient_bytes=(
                trained_numel * forward_spec.compute_element_bytes,
                trained_numel * forward_spec.gradient_element_bytes,
            ),
            weight_gradient_first=not bias,
            has_joint_backward=has_joint_backward,
            backward_scratch=gathered_bytes
            + trained_numel * forward_spec.compute_element_bytes * scales_gradient,
            saved_by_selective=self._is_next_matmul_saved(),
            flops=flops,
            backward_flops=flops * (graph.requires_grad[x] + trains),
        )

    def add_fp8_linear(
        self,
        x: int,
        in_features: int,
        out_features: int,
        live_tensors: tuple[int, ...],
        *,
        bias: bool,
        trains: bool = True,
    ) -> int:
        """Add torchao's FP8 linear layer, which casts the operands of each of its three matmuls.

        It computes the weight gradient even of a frozen weight (``trains``: whether it is not).
        A cast of n elements allocates 9n bytes: scaled and saturated in fp32, then cast. Backward
        casts the output gradient for both matmuls, and casts the operands of forward again.
        Compiled, a cast reads its input twice and writes it once.
        """
        forward_spec, graph = self.forward_spec, self.graph
        input_bytes = forward_spec.num_tokens * in_features * forward_spec.compute_element_bytes
        if not forward_spec.on_cpu and graph.sizes[x] != input_bytes:
            x = self.add_cast(x, input_bytes)
        input_numel, output_numel, weight_numel = (
            forward_spec.num_tokens * in_features,
            forward_spec.num_tokens * out_features,
            in_features * out_features,
        )
        gradients = (
            input_numel * forward_spec.compute_element_bytes,
            weight_numel * forward_spec.compute_element_bytes,
        )
        # CUDA matmuls need one operand row-major and one column-major; emulated ones copy inside.
        has_transposed_copy = not forward_spec.on_cpu
        flops = 2.0 * weight_numel * forward_spec.num_tokens
        traffic = [
            2 * size + numel if forward_spec.is_compiled else EAGER_FP8_CAST_BYTES * numel
            for numel, size in (
                (input_numel, graph.sizes[x]),
                (output_numel, output_numel * forward_spec.compute_element_bytes),
                (weight_numel, weight_numel * forward_spec.gradient_element_bytes),
            )
        ]
        cast_bytes = (traffic[0] + traffic[2], traffic[0] + 2 * traffic[1] + traffic[2])
        output = graph.add_op(
            OpWork.matmul_fp8,
            (x, *live_tensors),
            output_numel * forward_spec.compute_element_bytes,
            saved=(x,),
            gradients=(x,),
            weight_gradient_bytes=(
                gradients[1] * trains,
                weight_numel * forward_spec.gradient_element_bytes * trains,
            ),
            weight_gradient_first=False,
            forward_scratch=max(9 * input_numel, input_numel + 9 * weight_numel)
            - output_numel * forward_spec.compute_element_bytes,
            backward_scratch=max(
                9 * output_numel,
                output_numel + 9 * weight_numel,
                output_numel + weight_numel * (1 + has_transposed_copy) + gradients[0],
                max(10 * output_numel, 2 * output_numel + 9 * input_numel)
                + weight_numel
                + gradients[0],
                (output_numel + input_numel) * (1 + has_transposed_copy)
                + output_numel
                + weight_numel
                + sum(gradients),
            )
            - graph.sizes[x]
            - gradients[1],
            cast_bytes=cast_bytes,
            saved_by_selective=self._is_next_matmul_saved(),
            flops=flops,
            backward_flops=(1 + trains) * flops,
        )
        return self._add_bias(output, out_features) if bias else output

    def add_fused_fp8_linear(
        self,
        x: int,
        in_features: int,
        out_features: int,
        live_tensors: tuple[int, ...],
        *,
        bias: bool,
        trains: bool,
    ) -> int:
        """Add Transformer Engine's FP8 linear layer.

        Kernels write operands and their transposes in FP8, once for all layers that read a tensor.
        It saves the FP8 operand of the weight gradient, or its shard of gathered tokens.
        """
        forward_spec, graph = self.forward_spec, self.graph
        input_numel, output_numel, weight_numel = (
            forward_spec.num_tokens * in_features,
            forward_spec.num_tokens * out_features,
            in_features * out_features,
        )
        kept_numel = input_numel // (forward_spec.tensor_ranks if x in self.token_shards else 1)
        saved_copies = (kept_numel,) if trains and x not in self._fp8_inputs else ()
        self._fp8_inputs.update((x,) if trains else ())
        weight_casts, flops = 2 * weight_numel, 2.0 * weight_numel * forward_spec.num_tokens
        output = graph.add_op(
            OpWork.matmul_fp8,
            (x, *live_tensors),
            output_numel * forward_spec.compute_element_bytes,
            gradients=(x,),
            weight_gradient_bytes=(
                weight_numel * forward_spec.compute_element_bytes * trains,
                weight_numel * forward_spec.gradient_element_bytes * trains,
            ),
            weight_gradient_first=False,
            extra_output_bytes=saved_copies,
            forward_scratch=input_numel + weight_casts,
            backward_scratch=2 * output_numel + input_numel * trains + weight_casts,
            cast_bytes=(
                2 * input_numel - sum(saved_copies),
                output_numel * (forward_spec.compute_element_bytes + 2),
            ),
            saved_by_selective=self._is_next_matmul_saved(),
            flops=flops,
            backward_flops=(1 + trains) * flops,
        )
        return self._add_bias(output, out_features) if bias else output

    def _add_bias(self, output: int, out_features: int) -> int:
        """Add the bias of an FP8 linear layer."""
        bias_gradient_bytes = (
            out_features * self.forward_spec.compute_element_bytes,
            out_features * self.forward_spec.gradient_element_bytes,
        )
        return self.graph.add_op(
            OpWork.pointwise,
            (output,),
            self.graph.sizes[output],
            weight_gradient_bytes=bias_gradient_bytes,
            shares_gradient=True,
        )

    def add_unpacked_linear(
        self, x: int, in_features: int, out_features: int, live_tensors: tuple[int, ...]
    ) -> int:
        """Add a linear layer with a frozen packed weight, unpacked in forward and in backward."""
        forward_spec, graph = self.forward_spec, self.graph
        input_bytes = forward_spec.num_tokens * in_features * forward_spec.compute_element_bytes
        if forward_spec.autocast and graph.sizes[x] != input_bytes:
            x = self.add_cast(x, input_bytes)
        size, flops = (
            in_features * out_features * forward_spec.compute_element_bytes,
            2.0 * in_features * out_features * forward_spec.num_tokens,
        )
        scales = round(in_features * out_features * forward_spec.scale_bytes)
        weight = graph.add_op(OpWork.pointwise, (), size, forward_scratch=scales)
        return graph.add_op(
            OpWork.matmul,
            (x, weight, *live_tensors),
            forward_spec.num_tokens * out_features * forward_spec.compute_element_bytes,
            gradients=(x,),
            backward_scratch=size,
            unpacks_weight=True,
            saved_by_selective=self._is_next_matmul_saved(),
            flops=flops,
            backward_flops=flops * graph.requires_grad[x],
        )

    def add_fake_quantized_linear(
        self, x: int, in_features: int, out_features: int, live_tensors: tuple[int, ...]
    ) -> int:
        """Add a linear layer whose weight is rounded to integers and back, again in backward.

        It saves what a linear layer saves; compiled, also the rounded values and the out-of-range
        masks. There are three scale values per group. torch's eager operators read or write the
        rounded tensor fourteen times, and a masked gradient as often.
        """
        forward_spec, graph = self.forward_spec, self.graph
        input_numel, output_numel, weight_numel = (
            forward_spec.num_tokens * in_features,
            forward_spec.num_tokens * out_features,
            in_features * out_features,
        )
        rounds = forward_spec.rounds_inputs
        weight_bytes = weight_numel * forward_spec.compute_element_bytes
        gradient_bytes = weight_numel * forward_spec.gradient_element_bytes
        input_bytes = input_numel * forward_spec.compute_element_bytes
        scale_bytes = (
            3 * FP32 * weight_numel // forward_spec.quantization_group,
            3 * FP32 * forward_spec.num_tokens,
        )
        weight_scratch = self._rounding_bytes(weight_numel, gradient_bytes, scale_bytes[0])
        cast_input = input_bytes if rounds or graph.sizes[x] != input_bytes else 0
        if rounds:
            input_scratch = self._rounding_bytes(input_numel, graph.sizes[x], scale_bytes[1])
            mask_scratch = _gradient_mask_bytes(input_numel, graph.sizes[x], scale_bytes[1])
        else:
            input_scratch = cast_input
            mask_scratch = graph.sizes[x] if cast_input else 0
        gradients = graph.sizes[x] + weight_bytes
        traffic = 14 * FP32 * (weight_numel + input_numel * rounds)
        flops = 2.0 * weight_numel * forward_spec.num_tokens
        return graph.add_op(
            OpWork.matmul,
            (x, *live_tensors),
            output_numel * forward_spec.compute_element_bytes,
            saved=(x,),
            gradients=(x,),
            weight_gradient_bytes=(gradient_bytes, gradient_bytes),
            weight_gradient_first=False,
            extra_output_bytes=self._compiled_saved_bytes(x, input_numel, weight_numel)
            if forward_spec.is_compiled
            else (),
            forward_scratch=max(
                cast_input + weight_bytes,
                max(input_scratch, cast_input + weight_scratch)
                - output_numel * forward_spec.compute_element_bytes,
            ),
            backward_scratch=max(
                weight_scratch,
                weight_bytes + input_bytes,
                input_bytes + mask_scratch,
                graph.sizes[x] + input_scratch,
                gradients + cast_input,
                gradients + _gradient_mask_bytes(weight_numel, gradient_bytes, scale_bytes[0]),
            )
            - graph.sizes[x]
            - gradient_bytes,
            cast_bytes=(traffic, 2 * traffic),
            saved_by_selective=self._is_next_matmul_saved(),
            flops=flops,
            backward_flops=2 * flops,
        )

    def _compiled_saved_bytes(self, x: int, input_numel: int, weight_numel: int) -> tuple[int, ...]:
        """Bytes that a compiled fake-quantized matmul saves in addition; masks take one byte."""
        forward_spec = self.forward_spec
        saved_bytes = [weight_numel * forward_spec.compute_element_bytes, weight_numel]
        if forward_spec.rounds_inputs and x not in self._masked_inputs:
            producers = [op for op in self.graph.operators if x in op.writes]
            saved_bytes += [
                input_numel,
                input_numel
                * forward_spec.compute_element_bytes
                * (producers[0].work is not OpWork.pointwise),
            ]
            self._masked_inputs.add(x)
        return (*saved_bytes,)

    def _rounding_bytes(self, numel: int, size: int, scale_bytes: int) -> int:
        """Bytes of temporary tensors that rounding a tensor of ``size`` bytes needs."""
        fp32_bytes = numel * FP32
        if size < fp32_bytes:
            return fp32_bytes + size + scale_bytes
        return fp32_bytes + max(
            scale_bytes,
            numel
            * self.forward_spec.compute_element_bytes
            * (self.forward_spec.compute_element_bytes < FP32),
        )

    def add_cast(self, x: int, size: int) -> int:
        """Add a cast to a format in which the tensor has ``size`` bytes."""
        return self.graph.add_op(OpWork.pointwise, (x,), size)

    def _is_next_matmul_saved(self) -> bool:
        """Return whether selective checkpointing saves the next matmul."""
        self._num_matmuls += 1
        return self._num_matmuls % 2 == 1 or not self.forward_spec.saves_alternate_matmuls


def _gradient_mask_bytes(numel: int, size: int, scale_bytes: int) -> int:
    """Bytes of temporary tensors that masking a gradient of ``size`` bytes needs.

    First the quantization levels in fp32 and two out-of-range masks; then a mask and the gradient.
    """
    fp32_bytes = numel * FP32
    return fp32_bytes + numel + max(numel, size if size < fp32_bytes else 0) + scale_bytes
