"""Adapted layers of blocks, and sublayers before the first trained weight."""

from __future__ import annotations

import pytest

from scalewise import compose
from scalewise.parallelism.mesh import MeshConfig
from scalewise.planner.communication import list_collectives
from scalewise.planner.rank_partition import RankPartition, partition_of

EXPERTS = (
    *("model=moe_nano", "data=synthetic", "model.balance_rate=0", "model.shared_experts=1"),
    *("parallelism=tensor", "adapter=lora"),
)
DENSE_FIRST = "model.dense_layers=1"


def partition(*overrides: str) -> RankPartition:
    run = compose((*EXPERTS, *overrides), check_machine=False)
    assert isinstance(run.parallelism, MeshConfig)
    return partition_of(run.parallelism, run, 0)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("adapter.targets=[attention.query]",), [(0, False, True)]),
        (
            ("adapter.targets=[feedforward.experts.down]",),
            [(0, False, False), (0, True, True)],
        ),
        (
            ("adapter.targets=[feedforward.shared.down]",),
            [(0, False, False), (0, True, True)],
        ),
        (
            ("adapter.targets=[feedforward.experts.up]", DENSE_FIRST),
            [(0, False, False), (0, False, False), (1, False, False), (1, True, True)],
        ),
        (
            ("adapter.targets=[feedforward.down]", DENSE_FIRST),
            [(0, False, False), (0, False, False)],
        ),
        (
            ("adapter.targets=[attention.value]", "model.residual=parallel"),
            [(0, False, True), (0, True, False)],
        ),
        (
            ("adapter.targets=[attention.value]", "adapter.trained=[attention_norm]"),
            [],
        ),
        (("adapter.targets=[attention.value]", "adapter.trained=[embedding]"), []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_sublayers_before_the_first_trained_weight_need_no_gradient(
    overrides: tuple[str, ...], expected: list[tuple[int, bool, bool]]
) -> None:
    """Index of the block, whether it is a mixture, and whether its output needs a gradient."""
    frozen = partition(*overrides).sublayers_without_gradient
    actual = [(it.block, it.sublayer.has_experts, it.needs_output_gradient) for it in frozen]
    assert actual == expected


def test_layers_count_in_the_blocks_that_have_them() -> None:
    first, second, *_ = partition("adapter.targets=[.*]", DENSE_FIRST).adapted_blocks
    dense, mixture = first["feedforward"], second["feedforward"]
    assert (dense.adapted_column_layers, dense.adapted_row_layers) == (2, 1)
    assert (mixture.adapted_column_layers, mixture.adapted_row_layers) == (2, 0)
    assert (dense.adapted_partial_layers, mixture.adapted_partial_layers) == (0, 4)
    assert (dense.trains_experts, mixture.trains_experts) == (False, True)


def test_gradients_of_replicated_factors_are_summed_over_tensor_ranks() -> None:
    """Factor A of gate and up, and factor B of down and of the last shared layer."""
    here = partition("adapter.targets=[feedforward.*]", "adapter.rank=4", "adapter.alpha=8")
    run, model = here.run, here.run.model
    collectives = list_collectives(run.parallelism, run)
    sizes = {it.bytes: it.count for it in collectives if it.name == "gradients of norms"}
    experts = 4 * model.routed_experts * model.width * 4
    assert sizes == {experts: 3 * model.layers, 4 * model.width * 4: model.layers}
