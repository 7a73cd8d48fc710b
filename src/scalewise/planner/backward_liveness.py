"""Simulate the tensor lifetimes of a backward pass, by operator or by compiled kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scalewise.models.op_graph import Op, OpGraph

Buffers = tuple[int, ...]


class BackwardLiveness:
    """Memory counter of a backward pass.

    A gradient is one buffer, or the inputs of a compiled kernel that has not run yet: several
    buffers, and tokens of the operators whose saved tensors it reads. The kernel holds these until
    it ends.

    Args:
        graph: Operator graph of the part.
        save_counts: Number of times each tensor is saved.
        leftover_bytes: Memory that the pass does not free.
        fresh_gradients: Whether the parameters have no gradient yet; see ``BackwardMode``.
        restored: Tensors that are copied back, or computed again, where they are first read.
        step_scratch_ratio: Temporary bytes of an optimizer step per byte of gradient; see
            ``BackwardMode``.
    """

    def __init__(
        self,
        graph: OpGraph,
        save_counts: Mapping[int, int],
        leftover_bytes: int,
        *,
        fresh_gradients: bool,
        restored: frozenset[int] = frozenset(),
        step_scratch_ratio: float,
    ) -> None:
        self._graph, self._fresh_gradients, self._step_scratch_ratio = (
            graph,
            fresh_gradients and step_scratch_ratio < 0,
            step_scratch_ratio,
        )
        self._save_counts, self._restored = dict(save_counts), set(restored)
        self.current_bytes = leftover_bytes + sum(
            graph.sizes[tensor] for tensor in save_counts if tensor not in restored
        )
        self.peak = self.gradient_bytes = 0
        self._gradient_buffers: dict[int, Buffers] = {}
        self._buffer_sizes: list[int] = []
        self._reference_counts: list[int] = []
        self._kernel_tokens: dict[int, Op] = {}
        # Buffers that a kernel turns into several gradients.
        self._multi_gradient_buffers: set[int] = set()
        # Tokens of kernels that write to no shared buffer in place.
        self._inplace_forbidden_tokens: set[int] = set()
        kernels = [operator for operator in graph.operators if operator.is_fused]
        unfused = [operator for operator in graph.operators if not operator.is_fused]
        read_by_unfused = {
            tensor for operator in unfused for tensor in (*operator.reads, *operator.saved)
        }
        self._kernel_outputs = {tensor for operator in kernels for tensor in operator.writes}
        self._kernel_intermediates = self._kernel_outputs - read_by_unfused

    def run(self, operators: Sequence[Op]) -> None:
        """Run the backward of ``operators``, the last ones of the graph."""
        graph = self._graph
        output = graph.operators[-1].writes[0]
        self._gradient_buffers[output] = (self._allocate(graph.sizes[output]),)
        for operator in reversed(operators):
            if operator.writes[0] in self._gradient_buffers:
                self._run_op(operator)

    def _run_op(self, operator: Op) -> None:
        sizes = self._graph.sizes
        output_gradient = self._gradient_buffers.pop(operator.writes[0])
        for tensor in self._restored.intersection(operator.saved):
            self._grow(sizes[tensor])
        self._restored.difference_update(operator.saved)
        if operator.saves_gradients:
            self._release_saved(operator)
        computed_bytes, gradient_bytes = operator.weight_gradient_bytes
        if computed_bytes and operator.weight_gradient_first:
            self._grow(computed_bytes)
        compute_gradients = self._fused_gradients if operator.is_fused else self._unfused_gradients
        input_gradients = [*compute_gradients(operator, output_gradient)]
        if computed_bytes and not operator.weight_gradient_first:
            self._grow(computed_bytes)
        self.peak = max(self.peak, self.current_bytes + operator.backward_scratch)
        self._release(output_gradient)
        if not operator.saves_gradients and not operator.is_fused:
            self._release_saved(operator)
        for tensor, buffers in input_gradients:
            self._accumulate(tensor, buffers)
        if computed_bytes:
            if gradient_bytes != computed_bytes:
                self._grow(gradient_bytes)
                self.current_bytes -= computed_bytes
            self.peak = max(
                self.peak,
                self.current_bytes + round(gradient_bytes * max(0.0, self._step_scratch_ratio)),
            )
            self.gradient_bytes += gradient_bytes * self._fresh_gradients
            self.current_bytes -= gradient_bytes * (not self._fresh_gradients)

    def _unfused_gradients(
        self, operator: Op, output_gradient: Buffers
    ) -> Iterator[tuple[int, Buffers]]:
        output_size = self._graph.sizes[operator.writes[0]]
        for tensor in operator.gradients:
            size = self._graph.sizes[tensor]
            is_shared = operator.shares_gradient and size == output_size
            is_shared = is_shared or tensor in operator.gradient_views
            yield tensor, self._retain(output_gradient) if is_shared else (self._allocate(size),)

    def _fused_gradients(
        self, operator: Op, output_gradient: Buffers
    ) -> Iterator[tuple[int, Buffers]]:
        """Yield the gradients of a kernel; an intermediate stands for all inputs of the kernel."""
        token = self._allocate(0)
        self._kernel_tokens[token] = operator
        if operator.forbids_inplace:
            self._inplace_forbidden_tokens.add(token)
        if len(operator.gradients) > 1:
            self._multi_gradient_buffers.update(output_gradient)
        kernel_inputs = (*output_gradient, token)
        passed_through = (
            output_gradient if operator.shares_gradient and len(output_gradient) == 1 else ()
        )
        shared = passed_through
        for tensor in operator.gradients:
            if tensor in self._kernel_intermediates:
                yield tensor, self._retain(passed_through or kernel_inputs)
            elif shared:
                yield tensor, self._retain(shared)
            else:
                output_buffers = (self._choose_buffer(tensor, kernel_inputs),)
                shared = output_buffers if operator.shares_gradient else ()
                yield tensor, output_buffers
        self._release((token,))

    def _choose_buffer(self, tensor: int, kernel_buffers: Buffers) -> int:
        """Return the buffer for a gradient; a kernel reuses an input buffer of the same size."""
        size, previous = self._graph.sizes[tensor], self._gradient_buffers.get(tensor, ())
        if (
            len(previous) == 1
            and tensor not in self._kernel_outputs
            and self._reference_counts[previous[0]] == 1
        ):
            del self._gradient_buffers[tensor]
            return previous[0]
        allows_inplace = self._inplace_forbidden_tokens.isdisjoint(kernel_buffers)
        for buffer in kernel_buffers:
            is_reusable = self._reference_counts[buffer] == 1 and (
                allows_inplace or buffer not in self._multi_gradient_buffers
            )
            if is_reusable and self._buffer_sizes[buffer] == size:
                if buffer in self._multi_gradient_buffers:
                    self._inplace_forbidden_tokens.update(
                        self._kernel_tokens.keys() & kernel_buffers
                    )
                return self._retain((buffer,))[0]
        return self._allocate(size)

    def _accumulate(self, tensor: int, buffers: Buffers) -> None:
        """Add a contribution to the gradient of a tensor."""
        previous = self._gradient_buffers.get(tensor)
        if previous is not None and tensor in self._kernel_outputs:
            buffers = (*previous, *buffers)
        elif previous is not None:
            sum_buffer = self._allocate(self._graph.sizes[tensor])
            self._release(previous)
            self._release(buffers)
            buffers = (sum_buffer,)
        self._gradient_buffers[tensor] = buffers

    def _release_saved(self, operator: Op) -> None:
        for tensor in operator.saved:
            self._save_counts[tensor] -= 1
            if not self._save_counts[tensor]:
                self.current_bytes -= self._graph.sizes[tensor]

    def _allocate(self, size: int) -> int:
        self._buffer_sizes.append(size)
        self._reference_counts.append(1)
        self._grow(size)
        return len(self._buffer_sizes) - 1

    def _retain(self, buffers: Buffers) -> Buffers:
        for buffer in buffers:
            self._reference_counts[buffer] += 1
        return buffers

    def _release(self, buffers: Buffers) -> None:
        for buffer in buffers:
            self._reference_counts[buffer] -= 1
            if not self._reference_counts[buffer]:
                self.current_bytes -= self._buffer_sizes[buffer]
                if buffer in self._kernel_tokens:
                    self._release_saved(self._kernel_tokens[buffer])

    def _grow(self, size: int) -> None:
        self.current_bytes += size
        self.peak = max(self.peak, self.current_bytes)
