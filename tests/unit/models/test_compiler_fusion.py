"""The operator graph after compiler fusion: saved tensors and memory traffic."""

from __future__ import annotations

import pytest

from scalewise.config.compose import compose
from scalewise.models.compiler_fusion import fuse
from scalewise.models.op_graph import OpGraph, OpWork, Recompute
from scalewise.planner import step_time
from scalewise.planner.activation_liveness import simulate_part
from scalewise.planner.peak_memory import worst_rank_breakdown

X, WIDE, SUM = 1000, 4000, 10


def norm_and_product() -> OpGraph:
    """A norm taken apart, a product, and an activation that another product reads."""
    graph = OpGraph()
    x = graph.add_tensor(X)
    mean = graph.add_op(OpWork.pointwise, (x,), SUM, saves_output=True)
    scaled = graph.add_op(OpWork.pointwise, (x, mean), X, saved=(x, mean), backward_scratch=X)
    normed = graph.add_op(OpWork.pointwise, (scaled,), X, saved=(scaled,))
    up = graph.add_op(OpWork.matmul, (normed,), WIDE, saved=(normed,), weight_gradient_bytes=(8, 8))
    half = graph.add_op(OpWork.pointwise, (up,), WIDE, saved=(up,))
    whole = graph.add_op(OpWork.pointwise, (half, up), WIDE, saved=(half, up))
    graph.add_op(OpWork.matmul, (whole,), X, saved=(whole,), weight_gradient_bytes=(8, 8))
    return graph


def test_fusion_recomputes_tensors_read_by_kernels_only() -> None:
    graph = norm_and_product()
    eager, compiled = (
        simulate_part(each, Recompute.nothing, fresh_gradients=True)
        for each in (graph, fuse(graph))
    )
    assert eager.saved_bytes == X + SUM + X + X + WIDE + WIDE + WIDE
    assert compiled.saved_bytes == X + SUM + X + WIDE + WIDE
    assert compiled.backward_peak < eager.backward_peak


def test_fusion_does_not_move_tensors_read_by_kernels_only() -> None:
    graph = norm_and_product()
    compiled = fuse(graph)
    assert compiled.fused_intermediates == {1, 2, 5}
    for operator in graph.operators:
        places = (*operator.reads, *operator.writes)
        inside = sum(
            graph.sizes[place] for place in places if place in compiled.fused_intermediates
        )
        assert compiled.count_moved_bytes(places) == graph.count_moved_bytes(places) - inside, (
            operator
        )


def test_fusion_of_a_dropped_sum_saves_its_summands() -> None:
    """Of the stream behind a sublayer, which a norm reads, backward keeps both summands."""
    graph = OpGraph()
    x = graph.add_tensor(X)
    branch = graph.add_op(OpWork.matmul, (x,), X, saved=(x,), weight_gradient_bytes=(8, 8))
    stream = graph.add_op(OpWork.pointwise, (x, branch), X, shares_gradient=True)
    normed = graph.add_op(OpWork.pointwise, (stream,), X, saved=(stream,))
    graph.add_op(OpWork.matmul, (normed,), X, saved=(normed,), weight_gradient_bytes=(8, 8))
    found = fuse(graph)
    assert {place for each in found.operators for place in each.saved} == {x, branch, normed}


def test_fusion_saves_casts_of_one_tensor_once() -> None:
    graph = OpGraph()
    x = graph.add_tensor(X)
    for _ in range(2):
        weight = graph.add_op(OpWork.pointwise, (), SUM)
        cast = graph.add_op(OpWork.pointwise, (x,), X // 2)
        graph.add_op(OpWork.matmul, (cast,), X, saved=(cast, weight), weight_gradient_bytes=(8, 8))
    assert simulate_part(graph, fresh_gradients=True).saved_bytes == 2 * (SUM + X // 2)
    assert simulate_part(fuse(graph), fresh_gradients=True).saved_bytes == 2 * SUM + X // 2


def test_fusion_saves_dropout_with_its_mask() -> None:
    """As the inputs of two adapters: neither another draw nor a mask is made of what was read."""
    graph = OpGraph()
    x = graph.add_tensor(X)
    for _ in range(2):
        drawn = graph.add_op(OpWork.pointwise, (x,), X, extra_output_bytes=(X // 4,))
        graph.add_op(OpWork.matmul, (drawn,), X, saved=(drawn,), weight_gradient_bytes=(8, 8))
    assert simulate_part(fuse(graph), fresh_gradients=True).saved_bytes == 2 * (X + X // 4)


def test_fusion_saves_a_sum_smaller_than_its_summands() -> None:
    """As beside every layer that has an adapter."""
    graph = OpGraph()
    x = graph.add_tensor(X)
    parts = [
        graph.add_op(OpWork.matmul, (x,), WIDE, saved=(x,), weight_gradient_bytes=(8, 8))
        for _ in range(2)
    ]
    whole = graph.add_op(OpWork.pointwise, parts, WIDE, shares_gradient=True)
    half = graph.add_op(OpWork.pointwise, (whole,), WIDE, saved=(whole,))
    graph.add_op(OpWork.matmul, (half,), X, saved=(half,), weight_gradient_bytes=(8, 8))
    assert simulate_part(fuse(graph), fresh_gradients=True).saved_bytes == X + WIDE + WIDE
    again = fuse(graph, full_recompute=True)
    kernel = next(each for each in again.operators if half in each.writes)
    assert {*kernel.saved} == {*parts, half}


def test_fusion_kernel_reuses_its_inputs() -> None:
    graph = OpGraph()
    x = graph.add_tensor(X)
    wide = graph.add_op(OpWork.matmul, (x,), WIDE, saved=(x,), weight_gradient_bytes=(8, 8))
    half = graph.add_op(OpWork.pointwise, (wide,), WIDE, saved=(wide,))
    ends = [
        graph.add_op(OpWork.matmul, (half,), X, saved=(half,), weight_gradient_bytes=(8, 8))
        for _ in range(4)
    ]
    graph.add_op(OpWork.pointwise, ends, X, shares_gradient=True)
    eager, compiled = (
        simulate_part(each, fresh_gradients=False).backward_peak for each in (graph, fuse(graph))
    )
    besides = X + WIDE + WIDE + X + 8
    assert eager == besides + 3 * WIDE  # two, and their sum
    assert compiled == besides + 4 * WIDE  # and the kernel makes no other


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "fp8"])
def test_fusion_reduces_planned_memory_and_time(precision: str) -> None:
    overrides = ["model=llama3_8b", "hardware=h100", "data=synthetic", f"precision={precision}"]
    overrides += ["parallelism=fsdp", "parallelism.shards=8", "tracking=none"]
    runs = [
        compose([*overrides, f"compile={scope}"], check_machine=False)
        for scope in ("none", "block", "whole")
    ]
    eager, block, whole = (worst_rank_breakdown(run).peak for run in runs)
    assert whole == block < eager
    times = [step_time.predict_step_time(run) for run in runs]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].seconds < times[0].seconds
