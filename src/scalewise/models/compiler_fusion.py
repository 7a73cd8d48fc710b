"""Operator graphs under ``torch.compile``: pointwise operators are fused and recomputed."""

from __future__ import annotations

from dataclasses import replace

from scalewise.models.op_graph import Op, OpGraph, OpWork, RecordedPart

SMALL_TENSOR_RATIO = 32
"""A tensor this many times smaller than the largest one is a reduction over features; the
partitioner saves it."""

CASTING = (OpWork.pointwise, OpWork.matmul_fp8)
"""Operators whose inputs are read by pointwise kernels: FP8 matmuls read casts."""


def fuse(graph: OpGraph, *, full_recompute: bool = False) -> OpGraph:
    """Return a graph whose saved tensors are those of torch's min-cut partitioner.

    Inputs of matmuls are in memory anyway and are saved, once if equal tensors exist. Outputs of
    pointwise operators that only pointwise operators read are recomputed in the backward kernels.
    These save the inputs of that chain, or a tensor inside it where that is smaller.

    Args:
        graph: Graph of one part, as eager mode executes it.
        full_recompute: Whether backward recomputes the part (full checkpointing). Its kernels then
            recompute what only the matmuls of weight gradients read. A graph with FP8 matmuls is
            returned unchanged in this case; it predicts less memory than measured, but no
            alternative is closer.
    """
    if isinstance(graph, RecordedPart):
        return graph
    if full_recompute and any(operator.work is OpWork.matmul_fp8 for operator in graph.operators):
        return graph
    return _Fuser(graph, full_recompute).build_fused_graph()


class _Fuser:
    def __init__(self, graph: OpGraph, full_recompute: bool) -> None:
        self._graph, self._full_recompute = graph, full_recompute
        self._small_bytes = max(graph.sizes, default=0) // SMALL_TENSOR_RATIO
        self._producers = {tensor: op for op in graph.operators for tensor in op.writes}
        matmuls = [op for op in graph.operators if op.work not in CASTING]
        self._matmul_saved = {tensor for op in matmuls for tensor in op.saved}
        self._duplicates: dict[tuple[tuple[int, ...], int], int] = {}
        self._saved = {0}
        for operator in graph.operators:
            if operator.work is OpWork.pointwise:
                self._saved.update(*map(self._find_saved_sources, operator.saved))

    def build_fused_graph(self) -> OpGraph:
        graph, intermediates = self._graph, self._find_fused_intermediates()
        gradient_only = self._find_gradient_only_tensors() if self._full_recompute else frozenset()
        operators = [
            self._compile_op(op, gradient_only)
            for op in _kernel_order(graph.operators, intermediates)
        ]
        return OpGraph(graph.sizes, graph.requires_grad, operators, intermediates)

    def _find_gradient_only_tensors(self) -> frozenset[int]:
        """Tensors that backward kernels compute next to gradients, since only the matmuls of weight
        gradients read them."""
        required: set[int] = set()
        gradient_only = set()
        for operator in reversed(self._graph.operators):
            if operator.work in CASTING:
                required.update(
                    source
                    for tensor in operator.saved
                    for source in self._find_saved_sources(tensor)
                )
                gradient_only.update(self._matmul_saved.intersection(operator.writes) - required)
            elif operator.work is OpWork.attention:
                required.update(operator.saved)
            if not required.isdisjoint(operator.writes):
                required.update(operator.reads)
        return frozenset(tensor for tensor in gradient_only if self._deduplicate(tensor) == tensor)

    def _find_fused_intermediates(self) -> frozenset[int]:
        """Outputs of pointwise operators that only pointwise operators read, except the result."""
        matmuls = [op for op in self._graph.operators if op.work not in CASTING]
        matmul_reads = {tensor for op in matmuls for tensor in (*op.reads, *op.saved)}
        result = self._graph.operators[-1].writes[0]
        pointwise = (tensor for tensor in self._producers if self._is_pointwise(tensor))
        return frozenset(
            tensor for tensor in pointwise if tensor not in matmul_reads and tensor != result
        )

    def _compile_op(self, operator: Op, gradient_only: frozenset[int]) -> Op:
        if operator.work not in CASTING:
            saved = tuple(map(self._deduplicate, operator.saved))
            rounds = operator.work is OpWork.matmul and sum(operator.cast_bytes) > 0
            # Rounding is pointwise: its kernel needs no temporary tensors.
            scratch = 0 if rounds else operator.backward_scratch
            return replace(operator, saved=saved, backward_scratch=scratch)
        sources = dict.fromkeys(
            source for tensor in operator.saved for source in self._find_saved_sources(tensor)
        )
        if operator.work is OpWork.matmul_fp8:
            return replace(operator, saved=(*sources,))
        recomputed = gradient_only.intersection(operator.writes)
        return replace(
            operator,
            saved=(*sources, *recomputed),
            backward_scratch=0,
            is_fused=True,
            forbids_inplace=bool(recomputed),
        )

    def _is_pointwise(self, tensor: int) -> bool:
        producer = self._producers.get(tensor)
        return (
            producer is not None
            and producer.work is OpWork.pointwise
            and tensor == producer.writes[0]
        )

    def _deduplicate(self, tensor: int) -> int:
        """Return the first tensor computed from the same inputs, which may be ``tensor`` itself."""
        if not self._is_pointwise(tensor):
            return tensor
        if not self._producers[tensor].reads:  # such as the cast of a weight
            return tensor
        if len(self._producers[tensor].writes) > 1:  # a random dropout mask of its own
            return tensor
        signature = (self._producers[tensor].reads, self._graph.sizes[tensor])
        return self._duplicates.setdefault(signature, tensor)

    def _find_saved_sources(self, tensor: int) -> set[int]:
        """Return the tensors that are saved so that backward can read or recompute ``tensor``."""
        size, sizes = self._graph.sizes[tensor], self._graph.sizes
        is_saved = (
            size <= self._small_bytes or tensor in self._matmul_saved or tensor in self._saved
        )
        if is_saved or not self._is_pointwise(tensor):
            return {tensor}
        sources = {
            source
            for read in self._producers[tensor].reads
            for source in self._find_saved_sources(read)
        }
        if self._full_recompute:
            return sources
        added_bytes = sum(
            sizes[source]
            for source in sources - self._matmul_saved - self._saved
            if sizes[source] > self._small_bytes
        )
        return {tensor} if added_bytes > size else sources


def _kernel_order(operators: list[Op], fused_intermediates: frozenset[int]) -> list[Op]:
    """Order of the kernels: operators of a fused kernel run right before the one that ends it."""
    reads = {tensor for operator in operators for tensor in operator.reads}
    waiting: dict[int, Op] = {}
    order: list[Op] = []

    def run(operator: Op) -> None:
        for tensor in operator.reads:
            if tensor in waiting:
                run(waiting.pop(tensor))
        order.append(operator)

    for operator in operators:
        if operator.writes[0] in fused_intermediates & reads:
            waiting[operator.writes[0]] = operator
        else:
            run(operator)
    return order
