"""A tape as a compiler runs it: what only pointwise operators read is made in their kernels."""

from __future__ import annotations

from dataclasses import replace

from scalewise.models.op_graph import Op, OpGraph, OpWork, RecordedPart

FEW = 32
"""What is so many times smaller than the largest tensor is a sum over features: it is kept."""

CASTING = (OpWork.pointwise, OpWork.product_fp8)
"""What reads by kernels of pointwise operators: products of 8 bits are given casts."""


def fuse(tape: OpGraph, *, again: bool = False) -> OpGraph:
    """Returns a tape that keeps what torch's min-cut partitioner does.

    What products read is in memory anyway, so that it is kept, once if it was made twice. What
    pointwise operators wrote for others like them, backward makes again in its own kernels, and
    keeps what these begin with, or what was made of it where that is less.

    ``again``: whether backward makes all of it again, and then in its kernels what only products of
    weights' gradients read. With products of 8 bits it is the tape itself: less than what is found,
    but nothing is nearer.
    """
    if isinstance(tape, RecordedPart):
        return tape
    if again and any(operator.work is OpWork.product_fp8 for operator in tape.operators):
        return tape
    return _Fuser(tape, again).fused()


class _Fuser:
    def __init__(self, tape: OpGraph, again: bool) -> None:
        self._tape, self._again = tape, again
        self._few = max(tape.sizes, default=0) // FEW
        self._writer = {place: op for op in tape.operators for place in op.writes}
        products = [op for op in tape.operators if op.work not in CASTING]
        self._read = {place for op in products for place in op.saved}
        self._twin: dict[tuple[tuple[int, ...], int], int] = {}
        self._kept = {0}
        for operator in tape.operators:
            if operator.work is OpWork.pointwise:
                self._kept.update(*map(self._sources, operator.saved))

    def fused(self) -> OpGraph:
        """Returns the tape."""
        tape, inside = self._tape, self._inside()
        late = self._late() if self._again else frozenset()
        operators = [self._compiled(each, late) for each in _kernel_order(tape.operators, inside)]
        return OpGraph(tape.sizes, tape.trained, operators, inside)

    def _late(self) -> frozenset[int]:
        """Returns what kernels make beside gradients, as the products that read it run no more."""
        wanted: set[int] = set()
        late = set()
        for operator in reversed(self._tape.operators):
            if operator.work in CASTING:
                wanted.update(each for place in operator.saved for each in self._sources(place))
                late.update(self._read.intersection(operator.writes) - wanted)
            elif operator.work is OpWork.attention:
                wanted.update(operator.saved)
            if not wanted.isdisjoint(operator.writes):
                wanted.update(operator.reads)
        return frozenset(place for place in late if self._once(place) == place)

    def _inside(self) -> frozenset[int]:
        """Returns what pointwise operators write and only they read, but for what comes out."""
        products = [op for op in self._tape.operators if op.work not in CASTING]
        others = {place for op in products for place in (*op.reads, *op.saved)}
        out = self._tape.operators[-1].writes[0]
        made = (place for place in self._writer if self._pointwise(place))
        return frozenset(place for place in made if place not in others and place != out)

    def _compiled(self, operator: Op, late: frozenset[int]) -> Op:
        if operator.work not in CASTING:
            once = tuple(map(self._once, operator.saved))
            rounds = operator.work is OpWork.product and sum(operator.casts) > 0
            # Rounding is pointwise: a kernel makes it without the steps between.
            scratch = 0 if rounds else operator.scratch
            return replace(operator, saved=once, scratch=scratch)
        begun = dict.fromkeys(each for place in operator.saved for each in self._sources(place))
        if operator.work is OpWork.product_fp8:
            return replace(operator, saved=(*begun,))
        made = late.intersection(operator.writes)
        return replace(operator, saved=(*begun, *made), scratch=0, kernel=True, anew=bool(made))

    def _pointwise(self, place: int) -> bool:
        writer = self._writer.get(place)
        return writer is not None and writer.work is OpWork.pointwise and place == writer.writes[0]

    def _once(self, place: int) -> int:
        """Returns a product's input, or the one that was made of the same before."""
        if not self._pointwise(place) or not self._writer[place].reads:  # such as a weight's cast
            return place
        if len(self._writer[place].writes) > 1:  # drawn with a mask of its own
            return place
        made = (self._writer[place].reads, self._tape.sizes[place])
        return self._twin.setdefault(made, place)

    def _sources(self, place: int) -> set[int]:
        """Returns what is kept so that a place is there, or can be made again."""
        size, sizes = self._tape.sizes[place], self._tape.sizes
        there = size <= self._few or place in self._read or place in self._kept
        if there or not self._pointwise(place):
            return {place}
        begun = {each for read in self._writer[place].reads for each in self._sources(read)}
        if self._again:
            return begun
        more = sum(
            sizes[each] for each in begun - self._read - self._kept if sizes[each] > self._few
        )
        return {place} if more > size else begun


def _kernel_order(operators: list[Op], inside: frozenset[int]) -> list[Op]:
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
        if operator.writes[0] in inside & read:
            waiting[operator.writes[0]] = operator
        else:
            run(operator)
    return order
