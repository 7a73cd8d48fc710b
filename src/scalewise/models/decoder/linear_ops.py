"""The products of a decoder's linear layers as they run, for the planner: sizes, no tensors."""

from __future__ import annotations

from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork

FP32 = 4


class LinearOps:
    """Writes products of matrices onto a tape, in whatever format they are made."""

    def __init__(self, forward_spec: ForwardSpec) -> None:
        self.forward_spec, self.graph = forward_spec, OpGraph()
        self._num_matmuls, self._masked_inputs = 0, set[int]()

    def add_linear(
        self,
        x: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        trains: bool = True,
        tokens: int | None = None,
        live_tensors: tuple[int, ...] = (),
    ) -> int:
        """Writes a product with a matrix, cast where it is held in another format."""
        run, graph = self.forward_spec, self.graph
        tokens = tokens or run.num_tokens
        count, more = in_features * out_features, out_features * bias
        saved, read = [], x
        if run.autocast:
            if bias:
                graph.add_op(OpWork.pointwise, (), out_features * run.compute_element_bytes)
            if graph.requires_grad[x]:
                saved.append(graph.add_op(OpWork.pointwise, (), count * run.compute_element_bytes))
            else:
                graph.add_op(OpWork.pointwise, (), count * run.compute_element_bytes)
            if graph.sizes[x] != tokens * in_features * run.compute_element_bytes:
                read = self.add_cast(x, tokens * in_features * run.compute_element_bytes)
        weights = (count + more) * trains
        flops = 2.0 * count * tokens
        return graph.add_op(
            OpWork.matmul,
            (read, *live_tensors),
            tokens * out_features * run.compute_element_bytes,
            saved=(*((read,) if trains else ()), *saved),
            gradients=(read,),
            weight_gradient_bytes=(
                weights * run.compute_element_bytes,
                weights * run.gradient_element_bytes,
            ),
            weight_gradient_first=not bias,
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
    ) -> int:
        """Writes torchao's product, whose operands are cast to 8 bits for each of three products.

        A cast of n numbers makes 9n bytes: scaled and saturated in fp32, then cast. Backward casts
        the gradient for either product, and what forward has cast once more. Compiled, a cast
        reads its numbers twice and writes them once; by torch's own operators it moves more.
        """
        run, graph = self.forward_spec, self.graph
        if (
            not run.on_cpu
            and graph.sizes[x] != run.num_tokens * in_features * run.compute_element_bytes
        ):
            x = self.add_cast(x, run.num_tokens * in_features * run.compute_element_bytes)
        read, made, weights = (
            run.num_tokens * in_features,
            run.num_tokens * out_features,
            in_features * out_features,
        )
        gradients = read * run.compute_element_bytes, weights * run.compute_element_bytes
        # Products want one operand by rows and one by columns; emulated ones copy out of sight.
        turned = not run.on_cpu
        flops = 2.0 * weights * run.num_tokens
        moved = [
            2 * size + count
            for count, size in (
                (read, graph.sizes[x]),
                (made, made * run.compute_element_bytes),
                (weights, weights * run.gradient_element_bytes),
            )
        ]
        written = graph.add_op(
            OpWork.matmul_fp8,
            (x, *live_tensors),
            made * run.compute_element_bytes,
            saved=(x,),
            gradients=(x,),
            weight_gradient_bytes=(gradients[1], weights * run.gradient_element_bytes),
            weight_gradient_first=False,
            forward_scratch=max(9 * read, read + 9 * weights) - made * run.compute_element_bytes,
            backward_scratch=max(
                9 * made,
                made + 9 * weights,
                made + weights * (1 + turned) + gradients[0],
                max(10 * made, 2 * made + 9 * read) + weights + gradients[0],
                (made + read) * (1 + turned) + made + weights + sum(gradients),
            )
            - graph.sizes[x]
            - gradients[1],
            cast_bytes=(moved[0] + moved[2], moved[0] + 2 * moved[1] + moved[2]),
            saved_by_selective=self._is_next_matmul_saved(),
            flops=flops,
            backward_flops=2 * flops,
        )
        if not bias:
            return written
        added = (
            out_features * run.compute_element_bytes,
            out_features * run.gradient_element_bytes,
        )
        return graph.add_op(
            OpWork.pointwise,
            (written,),
            graph.sizes[written],
            weight_gradient_bytes=added,
            shares_gradient=True,
        )

    def add_unpacked_linear(
        self, x: int, in_features: int, out_features: int, live_tensors: tuple[int, ...]
    ) -> int:
        """Writes a product with a frozen matrix, unpacked for forward and again for backward."""
        run, graph = self.forward_spec, self.graph
        if (
            run.autocast
            and graph.sizes[x] != run.num_tokens * in_features * run.compute_element_bytes
        ):
            x = self.add_cast(x, run.num_tokens * in_features * run.compute_element_bytes)
        size, flops = (
            in_features * out_features * run.compute_element_bytes,
            2.0 * in_features * out_features * run.num_tokens,
        )
        scales = round(in_features * out_features * run.scale_bytes)
        matrix = graph.add_op(OpWork.pointwise, (), size, forward_scratch=scales)
        return graph.add_op(
            OpWork.matmul,
            (x, matrix, *live_tensors),
            run.num_tokens * out_features * run.compute_element_bytes,
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
        """Writes a product of what is rounded to integers and back, and again for backward.

        It keeps what a plain product keeps; compiled, what is rounded and what is out of range as
        well. Scales are three numbers for each group; torch's own operators pass fourteen times
        over what is rounded, and over a gradient that is masked.
        """
        run, graph = self.forward_spec, self.graph
        read, made, weights = (
            run.num_tokens * in_features,
            run.num_tokens * out_features,
            in_features * out_features,
        )
        matrix, rounds, held = (
            weights * run.compute_element_bytes,
            run.rounds_inputs,
            weights * run.gradient_element_bytes,
        )
        scales = 3 * FP32 * weights // run.quantization_group, 3 * FP32 * run.num_tokens
        rounding = self._rounding_bytes(weights, held, scales[0])
        of_x, of_weight = read * run.compute_element_bytes, weights * run.compute_element_bytes
        given = of_x if rounds or graph.sizes[x] != of_x else 0
        giving = self._rounding_bytes(read, graph.sizes[x], scales[1]) if rounds else given
        if rounds:
            passing = _gradient_mask_bytes(read, graph.sizes[x], scales[1])
        else:
            passing = graph.sizes[x] if given else 0
        summed = graph.sizes[x] + of_weight
        passes = 14 * FP32 * (weights + read * rounds)
        flops = 2.0 * weights * run.num_tokens
        return graph.add_op(
            OpWork.matmul,
            (x, *live_tensors),
            made * run.compute_element_bytes,
            saved=(x,),
            gradients=(x,),
            weight_gradient_bytes=(held, held),
            weight_gradient_first=False,
            extra_output_bytes=self._compiled_saved_bytes(x, read, weights)
            if run.is_compiled
            else (),
            forward_scratch=max(
                given + matrix, max(giving, given + rounding) - made * run.compute_element_bytes
            ),
            backward_scratch=max(
                rounding,
                matrix + of_x,
                of_x + passing,
                graph.sizes[x] + giving,
                summed + given,
                summed + _gradient_mask_bytes(weights, held, scales[0]),
            )
            - graph.sizes[x]
            - held,
            cast_bytes=(passes, 2 * passes),
            saved_by_selective=self._is_next_matmul_saved(),
            flops=flops,
            backward_flops=2 * flops,
        )

    def _compiled_saved_bytes(self, x: int, input_numel: int, weight_numel: int) -> tuple[int, ...]:
        """Returns what a compiled product with rounded numbers keeps besides, a byte a mask."""
        run = self.forward_spec
        kept = [weight_numel * run.compute_element_bytes, weight_numel]
        if run.rounds_inputs and x not in self._masked_inputs:
            made = [op for op in self.graph.operators if x in op.writes]
            kept += [
                input_numel,
                input_numel * run.compute_element_bytes * (made[0].work is not OpWork.pointwise),
            ]
            self._masked_inputs.add(x)
        return (*kept,)

    def _rounding_bytes(self, numel: int, size: int, scale_bytes: int) -> int:
        """Returns the bytes that rounding takes of numbers of ``size`` bytes in all."""
        wide = numel * FP32
        if size < wide:
            return wide + size + scale_bytes
        return wide + max(
            scale_bytes,
            numel
            * self.forward_spec.compute_element_bytes
            * (self.forward_spec.compute_element_bytes < FP32),
        )

    def add_cast(self, x: int, size: int) -> int:
        """Writes how numbers come into another format, of ``size`` bytes in all."""
        return self.graph.add_op(OpWork.pointwise, (x,), size)

    def _is_next_matmul_saved(self) -> bool:
        """Returns whether selective recomputation keeps the next product."""
        self._num_matmuls += 1
        return self._num_matmuls % 2 == 1 or not self.forward_spec.saves_alternate_matmuls


def _gradient_mask_bytes(numel: int, size: int, scale_bytes: int) -> int:
    """Returns what a gradient of ``numel`` numbers, of ``size`` bytes at last, needs to be masked.

    Their levels in fp32 and two answers to whether each is out of range; then one, and itself.
    """
    wide = numel * FP32
    return wide + numel + max(numel, size if size < wide else 0) + scale_bytes
