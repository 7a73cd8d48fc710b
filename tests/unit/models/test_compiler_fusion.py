"""The operator graph after compiler fusion: saved tensors and memory traffic."""

from __future__ import annotations

import pytest

from scalewise.config.compose import compose
from scalewise.models.compiler_fusion import fuse
from scalewise.models.op_graph import OpGraph, OpWork, Recompute
from scalewise.planner import step_time
from scalewise.planner.activation_liveness import simulate_part
from scalewise.planner.peak_memory import worst_rank_breakdown

X, WIDE_SIZE, SUM_SIZE = 1000, 4000, 10


def norm_and_matmul() -> OpGraph:
    """Graph of a decomposed norm, a matmul, and an activation that a second matmul reads."""
    graph = OpGraph()
    x = graph.add_tensor(X)
    mean = graph.add_op(OpWork.pointwise, (x,), SUM_SIZE, saves_output=True)
    scaled = graph.add_op(OpWork.pointwise, (x, mean), X, saved=(x, mean), backward_scratch=X)
    normed = graph.add_op(OpWork.pointwise, (scaled,), X, saved=(scaled,))
    up_projection = graph.add_op(
        OpWork.matmul, (normed,), WIDE_SIZE, saved=(normed,), weight_gradient_bytes=(8, 8)
    )
    half = graph.add_op(OpWork.pointwise, (up_projection,), WIDE_SIZE, saved=(up_projection,))
    product = graph.add_op(
        OpWork.pointwise, (half, up_projection), WIDE_SIZE, saved=(half, up_projection)
    )
    graph.add_op(OpWork.matmul, (product,), X, saved=(product,), weight_gradient_bytes=(8, 8))
    return graph


def test_fusion_recomputes_tensors_read_by_kernels_only() -> None:
    graph = norm_and_matmul()
    eager, compiled = (
        simulate_part(op_graph, Recompute.nothing, fresh_gradients=True)
        for op_graph in (graph, fuse(graph))
    )
    assert eager.saved_bytes == X + SUM_SIZE + X + X + WIDE_SIZE + WIDE_SIZE + WIDE_SIZE
    assert compiled.saved_bytes == X + SUM_SIZE + X + WIDE_SIZE + WIDE_SIZE
    assert compiled.backward_peak < eager.backward_peak


def test_fusion_does_not_move_tensors_read_by_kernels_only() -> None:
    graph = norm_and_matmul()
    compiled = fuse(graph)
    assert compiled.fused_intermediates == {1, 2, 5}
    for operator in graph.operators:
        tensor_ids = (*operator.reads, *operator.writes)
        fused_bytes = sum(
            graph.sizes[tensor_id]
            for tensor_id in tensor_ids
            if tensor_id in compiled.fused_intermediates
        )
        assert (
            compiled.count_moved_bytes(tensor_ids)
            == graph.count_moved_bytes(tensor_ids) - fused_bytes
        ), operator


def test_fusion_of_a_dropped_sum_saves_its_summands() -> None:
    """A norm reads the residual stream after a sublayer; backward saves both summands."""
    graph = OpGraph()
    x = graph.add_tensor(X)
    branch = graph.add_op(OpWork.matmul, (x,), X, saved=(x,), weight_gradient_bytes=(8, 8))
    stream = graph.add_op(OpWork.pointwise, (x, branch), X, shares_gradient=True)
    normed = graph.add_op(OpWork.pointwise, (stream,), X, saved=(stream,))
    graph.add_op(OpWork.matmul, (normed,), X, saved=(normed,), weight_gradient_bytes=(8, 8))
    fused_graph = fuse(graph)
    assert {tensor_id for operator in fused_graph.operators for tensor_id in operator.saved} == {
        x,
        branch,
        normed,
    }


