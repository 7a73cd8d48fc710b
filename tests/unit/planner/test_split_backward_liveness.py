"""Tensor lifetimes of a backward pass that is split, in graphs of a few operators."""

from __future__ import annotations

from scalewise.models.op_graph import OpGraph, OpWork
from scalewise.planner.split_backward_liveness import simulate_split_part

X, HIDDEN, MASK, WEIGHT = 10, 40, 5, 7
"""Bytes of the input, of the hidden features, of a dropout mask and of a weight."""


def build_feedforward(*, trains: bool = True, joint: bool = False) -> OpGraph:
    """Two linear layers with an activation between them, dropout and a residual connection."""
    graph = OpGraph()
    weight = (WEIGHT * trains,) * 2
    x = graph.add_tensor(X)
    up = graph.add_op(
        OpWork.matmul,
        (x,),
        HIDDEN,
        saved=(x,),
        weight_gradient_bytes=weight,
        has_joint_backward=joint,
    )
    hidden = graph.add_op(OpWork.pointwise, (up,), HIDDEN, saved=(up,))
    down = graph.add_op(OpWork.matmul, (hidden,), X, saved=(hidden,), weight_gradient_bytes=weight)
    dropped = graph.add_op(OpWork.pointwise, (down,), X, extra_output_bytes=(MASK,))
    graph.add_op(OpWork.pointwise, (x, dropped), X, shares_gradient=True)
    return graph


def test_input_backward_keeps_gradients_of_the_outputs_of_linear_layers() -> None:
    liveness = simulate_split_part(build_feedforward(), fresh_gradients=True, keeps_all=True)
    assert liveness.has_weights
    assert liveness.retained_bytes == HIDDEN + X
    assert liveness.retained_output_bytes == 0  # only dropout reads it
    # Gradients of the output, of down, of hidden and of up.
    assert liveness.input_peak == X + X + HIDDEN + HIDDEN


def test_retained_gradient_of_the_output_is_counted_apart() -> None:
    graph = OpGraph()
    x = graph.add_tensor(X)
    graph.add_op(OpWork.matmul, (x,), HIDDEN, saved=(x,), weight_gradient_bytes=(WEIGHT, WEIGHT))
    liveness = simulate_split_part(graph, fresh_gradients=True, keeps_all=True)
    assert (liveness.retained_bytes, liveness.retained_output_bytes) == (0, HIDDEN)
    assert liveness.input_peak == HIDDEN + X


def test_graph_after_the_last_weight_is_freed_by_the_input_backward() -> None:
    """Detached outputs free nodes that no weight needs, as the mask of the dropout after it."""
    last, inner = (
        simulate_split_part(build_feedforward(), fresh_gradients=True, keeps_all=keeps_all)
        for keeps_all in (False, True)
    )
    assert last.kept_bytes == X + HIDDEN + HIDDEN
    assert inner.kept_bytes == last.kept_bytes + MASK
    assert last.keeps_input


def test_weight_backward_frees_what_only_linear_layers_have_saved() -> None:
    """The activation does not run again: its input is freed with the whole graph."""
    fresh, added = (
        simulate_split_part(build_feedforward(), fresh_gradients=value, keeps_all=True)
        for value in (True, False)
    )
    freed = (X + HIDDEN) + (HIDDEN + X)
    assert added.weight_change == -freed
    assert fresh.weight_change == 2 * WEIGHT - freed
    assert fresh.weight_peak == added.weight_peak == WEIGHT


def test_joint_backward_computes_all_gradients_twice() -> None:
    alone, joint = (
        simulate_split_part(build_feedforward(joint=value), fresh_gradients=True, keeps_all=True)
        for value in (False, True)
    )
    assert joint.weight_peak == alone.weight_peak + X
    assert joint.retained_bytes == alone.retained_bytes


def test_frozen_part_keeps_nothing() -> None:
    graph = build_feedforward(trains=False)
    liveness = simulate_split_part(graph, fresh_gradients=True, keeps_all=False)
    assert not liveness.has_weights
    assert liveness.kept_bytes == liveness.retained_bytes == 0
    assert (liveness.weight_peak, liveness.weight_change) == (0, 0)
