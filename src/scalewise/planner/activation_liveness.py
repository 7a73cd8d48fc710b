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

    ``saved_bytes``: between its forward and its backward. ``forward_peak``: the most that is alive
    in
    its forward, what it reads among it. ``backward_peak``: the most in its backward, what it keeps
    and its weights' gradients among it. ``gradient_bytes``: those of its weights, at the end.
    ``offloaded_bytes``: what is offloaded between its forward and its backward.
    """

    saved_bytes: int
    forward_peak: int
    backward_peak: int
    gradient_bytes: int
    offloaded_bytes: int = 0


def simulate_part(
    graph: OpGraph,
    recompute: Recompute = Recompute.nothing,
    *,
    inputs: Sequence[int] = (0,),
    fresh_gradients: bool,
    offload: bool = False,
    step_scratch_ratio: float = -1,
) -> PartLiveness:
    """Returns what is alive when a part runs whose inputs are ``inputs`` and whose last is output.

    ``fresh_gradients``: whether weights have no gradient yet, so that the one made here stays.
    ``offload``:
    whether what is kept is brought back when backward first reads it. ``step_scratch_ratio``: bytes
    that the
    optimizer takes for each byte of a weight's gradient, before it drops that; below 0: later.
    """
    if isinstance(graph, RecordedPart):
        return _measure_recorded(
            graph,
            BackwardMode(
                recompute, fresh_gradients or step_scratch_ratio >= 0, offload, step_scratch_ratio
            ),
        )
    forward = _ForwardLiveness(graph, inputs)
    forward.run(graph.operators)
    kept, first, again, leftover = forward.saved_bytes, forward, 0, 0
    away: frozenset[int] = frozenset()
    if recompute is Recompute.nothing and offload:
        away = frozenset(
            place for place in forward.save_counts if graph.sizes[place] >= OFFLOAD_MIN_BYTES
        )
        first = _ForwardLiveness(graph, inputs, saved=frozenset(forward.save_counts) - away)
        first.run(graph.operators)
        kept -= sum(graph.sizes[place] for place in away)
    if recompute is not Recompute.nothing:
        cached = selective_ops(graph) if recompute is Recompute.selective else frozenset()
        kept = sum(graph.sizes[place] for place in {*inputs, *cached})
        first = _ForwardLiveness(graph, inputs, saved=cached)
        first.run(graph.operators)
        # It stops at the last whose inputs backward reads; a product kept of that stays unused.
        last = max(
            at for at, operator in enumerate(graph.operators) if operator.backward_reads_forward
        )
        last += graph.operators[last].cast_bytes[0] > 0  # a function that runs before it says so
        second = _ForwardLiveness(graph, inputs, cached=cached)
        second.run(graph.operators[:last])
        unused = {place for op in graph.operators[last:] for place in op.writes}
        # What the block reads is held for the second forward until its backward has ended.
        held = {*inputs} - {*forward.save_counts}
        leftover = sum(graph.sizes[place] for place in (unused & cached) | held)
        # It is made when backward first reads of it; gradients have come so far by then.
        asked = max(
            at for at, operator in enumerate(graph.operators) if operator.backward_reads_forward
        )
        arriving = BackwardLiveness(
            graph,
            forward.save_counts,
            0,
            fresh_gradients=fresh_gradients,
            step_scratch_ratio=step_scratch_ratio,
        )
        arriving.run(graph.operators[asked + 1 :])
        again = second.peak + arriving.current_bytes - forward.saved_bytes
        if offload:
            away = frozenset(place for place in inputs if graph.sizes[place] >= OFFLOAD_MIN_BYTES)
            kept -= sum(graph.sizes[place] for place in away)
    late = away if recompute is Recompute.nothing else frozenset()
    backward = BackwardLiveness(
        graph,
        forward.save_counts,
        leftover,
        fresh_gradients=fresh_gradients,
        offloaded=late,
        step_scratch_ratio=step_scratch_ratio,
    )
    backward.run(graph.operators)
    peak = max(backward.peak, again)
    gone = sum(graph.sizes[place] for place in away)
    return PartLiveness(kept, first.peak, peak, backward.gradient_bytes, gone)


def _measure_recorded(part: RecordedPart, backward_mode: BackwardMode) -> PartLiveness:
    found = part.measure(backward_mode)
    kept, *_ = (
        part.measure(replace(backward_mode, offload=False)) if backward_mode.offload else found
    )
    return PartLiveness(*found, offloaded_bytes=kept - found[0])


def selective_ops(graph: OpGraph) -> frozenset[int]:
    """Returns what selective recomputation keeps."""
    kept = (operator.writes for operator in graph.operators if operator.saved_by_selective)
    return frozenset(place for writes in kept for place in writes)


class _ForwardLiveness:
    """Counts bytes through the operators, in order.

    ``saved_bytes``: what is kept, where it is not what backward reads. ``cached``: what exists
    already.
    """

    def __init__(
        self,
        graph: OpGraph,
        inputs: Sequence[int],
        saved: frozenset[int] | None = None,
        cached: frozenset[int] = frozenset(),
    ) -> None:
        self._graph, self._cached = graph, cached
        self._sizes = graph.sizes.copy()
        self._last_read = {
            place: at for at, operator in enumerate(graph.operators) for place in operator.reads
        }
        self.save_counts: dict[int, int] = {}
        for operator in graph.operators:
            for place in operator.saved:
                self.save_counts[place] = self.save_counts.get(place, 0) + 1
        self._retained = {*inputs, *(self.save_counts if saved is None else saved)}
        for place in graph.fused_intermediates - self._retained:
            self._sizes[place] = 0
        self._current_bytes = self.peak = sum(graph.sizes[place] for place in {*inputs, *cached})

    def run(self, operators: Sequence[Op]) -> None:
        sizes, stays, now, peak = self._sizes, self._retained, self._current_bytes, self.peak
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
        self._current_bytes, self.peak = now, peak

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes that backward will read."""
        return sum(self._graph.sizes[place] for place in self.save_counts)
