"""A tape as a compiler runs it: what is kept, and what passes through memory."""

from __future__ import annotations

import pytest

from scalewise.config.compose import compose
from scalewise.memory import Recompute
from scalewise.models.fused import fused
from scalewise.models.tape import Tape, Work
from scalewise.plan import steptime
from scalewise.plan.memory import worst
from scalewise.plan.replay import replay

X, WIDE, SUM = 1000, 4000, 10


def norm_and_product() -> Tape:
    """A norm taken apart, a product, and an activation that another product reads."""
    tape = Tape()
    x = tape.tensor(X)
    mean = tape.add(Work.pointwise, (x,), SUM, saves_output=True)
    scaled = tape.add(Work.pointwise, (x, mean), X, saved=(x, mean), scratch=X)
    normed = tape.add(Work.pointwise, (scaled,), X, saved=(scaled,))
    up = tape.add(Work.product, (normed,), WIDE, saved=(normed,), weight=(8, 8))
    half = tape.add(Work.pointwise, (up,), WIDE, saved=(up,))
    whole = tape.add(Work.pointwise, (half, up), WIDE, saved=(half, up))
    tape.add(Work.product, (whole,), X, saved=(whole,), weight=(8, 8))
    return tape


def test_what_only_kernels_read_is_made_again() -> None:
    tape = norm_and_product()
    eager, compiled = (replay(each, Recompute.nothing, fresh=True) for each in (tape, fused(tape)))
    assert eager.kept == X + SUM + X + X + WIDE + WIDE + WIDE
    assert compiled.kept == X + SUM + X + WIDE + WIDE
    assert compiled.backward_peak < eager.backward_peak


def test_what_only_kernels_read_is_not_moved() -> None:
    tape = norm_and_product()
    compiled = fused(tape)
    assert compiled.inside == {1, 2, 5}
    for operator in tape.operators:
        places = (*operator.reads, *operator.writes)
        inside = sum(tape.sizes[place] for place in places if place in compiled.inside)
        assert compiled.moved(places) == tape.moved(places) - inside


def test_a_dropped_sum_keeps_what_it_is_made_of() -> None:
    """Of the stream behind a sublayer, which a norm reads, backward keeps both summands."""
    tape = Tape()
    x = tape.tensor(X)
    branch = tape.add(Work.product, (x,), X, saved=(x,), weight=(8, 8))
    stream = tape.add(Work.pointwise, (x, branch), X, shares=True)
    normed = tape.add(Work.pointwise, (stream,), X, saved=(stream,))
    tape.add(Work.product, (normed,), X, saved=(normed,), weight=(8, 8))
    found = fused(tape)
    assert {place for each in found.operators for place in each.saved} == {x, branch, normed}


def test_casts_of_the_same_are_kept_once_and_those_of_weights_each() -> None:
    tape = Tape()
    x = tape.tensor(X)
    for _ in range(2):
        weight = tape.add(Work.pointwise, (), SUM)
        cast = tape.add(Work.pointwise, (x,), X // 2)
        tape.add(Work.product, (cast,), X, saved=(cast, weight), weight=(8, 8))
    assert replay(tape, fresh=True).kept == 2 * (SUM + X // 2)
    assert replay(fused(tape), fresh=True).kept == 2 * SUM + X // 2


def test_what_is_drawn_is_kept_with_its_mask() -> None:
    """As the inputs of two adapters: neither another draw nor a mask is made of what was read."""
    tape = Tape()
    x = tape.tensor(X)
    for _ in range(2):
        drawn = tape.add(Work.pointwise, (x,), X, extra=(X // 4,))
        tape.add(Work.product, (drawn,), X, saved=(drawn,), weight=(8, 8))
    assert replay(fused(tape), fresh=True).kept == 2 * (X + X // 4)


def test_a_sum_is_kept_where_it_is_less_than_what_it_is_made_of() -> None:
    """As beside every layer that has an adapter."""
    tape = Tape()
    x = tape.tensor(X)
    parts = [tape.add(Work.product, (x,), WIDE, saved=(x,), weight=(8, 8)) for _ in range(2)]
    whole = tape.add(Work.pointwise, parts, WIDE, shares=True)
    half = tape.add(Work.pointwise, (whole,), WIDE, saved=(whole,))
    tape.add(Work.product, (half,), X, saved=(half,), weight=(8, 8))
    assert replay(fused(tape), fresh=True).kept == X + WIDE + WIDE
    again = fused(tape, again=True)
    kernel = next(each for each in again.operators if half in each.writes)
    assert {*kernel.saved} == {*parts, half}


def test_a_kernel_reads_all_that_arrives_for_it_and_writes_over_it() -> None:
    tape = Tape()
    x = tape.tensor(X)
    wide = tape.add(Work.product, (x,), WIDE, saved=(x,), weight=(8, 8))
    half = tape.add(Work.pointwise, (wide,), WIDE, saved=(wide,))
    ends = [tape.add(Work.product, (half,), X, saved=(half,), weight=(8, 8)) for _ in range(4)]
    tape.add(Work.pointwise, ends, X, shares=True)
    eager, compiled = (replay(each, fresh=False).backward_peak for each in (tape, fused(tape)))
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
    eager, block, whole = (worst(run).peak for run in runs)
    assert whole == block < eager
    times = [steptime.of_step(run) for run in runs]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].seconds < times[0].seconds
