"""Walks a tape backward and counts what is alive: operators one by one, or a compiler's kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scalewise.models.op_graph import Op, OpGraph

Buffers = tuple[int, ...]


class BackwardLiveness:
    """Counts bytes through the operators, in reverse.

    ``save_counts``: how often each tensor is saved. ``leftover_bytes``: bytes that nothing in it
    lets go.
    ``fresh_gradients``, ``step_scratch_ratio``: see ``Way``. ``offloaded``: what is brought back
    where it is first read.

    A gradient is one buffer, or what a compiler's kernel is yet to make it of: several buffers, and
    tokens of operators whose saved tensors it reads. These are held until the kernel ends.
    """

    def __init__(
        self,
        graph: OpGraph,
        save_counts: Mapping[int, int],
        leftover_bytes: int,
        *,
        fresh_gradients: bool,
        offloaded: frozenset[int] = frozenset(),
        step_scratch_ratio: float,
    ) -> None:
        self._graph, self._fresh_gradients, self._step_scratch_ratio = (
            graph,
            fresh_gradients and step_scratch_ratio < 0,
            step_scratch_ratio,
        )
        self._save_counts, self._offloaded = dict(save_counts), set(offloaded)
        self.current_bytes = leftover_bytes + sum(
            graph.sizes[place] for place in save_counts if place not in offloaded
        )
        self.peak = self.gradient_bytes = 0
        self._gradient_buffers: dict[int, Buffers] = {}
        self._buffer_sizes: list[int] = []
        self._reference_counts: list[int] = []
        self._kernel_tokens: dict[int, Op] = {}
        self._multi_gradient_buffers: set[int] = (
            set()
        )  # buffers that a kernel makes several gradients of
        self._inplace_forbidden_tokens: set[int] = (
            set()
        )  # tokens of kernels that write over no split buffer any more
        kernels = [operator for operator in graph.operators if operator.is_fused]
        others = [operator for operator in graph.operators if not operator.is_fused]
        read = {place for operator in others for place in (*operator.reads, *operator.saved)}
        self._kernel_outputs = {place for operator in kernels for place in operator.writes}
        self._kernel_intermediates = self._kernel_outputs - read

    def run(self, operators: Sequence[Op]) -> None:
        """Goes through the last operators of the tape, from the gradient of what comes out."""
        graph = self._graph
        output = graph.operators[-1].writes[0]
        self._gradient_buffers[output] = (self._allocate(graph.sizes[output]),)
        for operator in reversed(operators):
            if operator.writes[0] in self._gradient_buffers:
                self._run_op(operator)

    def _run_op(self, operator: Op) -> None:
        sizes = self._graph.sizes
        arrived = self._gradient_buffers.pop(operator.writes[0])
        for place in self._offloaded.intersection(operator.saved):
            self._grow(sizes[place])
        self._offloaded.difference_update(operator.saved)
        if operator.saves_gradients:
            self._release_saved(operator)
        computed, held = operator.weight_gradient_bytes
        if computed and operator.weight_gradient_first:
            self._grow(computed)
        make = self._fused_gradients if operator.is_fused else self._unfused_gradients
        made = [*make(operator, arrived)]
        if computed and not operator.weight_gradient_first:
            self._grow(computed)
        self.peak = max(self.peak, self.current_bytes + operator.backward_scratch)
        self._release(arrived)
        if not operator.saves_gradients and not operator.is_fused:
            self._release_saved(operator)
        for place, buffers in made:
            self._accumulate(place, buffers)
        if computed:
            if held != computed:
                self._grow(held)
                self.current_bytes -= computed
            self.peak = max(
                self.peak, self.current_bytes + round(held * max(0.0, self._step_scratch_ratio))
            )
            self.gradient_bytes += held * self._fresh_gradients
            self.current_bytes -= held * (not self._fresh_gradients)

    def _unfused_gradients(
        self, operator: Op, output_gradient: Buffers
    ) -> Iterator[tuple[int, Buffers]]:
        for place in operator.gradients:
            size = self._graph.sizes[place]
            shared = operator.shares_gradient and size == self._buffer_sizes[output_gradient[0]]
            yield place, self._retain(output_gradient) if shared else (self._allocate(size),)

    def _fused_gradients(
        self, operator: Op, output_gradient: Buffers
    ) -> Iterator[tuple[int, Buffers]]:
        """Yields gradients: of what is in no memory, all that a kernel makes them of."""
        token = self._allocate(0)
        self._kernel_tokens[token] = operator
        if operator.forbids_inplace:
            self._inplace_forbidden_tokens.add(token)
        if len(operator.gradients) > 1:
            self._multi_gradient_buffers.update(output_gradient)
        begun = (*output_gradient, token)
        as_it_is = output_gradient if operator.shares_gradient and len(output_gradient) == 1 else ()
        shared = as_it_is
        for place in operator.gradients:
            if place in self._kernel_intermediates:
                yield place, self._retain(as_it_is or begun)
            elif shared:
                yield place, self._retain(shared)
            else:
                written = (self._choose_buffer(place, begun),)
                shared = written if operator.shares_gradient else ()
                yield place, written
        self._release((token,))

    def _choose_buffer(self, tensor: int, kernel_buffers: Buffers) -> int:
        """Returns the buffer that a kernel writes a gradient to, which it may have read."""
        size, before = self._graph.sizes[tensor], self._gradient_buffers.get(tensor, ())
        if (
            len(before) == 1
            and tensor not in self._kernel_outputs
            and self._reference_counts[before[0]] == 1
        ):
            del self._gradient_buffers[tensor]
            return before[0]
        over = self._inplace_forbidden_tokens.isdisjoint(kernel_buffers)
        for each in kernel_buffers:
            free = self._reference_counts[each] == 1 and (
                over or each not in self._multi_gradient_buffers
            )
            if free and self._buffer_sizes[each] == size:
                if each in self._multi_gradient_buffers:
                    self._inplace_forbidden_tokens.update(
                        self._kernel_tokens.keys() & kernel_buffers
                    )
                return self._retain((each,))[0]
        return self._allocate(size)

    def _accumulate(self, tensor: int, buffers: Buffers) -> None:
        """Adds to the gradient of a place what one of its readers gives."""
        before = self._gradient_buffers.get(tensor)
        if before is not None and tensor in self._kernel_outputs:
            buffers = (*before, *buffers)
        elif before is not None:
            total = self._allocate(self._graph.sizes[tensor])
            self._release(before)
            self._release(buffers)
            buffers = (total,)
        self._gradient_buffers[tensor] = buffers

    def _release_saved(self, operator: Op) -> None:
        for place in operator.saved:
            self._save_counts[place] -= 1
            if not self._save_counts[place]:
                self.current_bytes -= self._graph.sizes[place]

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
