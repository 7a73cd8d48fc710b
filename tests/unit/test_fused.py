"""A tape as a compiler runs it: what is kept, and what passes through memory."""

from __future__ import annotations

import pytest

from scalewise.activation_checkpointing import Recompute
from scalewise.config.compose import compose
from scalewise.models.compiler_fusion import fuse
from scalewise.models.op_graph import OpGraph, OpWork
from scalewise.planner import step_time
from scalewise.planner.activation_liveness import simulate_part
from scalewise.planner.worst_rank import worst_rank_breakdown

X, WIDE, SUM = 1000, 4000, 10


def norm_and_product() -> OpGraph:
    """A norm taken apart, a product, and an activation that another product reads."""
    tape = OpGraph()
    x = tape.tensor(X)
    mean = tape.add(OpWork.pointwise, (x,), SUM, saves_output=True)
    scaled = tape.add(OpWork.pointwise, (x, mean), X, saved=(x, mean), scratch=X)
    normed = tape.add(OpWork.pointwise, (scaled,), X, saved=(scaled,))
    up = tape.add(OpWork.product, (normed,), WIDE, saved=(normed,), weight=(8, 8))
    half = tape.add(OpWork.pointwise, (up,), WIDE, saved=(up,))
    whole = tape.add(OpWork.pointwise, (half, up), WIDE, saved=(half, up))
    tape.add(OpWork.product, (whole,), X, saved=(whole,), weight=(8, 8))
    return tape


def test_what_only_kernels_read_is_made_again() -> None:
    tape = norm_and_product()
    eager, compiled = (
        simulate_part(each, Recompute.nothing, fresh=True) for each in (tape, fuse(tape))
    )
    assert eager.kept == X + SUM + X + X + WIDE + WIDE + WIDE
    assert compiled.kept == X + SUM + X + WIDE + WIDE
    assert compiled.backward_peak < eager.backward_peak


def test_what_only_kernels_read_is_not_moved() -> None:
    tape = norm_and_product()
    compiled = fuse(tape)
    assert compiled.inside == {1, 2, 5}
    for operator in tape.operators:
        places = (*operator.reads, *operator.writes)
        inside = sum(tape.sizes[place] for place in places if place in compiled.inside)
        assert compiled.moved(places) == tape.moved(places) - inside


def test_a_dropped_sum_keeps_what_it_is_made_of() -> None:
    """Of the stream behind a sublayer, which a norm reads, backward keeps both summands."""
    tape = OpGraph()
    x = tape.tensor(X)
    branch = tape.add(OpWork.product, (x,), X, saved=(x,), weight=(8, 8))
    stream = tape.add(OpWork.pointwise, (x, branch), X, shares=True)
    normed = tape.add(OpWork.pointwise, (stream,), X, saved=(stream,))
    tape.add(OpWork.product, (normed,), X, saved=(normed,), weight=(8, 8))
    found = fuse(tape)
    assert {place for each in found.operators for place in each.saved} == {x, branch, normed}


def test_casts_of_the_same_are_kept_once_and_those_of_weights_each() -> None:
    tape = OpGraph()
    x = tape.tensor(X)
    for _ in range(2):
        weight = tape.add(OpWork.pointwise, (), SUM)
        cast = tape.add(OpWork.pointwise, (x,), X // 2)
        tape.add(OpWork.product, (cast,), X, saved=(cast, weight), weight=(8, 8))
    assert simulate_part(tape, fresh=True).kept == 2 * (SUM + X // 2)
    assert simulate_part(fuse(tape), fresh=True).kept == 2 * SUM + X // 2


def test_what_is_drawn_is_kept_with_its_mask() -> None:
    """As the inputs of two adapters: neither another draw nor a mask is made of what was read."""
    tape = OpGraph()
    x = tape.tensor(X)
    for _ in range(2):
        drawn = tape.add(OpWork.pointwise, (x,), X, extra=(X // 4,))
        tape.add(OpWork.product, (drawn,), X, saved=(drawn,), weight=(8, 8))
    assert simulate_part(fuse(tape), fresh=True).kept == 2 * (X + X // 4)


def test_a_sum_is_kept_where_it_is_less_than_what_it_is_made_of() -> None:
    """As beside every layer that has an adapter."""
    tape = OpGraph()
    x = tape.tensor(X)
    parts = [tape.add(OpWork.product, (x,), WIDE, saved=(x,), weight=(8, 8)) for _ in range(2)]
    whole = tape.add(OpWork.pointwise, parts, WIDE, shares=True)
    half = tape.add(OpWork.pointwise, (whole,), WIDE, saved=(whole,))
    tape.add(OpWork.product, (half,), X, saved=(half,), weight=(8, 8))
    assert simulate_part(fuse(tape), fresh=True).kept == X + WIDE + WIDE
    again = fuse(tape, again=True)
    kernel = next(each for each in again.operators if half in each.writes)
    assert {*kernel.saved} == {*parts, half}


def test_a_kernel_reads_all_that_arrives_for_it_and_writes_over_it() -> None:
    tape = OpGraph()
    x = tape.tensor(X)
    wide = tape.add(OpWork.product, (x,), WIDE, saved=(x,), weight=(8, 8))
    half = tape.add(OpWork.pointwise, (wide,), WIDE, saved=(wide,))
    ends = [tape.add(OpWork.product, (half,), X, saved=(half,), weight=(8, 8)) for _ in range(4)]
    tape.add(OpWork.pointwise, ends, X, shares=True)
    eager, compiled = (
        simulate_part(each, fresh=False).backward_peak for each in (tape, fuse(tape))
    )
    besides = X + WIDE + WIDE + X + 8
    assert eager == besides + 3 * WIDE  # two, and their sum
    assert compiled == besides + 4 * WIDE  # and the kernel makes no other


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "fp8"])
def test_a_compiled_model_takes_less_memory_and_time(precision: str) -> None:
    line = ["model=llama3_8b", "hardware=h100", "data=synthetic", f"precision={precision}"]
    line += ["parallelism=fsdp", "parallelism.shards=8", "tracking=none"]
    runs = [
        compose([*line, f"compile={scope}"], here=False) for scope in ("none", "block", "whole")
    ]
    eager, block, whole = (worst_rank_breakdown(run).peak for run in runs)
    assert whole == block < eager
    times = [step_time.predict_step_time(run) for run in runs]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].seconds < times[0].seconds
