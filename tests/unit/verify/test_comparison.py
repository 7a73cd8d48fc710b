"""Comparison of tensors with perturbed ones, and the causes of their differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scalewise.verify.comparison import FACTOR, Difference, compare_tensors, differing_range
from scalewise.verify.diagnosis import common_factor, fit_contributions, layer_of

EPSILON = 2.0**-23


def random_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("embedding.weight", "blocks.0.up.weight", "blocks.1.up.weight")
    return {name: torch.randn(8, 4, generator=generator) for name in names}


def differing(
    reference: dict[str, Tensor], perturbed: dict[str, Tensor], *ranks: dict[str, Tensor]
) -> list[Difference]:
    label = Difference("gradients", 1, "", 0, 0, 0)
    compared = compare_tensors(reference, perturbed, ranks, EPSILON, label)
    return [it for it in compared if it.difference > it.tolerance]


def test_tolerance_follows_the_perturbed_run() -> None:
    reference = random_tensors(0)
    perturbed = {name: tensor * (1 + 1e-6) for name, tensor in reference.items()}
    within = {name: tensor * (1 + 0.9e-6 * FACTOR) for name, tensor in reference.items()}
    beyond = {name: tensor * (1 + 1.1e-6 * FACTOR) for name, tensor in reference.items()}
    assert differing(reference, perturbed, within) == []
    assert len(differing(reference, perturbed, beyond)) == 3
    assert differing(reference, perturbed, within, beyond)[0].rank == 1


def test_tensor_that_is_zero_apart_from_rounding_is_equal() -> None:
    """As the gradient of the bias of a key."""
    noise = {"bias": torch.tensor([1e-9, -2e-9])}
    reference, perturbed, actual = (
        {**random_tensors(0), "bias": noise["bias"] * factor} for factor in (1.0, -1.0, 3.0)
    )
    assert differing(reference, perturbed, actual) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_element_that_is_not_finite_differs(value: float) -> None:
    reference, actual = random_tensors(0), random_tensors(0)
    actual["blocks.1.up.weight"][3, 1] = value
    (difference,) = differing(reference, reference, actual)
    assert difference.name == "blocks.1.up.weight"


def test_absent_gradient_is_zero() -> None:
    reference, actual = random_tensors(0), random_tensors(0)
    actual["unused"] = torch.zeros(3)
    assert differing(reference, reference, actual) == []
    del actual["embedding.weight"]
    assert [it.name for it in differing(reference, reference, actual)] == ["embedding.weight"]


def test_differing_range_names_the_shard() -> None:
    mask = torch.zeros(8, 4, dtype=torch.bool)
    assert differing_range(mask) == differing_range(~mask) == ""
    mask[4:] = True
    assert differing_range(mask) == "elements 4 to 7 of 8 along dimension 0"
    mask[:] = False
    mask[:, 2] = True
    assert differing_range(mask) == "elements 2 to 2 of 4 along dimension 1"


def test_common_factor_of_all_gradients_is_found() -> None:
    reference = random_tensors(0)
    scaled = {name: 0.25 * tensor for name, tensor in reference.items()}
    assert common_factor(reference, scaled, 1e-4) == pytest.approx(0.25)
    scaled["embedding.weight"] = reference["embedding.weight"]
    assert common_factor(reference, scaled, 1e-4) is None
    assert common_factor(reference, reference, 1e-4) is None


def test_fit_finds_how_often_each_micro_batch_counts() -> None:
    parts = [random_tensors(seed) for seed in range(4)]
    counts = [1.0, 0.0, 2.0, 1.0]
    total = {
        name: sum(count * part[name] for count, part in zip(counts, parts, strict=True))
        for name in parts[0]
    }
    assert fit_contributions(parts, total) == pytest.approx(counts, abs=1e-6)
    total["embedding.weight"] = torch.randn(8, 4)
    assert fit_contributions(parts, total) is None


def test_layer_is_read_from_the_name() -> None:
    assert layer_of("model.blocks.12.attention.query.weight") == 12
    assert layer_of("model.embedding.weight") is None