def test_fusion_saves_casts_of_one_tensor_once() -> None:
    graph = OpGraph()
    x = graph.add_tensor(X)
    for _ in range(2):
        weight = graph.add_op(OpWork.pointwise, (), SUM_SIZE)
        cast = graph.add_op(OpWork.pointwise, (x,), X // 2)
        graph.add_op(OpWork.matmul, (cast,), X, saved=(cast, weight), weight_gradient_bytes=(8, 8))
    assert simulate_part(graph, fresh_gradients=True).saved_bytes == 2 * (SUM_SIZE + X // 2)
    assert simulate_part(fuse(graph), fresh_gradients=True).saved_bytes == 2 * SUM_SIZE + X // 2


def test_fusion_saves_dropout_with_its_mask() -> None:
    """As for the inputs of two adapters: the dropout mask is saved, not recomputed."""
    graph = OpGraph()
    x = graph.add_tensor(X)
    for _ in range(2):
        dropout_mask = graph.add_op(OpWork.pointwise, (x,), X, extra_output_bytes=(X // 4,))
        graph.add_op(
            OpWork.matmul, (dropout_mask,), X, saved=(dropout_mask,), weight_gradient_bytes=(8, 8)
        )
    assert simulate_part(fuse(graph), fresh_gradients=True).saved_bytes == 2 * (X + X // 4)


def test_fusion_saves_a_sum_smaller_than_its_summands() -> None:
    """As for each layer with an adapter."""
    graph = OpGraph()
    x = graph.add_tensor(X)
    summands = [
        graph.add_op(OpWork.matmul, (x,), WIDE_SIZE, saved=(x,), weight_gradient_bytes=(8, 8))
        for _ in range(2)
    ]
    total = graph.add_op(OpWork.pointwise, summands, WIDE_SIZE, shares_gradient=True)
    half = graph.add_op(OpWork.pointwise, (total,), WIDE_SIZE, saved=(total,))
    graph.add_op(OpWork.matmul, (half,), X, saved=(half,), weight_gradient_bytes=(8, 8))
    assert simulate_part(fuse(graph), fresh_gradients=True).saved_bytes == X + WIDE_SIZE + WIDE_SIZE
    fused_graph = fuse(graph, full_recompute=True)
    kernel = next(operator for operator in fused_graph.operators if half in operator.writes)
    assert {*kernel.saved} == {*summands, half}


def test_fusion_kernel_reuses_its_inputs() -> None:
    graph = OpGraph()
    x = graph.add_tensor(X)
    wide_output = graph.add_op(
        OpWork.matmul, (x,), WIDE_SIZE, saved=(x,), weight_gradient_bytes=(8, 8)
    )
    half = graph.add_op(OpWork.pointwise, (wide_output,), WIDE_SIZE, saved=(wide_output,))
    outputs = [
        graph.add_op(OpWork.matmul, (half,), X, saved=(half,), weight_gradient_bytes=(8, 8))
        for _ in range(4)
    ]
    graph.add_op(OpWork.pointwise, outputs, X, shares_gradient=True)
    eager, compiled = (
        simulate_part(op_graph, fresh_gradients=False).backward_peak
        for op_graph in (graph, fuse(graph))
    )
    input_and_output_bytes = X + WIDE_SIZE + WIDE_SIZE + X + 8
    assert eager == input_and_output_bytes + 3 * WIDE_SIZE  # two tensors and their sum
    assert (
        compiled == input_and_output_bytes + 4 * WIDE_SIZE
    )  # and the kernel allocates no other tensor


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "fp8"])
def test_fusion_reduces_planned_memory_and_time(precision: str) -> None:
    overrides = ["model=llama3_8b", "hardware=h100", "data=synthetic", f"precision={precision}"]
    overrides += ["parallelism=fsdp", "parallelism.shards=8", "tracking=none"]
    runs = [
        compose([*overrides, f"compile={scope}"], check_machine=False)
        for scope in ("none", "block", "whole")
    ]
    eager, block, whole_model_peak = (worst_rank_breakdown(run).peak for run in runs)
    assert whole_model_peak == block < eager
    times = [step_time.predict_step_time(run) for run in runs]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].seconds < times[0].seconds
