"""Likely cause of the first difference between a strategy and one device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import isfinite
from statistics import median

import torch
from torch import Tensor

from scalewise.parallelism.mesh import AXES, MeshConfig
from scalewise.run_config import RunConfig
from scalewise.training.callbacks.state_recorder import CONTRIBUTIONS, GRADIENTS, INITIAL
from scalewise.verify.comparison import (
    EPSILONS,
    FACTOR,
    LOSS,
    SAMPLES,
    VALIDATION,
    Comparison,
    Difference,
    max_abs,
)
from scalewise.verify.recorded_run import RecordedRun, Tensors

FACTOR_TOLERANCE = 0.02
"""Tolerance of a factor between two sets of gradients, in fp32."""

_LAYER = re.compile(r"\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Index of the layer of a tensor; None: outside of the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def diagnose(comparison: Comparison, run_contributions: Callable[[], RecordedRun]) -> str:
    """Likely cause of the first difference.

    Args:
        comparison: Comparison with at least one difference.
        run_contributions: Function that runs the first step on one device, micro-batch by
            micro-batch, and returns the run.
    """
    first = comparison.differences[0]
    if first.quantity == SAMPLES:
        return _diagnose_samples(comparison, first.step - 1)
    if first.quantity == "initial weights":
        return _diagnose_initial_weights(comparison, first)
    if first.quantity in (LOSS, "gradients"):
        return _diagnose_gradients(comparison, first, run_contributions)
    if first.quantity == VALIDATION:
        return "training is equal; the loss of the validation samples is summed or divided wrongly"
    norms = (run.values("train/grad_norm") for run in (comparison.reference, comparison.strategy))
    if any(_factor_differs(actual, expected) for expected, actual in zip(*norms, strict=True)):
        return "all gradients are equal, their norm is not: they are clipped to another length"
    return "all gradients are equal: the optimizer updates this weight otherwise, or not this copy"


def _diagnose_samples(comparison: Comparison, step: int) -> str:
    """Cause of other samples or labels: a repeated or empty micro-batch."""
    micro_batches = [
        (rank, number, tuple(record["samples"]), record["labels"])
        for rank, records in comparison.strategy.step_batches(step).items()
        for number, record in enumerate(records)
    ]
    empty = [
        f"micro-batch {number} of data-parallel rank {rank}"
        for rank, number, samples, _ in micro_batches
        if not samples
    ]
    if empty:
        return f"{empty[0]} has no labels: it is dropped, or its labels are masked"
    owners: dict[int, int] = {}
    for rank, _, samples, _ in micro_batches:
        for sample in samples:
            if owners.setdefault(sample, rank) != rank:
                return f"data-parallel ranks {owners[sample]} and {rank} read the same samples"
    return "the data-parallel ranks together read other samples or labels than one device"


def _diagnose_initial_weights(comparison: Comparison, first: Difference) -> str:
    """Cause of other weights before the first step: a rank, or a shard."""
    reference = comparison.reference.tensors(INITIAL)[first.name]
    ranks = comparison.strategy.rank_tensors(INITIAL)
    present = [rank for rank, tensors in enumerate(ranks) if first.name in tensors]
    differing = [rank for rank in present if not _is_close(ranks[rank][first.name], reference)]
    if len(differing) < len(present):
        return (
            f"{_ranks_text(differing)} of {len(present)} start with another {first.name}: "
            "it is not broadcast, or its shard is wrong on them"
        )
    part = f": {first.place} are of another part of the weight" if first.place else ""
    return f"the weight differs before the first step{part}; it is sharded or initialized wrongly"


def _diagnose_gradients(
    comparison: Comparison, first: Difference, run_contributions: Callable[[], RecordedRun]
) -> str:
    """Cause of other losses or gradients: one factor, missing reduction, or micro-batches."""
    run, step = comparison.strategy.run, first.step - 1
    reference = comparison.reference.tensors(GRADIENTS, step)
    ranks = comparison.strategy.rank_tensors(GRADIENTS, step)
    differing = [
        it for it in comparison.differences if it.quantity == "gradients" and it.step == first.step
    ]
    loss_factor = _loss_factor(comparison, step)
    if not differing:
        return "all gradients are equal: only the reported loss is summed or divided wrongly"
    if disagreeing := [it.name for it in differing if _disagree(it, reference, ranks)]:
        return (
            f"the ranks have different gradients of {len(disagreeing)} of {len(reference)} "
            f"parameters, first {disagreeing[0]}: their all-reduce is missing"
        )
    merged = merge_ranks(ranks)
    factor = common_factor(reference, merged, tolerance=_tolerance(comparison))
    if factor is not None:
        return _explain_factor(comparison, step, factor, loss_factor)
    if step == 0 and (text := _explain_contributions(run_contributions(), merged, run)):
        return text
    if len(differing) < len(reference):
        names = {it.name for it in differing}
        layers = sorted({layer for name in names if (layer := layer_of(name)) is not None})
        place = f", {differing[0].place}" if differing[0].place else ""
        where = f" in layers {', '.join(map(str, layers))}" if layers else ""
        return (
            f"{len(names)} of {len(reference)} parameters have another gradient{where}{place}: "
            "they are sharded, gathered or reduced wrongly"
        )
    return "all gradients differ, not by one factor: forward or backward computes something else"


def _explain_factor(
    comparison: Comparison, step: int, factor: float, loss_factor: float | None
) -> str:
    """Cause of gradients that all are ``factor`` times those of one device."""
    run = comparison.strategy.run
    size_text = _size_text(run, factor)
    if loss_factor is not None and abs(loss_factor - factor) <= FACTOR_TOLERANCE * factor:
        labels = sum(
            record["labels"] or 0
            for records in comparison.reference.step_batches(step).values()
            for record in records
        )
        text = f"the loss and all gradients are {factor:.4g} times those of one device"
        divisor = labels / factor
        if labels and abs(divisor - round(divisor)) < FACTOR_TOLERANCE and round(divisor) != labels:
            return (
                f"{text}: the loss is divided by {round(divisor):,} labels, and the samples have "
                f"{labels:,}; {_counted_text(round(divisor) - labels)}"
            )
        return f"{text}{size_text or ': the loss has a wrong factor or divisor'}"
    size_text = size_text or ": a wrong scale of the loss in backward, or of reduced gradients"
    text = f"the loss is equal, and all gradients are {factor:.4g} times those of one device"
    return text + size_text


def _counted_text(excess: int) -> str:
    count = abs(excess)
    plural = "label is" if count == 1 else f"{count:,} labels are"
    start = "a " if count == 1 else ""
    return f"{start}{plural} {'counted twice' if excess > 0 else 'not counted'}"


def _size_text(run: RunConfig, factor: float) -> str:
    """Explanation of a factor that is a size of the run, or its inverse."""
    for size, name in _sizes(run):
        if abs(factor - size) < FACTOR_TOLERANCE * size:
            return f", the number of {name}: they are not divided by it"
        if abs(factor * size - 1) < FACTOR_TOLERANCE:
            return f", and there are {size} {name}: they are divided by it once too often"
    return ""


def _sizes(run: RunConfig) -> Iterator[tuple[int, str]]:
    parallelism = run.parallelism
    yield parallelism.data_parallel_size, "data-parallel ranks"
    if isinstance(parallelism, MeshConfig):
        for axis in AXES:
            yield parallelism.sizes[axis], f"ranks along parallelism.{axis}"
        yield parallelism.gradient_averaging_size, "ranks whose gradients are averaged"
        if parallelism.sizes["pipeline"] > 1:
            yield parallelism.num_pipeline_micro_batches, "pipeline micro-batches"
    if not run.objective.is_user_defined:
        yield run.accumulation, "accumulated micro-batches"
    yield parallelism.world_size, "ranks (the world size)"


def common_factor(reference: Tensors, actual: Tensors, tolerance: float) -> float | None:
    """Factor by which all tensors differ from those of the reference; None: there is none."""
    products, squares = 0.0, 0.0
    for name, expected in reference.items():
        if name in actual:
            products += float((expected.double() * actual[name].double()).sum())
            squares += float(expected.double().square().sum())
    if not squares or not isfinite(products):
        return None
    factor = products / squares
    residual = sum(
        float((actual[name].double() - factor * expected.double()).square().sum())
        for name, expected in reference.items()
        if name in actual
    )
    is_uniform = (residual / squares) ** 0.5 <= tolerance * max(abs(factor), 1e-6)
    return factor if is_uniform and abs(factor - 1) > tolerance else None


def _explain_contributions(contributions: RecordedRun, actual: Tensors, run: RunConfig) -> str:
    """Cause of a gradient that is a sum of other multiples of the micro-batches' gradients.

    Empty if it is no such sum.
    """
    parts = [
        contributions.tensors(CONTRIBUTIONS, number)
        for number in range(len(contributions.batches[0]))
    ]
    weights = fit_contributions(parts, actual)
    if weights is None:
        return ""
    ranks = run.parallelism.data_parallel_size
    typical = median(weight for weight in weights if abs(weight) > FACTOR_TOLERANCE)
    odd = {
        divmod(number, ranks): weight / typical
        for number, weight in enumerate(weights)
        if abs(weight / typical - 1) > FACTOR_TOLERANCE
    }
    if not odd:
        return ""
    dropped = [place for place, weight in odd.items() if abs(weight) < FACTOR_TOLERANCE]
    if len(dropped) == len(odd):
        return f"the gradient lacks {_places_text(dropped, run)}: it is dropped"
    listed = ", ".join(
        f"{weight:.3g} times {_places_text([it], run)}" for it, weight in odd.items()
    )
    return f"the gradient contains {listed} instead of once"


def _places_text(places: list[tuple[int, int]], run: RunConfig) -> str:
    """Micro-batches as pairs of number and data-parallel rank, in words."""
    ranks = range(run.parallelism.data_parallel_size)
    numbers = sorted({number for number, _ in places})
    text = " and ".join(str(number) for number in numbers)
    owners = sorted({rank for _, rank in places})
    if len(places) == len(numbers) * len(ranks):
        return f"micro-batch {text} of every data-parallel rank"
    return f"micro-batch {text} of data-parallel {_ranks_text(owners)}"


def fit_contributions(parts: list[Tensors], actual: Tensors) -> list[float] | None:
    """Multiples of the parts whose sum is ``actual``, by least squares; None: no sum matches."""
    names = [name for name in actual if all(name in part for part in parts)]
    if len(parts) < 2 or not names:
        return None
    matrix = torch.stack([_flatten(part, names) for part in parts], dim=1)
    target = _flatten(actual, names)
    weights = torch.linalg.lstsq(matrix.T @ matrix, matrix.T @ target).solution
    residual = float((target - matrix @ weights).norm() / target.norm().clamp(min=1e-300))
    return weights.tolist() if residual <= FACTOR_TOLERANCE else None


def _flatten(tensors: Tensors, names: list[str]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in names])


def merge_ranks(ranks: list[Tensors]) -> Mapping[str, Tensor]:
    """Tensors of all ranks by name; a pipeline rank has those of its stages."""
    return {name: tensor for tensors in ranks for name, tensor in tensors.items()}


def _disagree(difference: Difference, reference: Tensors, ranks: list[Tensors]) -> bool:
    """Whether the copies of a tensor differ between ranks as much as from one device."""
    copies = [tensors[difference.name] for tensors in ranks if difference.name in tensors]
    scale = max_abs(reference[difference.name]) if difference.name in reference else 1.0
    spread = max((max_abs(a.double() - b.double()) for a, b in pairwise(copies)), default=0.0)
    return spread > difference.tolerance * (scale or 1.0)


def _loss_factor(comparison: Comparison, step: int) -> float | None:
    """Loss of a step relative to that of one device; None: equal, or one of them is missing."""
    differing = any(it.quantity == LOSS and it.step == step + 1 for it in comparison.differences)
    losses = [run.values("train/loss") for run in (comparison.strategy, comparison.reference)]
    actual, expected = (values[step] if step < len(values) else 0.0 for values in losses)
    return actual / expected if differing and expected else None


def _factor_differs(actual: float, expected: float) -> bool:
    return abs(actual - expected) > FACTOR_TOLERANCE * abs(expected)


def _tolerance(comparison: Comparison) -> float:
    """Tolerance of a common factor, which rounding exceeds in no precision."""
    return max(1e-4, FACTOR * EPSILONS[comparison.reference.run.precision.compute])


def _is_close(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and bool(
        torch.allclose(tensor.double(), other.double(), rtol=0.0, atol=1e-6 * max_abs(other))
    )


def _ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
