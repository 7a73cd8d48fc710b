"""Walks a tape forward and backward and counts what is alive, as autograd would have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scalewise.activation_checkpointing import OFFLOAD_MIN_BYTES, Recompute
from scalewise.models.op_graph import BackwardMode, Op, OpGraph, RecordedPart
from scalewise.planner.backward_liveness import BackwardLiveness


@dataclass(frozen=True)
class PartLiveness:
    """Bytes of one part of a model through a pass.

    ``kept``: between its forward and its backward. ``forward_peak``: the most that is alive in
    its forward, what it reads among it. ``backward_peak``: the most in its backward, what it keeps
    and its weights' gradients among it. ``gradients``: those of its weights, at the end.
    ``away``: what is offloaded between its forward and its backward.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    gradients: int
    away: int = 0


def simulate_part(
    tape: OpGraph,
    recompute: Recompute = Recompute.nothing,
    *,
    given: Sequence[int] = (0,),
    fresh: bool,
    offload: bool = False,
    stepped: float = -1,
) -> PartLiveness:
    """Returns what is alive when a part runs whose inputs are ``given`` and whose last is output.

    ``fresh``: whether weights have no gradient yet, so that the one made here stays. ``offload``:
    whether what is kept is brought back when backward first reads it. ``stepped``: bytes that the
    optimizer takes for each byte of a weight's gradient, before it drops that; below 0: later.
    """
    if isinstance(tape, RecordedPart):
        return _measure_recorded(
            tape, BackwardMode(recompute, fresh or stepped >= 0, offload, stepped)
        )
    forward = _ForwardLiveness(tape, given)
    forward.run(tape.operators)
    kept, first, again, leftover = forward.kept, forward, 0, 0
    away: frozenset[int] = frozenset()
    if recompute is Recompute.nothing and offload:
        away = frozenset(place for place in forward.saves if tape.sizes[place] >= OFFLOAD_MIN_BYTES)
        first = _ForwardLiveness(tape, given, kept=frozenset(forward.saves) - away)
        first.run(tape.operators)
        kept -= sum(tape.sizes[place] for place in away)
    if recompute is not Recompute.nothing:
        cached = selective_ops(tape) if recompute is Recompute.selective else frozenset()
        kept = sum(tape.sizes[place] for place in {*given, *cached})
        first = _ForwardLiveness(tape, given, kept=cached)
        first.run(tape.operators)
        # It stops at the last whose inputs backward reads; a product kept of that stays unused.
        last = max(at for at, operator in enumerate(tape.operators) if operator.reads_back)
        last += tape.operators[last].casts[0] > 0  # a function that runs before it says so
        second = _ForwardLiveness(tape, given, cached=cached)
        second.run(tape.operators[:last])
        unused = {place for op in tape.operators[last:] for place in op.writes}
        # What the block reads is held for the second forward until its backward has ended.
        held = {*given} - {*forward.saves}
        leftover = sum(tape.sizes[place] for place in (unused & cached) | held)
        # It is made when backward first reads of it; gradients have come so far by then.
        asked = max(at for at, operator in enumerate(tape.operators) if operator.reads_back)
        arriving = BackwardLiveness(tape, forward.saves, 0, fresh=fresh, stepped=stepped)
        arriving.run(tape.operators[asked + 1 :])
        again = second.peak + arriving.now - forward.kept
        if offload:
            away = frozenset(place for place in given if tape.sizes[place] >= OFFLOAD_MIN_BYTES)
            kept -= sum(tape.sizes[place] for place in away)
    late = away if recompute is Recompute.nothing else frozenset()
    backward = BackwardLiveness(
        tape, forward.saves, leftover, fresh=fresh, away=late, stepped=stepped
    )
    backward.run(tape.operators)
    peak = max(backward.peak, again)
    gone = sum(tape.sizes[place] for place in away)
    return PartLiveness(kept, first.peak, peak, backward.held, gone)


def _measure_recorded(tape: RecordedPart, way: BackwardMode) -> PartLiveness:
    found = tape.play(way)
    kept, *_ = tape.play(replace(way, offload=False)) if way.offload else found
    return PartLiveness(*found, away=kept - found[0])


def selective_ops(tape: OpGraph) -> frozenset[int]:
    """Returns what selective recomputation keeps."""
    kept = (operator.writes for operator in tape.operators if operator.kept_by_selective)
    return frozenset(place for writes in kept for place in writes)


class _ForwardLiveness:
    """Counts bytes through the operators, in order.

    ``kept``: what is kept, where it is not what backward reads. ``cached``: what exists already.
    """

    def __init__(
        self,
        tape: OpGraph,
        given: Sequence[int],
        kept: frozenset[int] | None = None,
        cached: frozenset[int] = frozenset(),
    ) -> None:
        self._tape, self._cached = tape, cached
        self._sizes = tape.sizes.copy()
        self._last_read = {
            place: at for at, operator in enumerate(tape.operators) for place in operator.reads
        }
        self.saves: dict[int, int] = {}
        for operator in tape.operators:
            for place in operator.saved:
                self.saves[place] = self.saves.get(place, 0) + 1
        self._stays = {*given, *(self.saves if kept is None else kept)}
        for place in tape.inside - self._stays:
            self._sizes[place] = 0
        self._now = self.peak = sum(tape.sizes[place] for place in {*given, *cached})

    def run(self, operators: Sequence[Op]) -> None:
        sizes, stays, now, peak = self._sizes, self._stays, self._now, self.peak
        for at, operator in enumerate(operators):
            for place in operator.writes:
                if place not in self._cached:
                    now += sizes[place]
            if now + operator.forward_scratch > peak:
                peak = now + operator.forward_scratch
            for place in operator.reads:
                if self._last_read[place] == at and place not in stays:
                    now -= sizes[place]
            for place in operator.writes[1:]:
                if place not in stays:
                    now -= sizes[place]
        self._now, self.peak = now, peak

    @property
    def kept(self) -> int:
        """Returns the bytes that backward will read."""
        return sum(self._tape.sizes[place] for place in self.saves)
