"""A tape as a compiler runs it: what only pointwise operators read is made in their kernels."""

from __future__ import annotations

from dataclasses import replace

from scalewise.models.tape import Operator, Played, Tape, Work

FEW = 32
"""What is so many times smaller than the largest tensor is a sum over features: it is kept."""

CASTING = (Work.pointwise, Work.product_fp8)
"""What reads by kernels of pointwise operators: products of 8 bits are given casts."""


def fused(tape: Tape, *, again: bool = False) -> Tape:
    """Returns a tape that keeps what torch's min-cut partitioner does.

    What products read is in memory anyway, so that it is kept, once if it was made twice. What
    pointwise operators wrote for others like them, backward makes again in its own kernels, and
    keeps what these begin with.

    ``again``: whether backward makes all of it again. Products of weights' gradients then come
    after the kernel for what they read, and one that writes that writes two gradients anew. With
    products of 8 bits it is the tape itself: less than what is found, but nothing is nearer.
    """
    if isinstance(tape, Played):
        return tape
    if again and any(operator.work is Work.product_fp8 for operator in tape.operators):
        return tape
    return _Fusion(tape, again).fused()


class _Fusion:
    def __init__(self, tape: Tape, again: bool) -> None:
        self._tape, self._again = tape, again
        self._few = max(tape.sizes, default=0) // FEW
        self._writer = {place: op for op in tape.operators for place in op.writes}
        products = [op for op in tape.operators if op.work not in CASTING]
        self._read = {place for op in products for place in op.saved}
        self._twin: dict[tuple[tuple[int, ...], int], int] = {}

    def fused(self) -> Tape:
        """Returns the tape."""
        tape = self._tape
        operators = [self._compiled(each) for each in tape.operators]
        return Tape(tape.sizes, tape.trained, operators, self._inside())

    def _inside(self) -> frozenset[int]:
        """Returns what pointwise operators write and only they read, but for what comes out."""
        others = {p for op in self._tape.operators if op.work not in CASTING for p in op.reads}
        out = self._tape.operators[-1].writes[0]
        made = (place for place in self._writer if self._pointwise(place))
        return frozenset(place for place in made if place not in others and place != out)

    def _compiled(self, operator: Operator) -> Operator:
        if operator.work not in CASTING:
            once = tuple(map(self._once, operator.saved))
            rounds = operator.work is Work.product and sum(operator.casts) > 0
            # Rounding is pointwise: a kernel makes it without the steps between.
            scratch = 0 if rounds else operator.scratch
            return replace(operator, saved=once, scratch=scratch)
        begun = dict.fromkeys(each for place in operator.saved for each in self._sources(place))
        if operator.work is Work.product_fp8:
            return replace(operator, saved=(*begun,))
        late = [place for place in operator.writes if self._again and self._late(place)]
        alone = not late or len(operator.gradients) == 1
        return replace(operator, saved=(*begun, *late), scratch=0, in_place=alone)

    def _late(self, place: int) -> bool:
        """Returns whether a product reads it, and it is no second one of its kind."""
        return place in self._read and self._once(place) == place

    def _pointwise(self, place: int) -> bool:
        writer = self._writer.get(place)
        return writer is not None and writer.work is Work.pointwise

    def _once(self, place: int) -> int:
        """Returns a product's input, or the one that was made of the same before."""
        if not self._pointwise(place) or not self._writer[place].reads:  # such as a weight's cast
            return place
        made = (self._writer[place].reads, self._tape.sizes[place])
        return self._twin.setdefault(made, place)

    def _sources(self, place: int) -> set[int]:
        """Returns what is kept so that a place is there, or can be made again."""
        small = self._tape.sizes[place] <= self._few
        if small or place in self._read or not self._pointwise(place):
            return {place}
        return {each for read in self._writer[place].reads for each in self._sources(read)}
