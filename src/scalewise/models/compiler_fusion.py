"""A tape as a compiler runs it: what only pointwise operators read is made in their kernels."""

from __future__ import annotations

from dataclasses import replace

from scalewise.models.op_graph import Op, OpGraph, OpWork, RecordedPart

FEW = 32
"""What is so many times smaller than the largest tensor is a sum over features: it is kept."""

CASTING = (OpWork.pointwise, OpWork.matmul_fp8)
"""What reads by kernels of pointwise operators: products of 8 bits are given casts."""


def fuse(graph: OpGraph, *, full_recompute: bool = False) -> OpGraph:
    """Returns a tape that keeps what torch's min-cut partitioner does.

    What products read is in memory anyway, so that it is kept, once if it was made twice. What
    pointwise operators wrote for others like them, backward makes again in its own kernels, and
    keeps what these begin with, or what was made of it where that is less.

    ``full_recompute``: whether backward makes all of it again, and then in its kernels what only
    products of
    weights' gradients read. With products of 8 bits it is the tape itself: less than what is found,
    but nothing is nearer.
    """
    if isinstance(graph, RecordedPart):
        return graph
    if full_recompute and any(operator.work is OpWork.matmul_fp8 for operator in graph.operators):
        return graph
    return _Fuser(graph, full_recompute).build_fused_graph()


class _Fuser:
    def __init__(self, graph: OpGraph, full_recompute: bool) -> None:
        self._graph, self._full_recompute = graph, full_recompute
        self._small_bytes = max(graph.sizes, default=0) // FEW
        self._producers = {place: op for op in graph.operators for place in op.writes}
        products = [op for op in graph.operators if op.work not in CASTING]
        self._matmul_saved = {place for op in products for place in op.saved}
        self._duplicates: dict[tuple[tuple[int, ...], int], int] = {}
        self._saved = {0}
        for operator in graph.operators:
            if operator.work is OpWork.pointwise:
                self._saved.update(*map(self._find_saved_sources, operator.saved))

    def build_fused_graph(self) -> OpGraph:
        """Returns the tape."""
        graph, inside = self._graph, self._find_fused_intermediates()
        late = self._find_gradient_only_tensors() if self._full_recompute else frozenset()
        operators = [
            self._compile_op(each, late) for each in _kernel_order(graph.operators, inside)
        ]
        return OpGraph(graph.sizes, graph.requires_grad, operators, inside)

    def _find_gradient_only_tensors(self) -> frozenset[int]:
        """Returns what kernels make beside gradients, as the products that read it run no more."""
        wanted: set[int] = set()
        late = set()
        for operator in reversed(self._graph.operators):
            if operator.work in CASTING:
                wanted.update(
                    each for place in operator.saved for each in self._find_saved_sources(place)
                )
                late.update(self._matmul_saved.intersection(operator.writes) - wanted)
            elif operator.work is OpWork.attention:
                wanted.update(operator.saved)
            if not wanted.isdisjoint(operator.writes):
                wanted.update(operator.reads)
        return frozenset(place for place in late if self._deduplicate(place) == place)

    def _find_fused_intermediates(self) -> frozenset[int]:
        """Returns what pointwise operators write and only they read, but for what comes out."""
        products = [op for op in self._graph.operators if op.work not in CASTING]
        others = {place for op in products for place in (*op.reads, *op.saved)}
        out = self._graph.operators[-1].writes[0]
        made = (place for place in self._producers if self._is_pointwise(place))
        return frozenset(place for place in made if place not in others and place != out)

    def _compile_op(self, operator: Op, gradient_only: frozenset[int]) -> Op:
        if operator.work not in CASTING:
            once = tuple(map(self._deduplicate, operator.saved))
            rounds = operator.work is OpWork.matmul and sum(operator.cast_bytes) > 0
            # Rounding is pointwise: a kernel makes it without the steps between.
            scratch = 0 if rounds else operator.backward_scratch
            return replace(operator, saved=once, backward_scratch=scratch)
        begun = dict.fromkeys(
            each for place in operator.saved for each in self._find_saved_sources(place)
        )
        if operator.work is OpWork.matmul_fp8:
            return replace(operator, saved=(*begun,))
        made = gradient_only.intersection(operator.writes)
        return replace(
            operator,
            saved=(*begun, *made),
            backward_scratch=0,
            is_fused=True,
            forbids_inplace=bool(made),
        )

    def _is_pointwise(self, tensor: int) -> bool:
        writer = self._producers.get(tensor)
        return writer is not None and writer.work is OpWork.pointwise and tensor == writer.writes[0]

    def _deduplicate(self, tensor: int) -> int:
        """Returns a product's input, or the one that was made of the same before."""
        if (
            not self._is_pointwise(tensor) or not self._producers[tensor].reads
        ):  # such as a weight's cast
            return tensor
        if len(self._producers[tensor].writes) > 1:  # drawn with a mask of its own
            return tensor
        made = (self._producers[tensor].reads, self._graph.sizes[tensor])
        return self._duplicates.setdefault(made, tensor)

    def _find_saved_sources(self, tensor: int) -> set[int]:
        """Returns what is kept so that a place is there, or can be made again."""
        size, sizes = self._graph.sizes[tensor], self._graph.sizes
        there = size <= self._small_bytes or tensor in self._matmul_saved or tensor in self._saved
        if there or not self._is_pointwise(tensor):
            return {tensor}
        begun = {
            each
            for read in self._producers[tensor].reads
            for each in self._find_saved_sources(read)
        }
        if self._full_recompute:
            return begun
        more = sum(
            sizes[each]
            for each in begun - self._matmul_saved - self._saved
            if sizes[each] > self._small_bytes
        )
        return {tensor} if more > size else begun


def _kernel_order(operators: list[Op], fused_intermediates: frozenset[int]) -> list[Op]:
    """Returns operators in the order of kernels: what is inside of one comes right before it."""
    read = {place for operator in operators for place in operator.reads}
    waiting: dict[int, Op] = {}
    order: list[Op] = []

    def run(operator: Op) -> None:
        for place in operator.reads:
            if place in waiting:
                run(waiting.pop(place))
        order.append(operator)

    for operator in operators:
        if operator.writes[0] in fused_intermediates & read:
            waiting[operator.writes[0]] = operator
        else:
            run(operator)
    return order
