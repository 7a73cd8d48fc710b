"""Comparison of a strategy with one device, with tolerances from a perturbed run on one device.

The weights of the perturbed run differ by at most one unit of rounding. A strategy adds in another
order, which also changes each result by rounding: a quantity may move as far as it moves in the
perturbed run, times ``FACTOR``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from scalewise.precision import FloatFormat
from scalewise.training.callbacks.state_recorder import FINAL, GRADIENTS, INITIAL
from scalewise.verify.recorded_run import RecordedRun, Tensors

FACTOR = 16.0
"""Ratio of the tolerance to the change by a perturbation of one unit of rounding."""
EPSILONS = {FloatFormat.fp32: 2.0**-23, FloatFormat.bf16: 2.0**-8, FloatFormat.fp16: 2.0**-10}
"""Distance of 1 and the next larger number, by data type of the computation."""
SAMPLES, LOSS, VALIDATION = "samples", "loss", "validation loss"
QUANTITIES = (SAMPLES, "initial weights", LOSS, "gradients", VALIDATION, "weights")
"""Compared quantities."""
KINDS = {"initial weights": INITIAL, "gradients": GRADIENTS, "weights": FINAL}


@dataclass(frozen=True)
class Difference:
    """A number or tensor that differs by more than its tolerance."""

    quantity: str
    """One of ``QUANTITIES``."""
    step: int
    """Optimizer step, from 1; 0: before the first one."""
    name: str
    """Name of the tensor; empty for a number, a text for samples."""
    rank: int | None
    """Rank with the largest difference; None for a number."""
    difference: float
    """Largest difference, relative to the largest element on one device."""
    tolerance: float
    """Tolerance, relative to the same."""
    place: str = ""
    """Elements that differ, if not all do."""


@dataclass(frozen=True)
class QuantityResult:
    """Result of the comparison of one quantity."""

    quantity: str
    """One of ``QUANTITIES``."""
    compared: int
    """Number of compared numbers or tensors."""
    difference: float
    """Largest difference, relative to the largest element on one device."""
    tolerance: float
    """Tolerance of the number or tensor that is closest to it, or exceeds it most."""
    differences: tuple[Difference, ...]
    """Those that differ by more than their tolerance, in the order of steps and the model."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of a strategy with one device in one precision."""

    precision: str
    """Precision of all runs."""
    reference: RecordedRun
    """Run on one device."""
    perturbed: RecordedRun
    """Run on one device with perturbed weights."""
    strategy: RecordedRun
    """Run of the strategy."""
    results: tuple[QuantityResult, ...]
    """Result of each quantity."""

    @property
    def differences(self) -> list[Difference]:
        """All differences, in the order in which training computes the quantities."""
        order = {name: index for index, name in enumerate(QUANTITIES)}
        found = [it for result in self.results for it in result.differences]
        last = dict.fromkeys((VALIDATION, "weights"), self.reference.run.verify.steps + 1)
        last |= {SAMPLES: -1}  # other samples explain every other difference
        return sorted(found, key=lambda it: (last.get(it.quantity, it.step), order[it.quantity]))


def compare_runs(
    precision: str, reference: RecordedRun, perturbed: RecordedRun, strategy: RecordedRun
) -> Comparison:
    """Compare all quantities of a strategy with those of one device."""
    steps = range(reference.run.verify.steps)
    precision_config = reference.run.precision
    epsilon = EPSILONS[precision_config.parameters]
    tensors = {
        name: [
            result
            for step in (steps if kind == GRADIENTS else [0])
            for result in compare_tensors(
                reference.tensors(kind, step),
                reference.tensors(kind, step) if kind == INITIAL else perturbed.tensors(kind, step),
                strategy.rank_tensors(kind, step),
                epsilon,
                Difference(
                    name, {GRADIENTS: step + 1, INITIAL: 0}.get(kind, len(steps)), "", 0, 0, 0
                ),
            )
        ]
        for name, kind in KINDS.items()
    }
    numbers = {
        name: list(_compare_numbers(name, key, reference, perturbed, strategy))
        for name, key in ((LOSS, "train/loss"), (VALIDATION, "val/loss"))
    }
    results = [_compare_samples(reference, strategy)]
    compared = numbers | tensors
    results += [_summarize(name, compared[name]) for name in QUANTITIES if compared.get(name)]
    return Comparison(precision, reference, perturbed, strategy, tuple(results))


def _summarize(quantity: str, compared: Sequence[Difference]) -> QuantityResult:
    worst = max(compared, key=_excess)
    found = tuple(it for it in compared if it.difference > it.tolerance)
    return QuantityResult(quantity, len(compared), worst.difference, worst.tolerance, found)


def _excess(difference: Difference) -> float:
    if not difference.tolerance:
        return float("inf") if difference.difference else 0.0
    return difference.difference / difference.tolerance


def _compare_samples(reference: RecordedRun, strategy: RecordedRun) -> QuantityResult:
    """Compare the samples and the number of labels of each step, over all data-parallel ranks."""
    differences: list[Difference] = []
    compared = 0
    for step in range(reference.run.verify.steps):
        expected, actual = (
            [it for records in run.step_batches(step).values() for it in records]
            for run in (reference, strategy)
        )
        samples, other = (
            Counter(sample for record in records for sample in record["samples"])
            for records in (expected, actual)
        )
        compared += samples.total()
        missing, extra = (samples - other).total(), (other - samples).total()
        labels, other_labels = (
            sum(record["labels"] or 0 for record in records) for records in (expected, actual)
        )
        text = f"{missing} of {samples.total()} not read, {extra} others read"
        if not missing and not extra and labels != other_labels:
            text = f"{other_labels} labels instead of {labels}"
        if missing or extra or labels != other_labels:
            share = max(missing, extra, 1) / max(1, samples.total())
            differences.append(Difference(SAMPLES, step + 1, text, None, share, 0.0))
    worst = max((it.difference for it in differences), default=0.0)
    return QuantityResult(SAMPLES, compared, worst, 0.0, tuple(differences))


def _compare_numbers(
    name: str,
    key: str,
    reference: RecordedRun,
    perturbed: RecordedRun,
    strategy: RecordedRun,
) -> Iterator[Difference]:
    """Compare a metric of each step; the perturbed run may move it by chance only a little."""
    epsilon = EPSILONS[reference.run.precision.compute]
    expected, actual = reference.values(key), strategy.values(key)
    moved = zip(expected, perturbed.values(key), strict=True)
    movement = max([abs(a - b) / max(abs(a), epsilon) for a, b in moved], default=0.0)
    tolerance = max(FACTOR * movement, FACTOR * EPSILONS[FloatFormat.fp32], epsilon)
    first = reference.run.verify.steps - len(expected) + 1
    for step, (value, other) in enumerate(zip(expected, actual, strict=True), start=first):
        difference = abs(other - value) / max(abs(value), epsilon)
        # A loss that is not a number differs.
        difference = difference if difference == difference else float("inf")
        yield Difference(name, step, "", None, difference, tolerance)


def compare_tensors(
    reference: Tensors,
    perturbed: Tensors,
    ranks: Sequence[Tensors],
    epsilon: float,
    label: Difference,
) -> Iterator[Difference]:
    """Compare tensors of one kind and step with those of one device, on every rank.

    A tensor that is absent on one side, such as the gradient of an unused parameter, is zero.

    Args:
        reference: Tensors of one device.
        perturbed: Tensors of one device with perturbed weights.
        ranks: Tensors of each rank.
        epsilon: Unit of rounding of the parameters.
        label: Quantity and step of the differences.
    """
    names = list(dict.fromkeys([*reference, *(name for rank in ranks for name in rank)]))
    movements, scales = {}, {}
    for name in names:
        expected = reference.get(name)
        scales[name] = 0.0 if expected is None else max_abs(expected)
        other = perturbed.get(name)
        movements[name] = (
            0.0 if expected is None or other is None else max_abs(_subtract(expected, other))
        )
    typical = median([movements[it] / scales[it] for it in names if scales[it]] or [0.0])
    for name in names:
        scale = scales[name]
        tolerance = FACTOR * max(movements[name], max(typical, epsilon) * scale)
        worst, worst_rank, place = 0.0, 0, ""
        present = [(number, rank[name]) for number, rank in enumerate(ranks) if name in rank]
        if not present and scale:
            worst = scale
        for number, tensor in present:
            expected = reference.get(name)
            delta = tensor.double() if expected is None else _subtract(tensor, expected)
            distance = max_abs(delta)
            if distance > worst:
                worst, worst_rank = distance, number
                place = differing_range(delta.abs() > tolerance)
        unit = scale or 1.0
        yield Difference(
            label.quantity, label.step, name, worst_rank, worst / unit, tolerance / unit, place
        )


def max_abs(tensor: Tensor) -> float:
    """Largest absolute value; infinite for a tensor with an element that is not a number."""
    if not tensor.numel():
        return 0.0
    value = float(tensor.double().abs().max())
    return value if value == value else float("inf")


def _subtract(tensor: Tensor, other: Tensor) -> Tensor:
    if tensor.shape != other.shape:
        return torch.full((1,), float("inf"), dtype=torch.float64)
    return tensor.double() - other.double()


def differing_range(mask: Tensor) -> str:
    """Range of differing elements along the dimension where it is shortest; empty: all or none."""
    ranges = []
    for dim, size in enumerate(mask.shape):
        others = [other for other in range(mask.dim()) if other != dim]
        indices = (mask.any(dim=others) if others else mask).nonzero().flatten().tolist()
        if indices:
            first, last = indices[0], indices[-1]
            ranges.append(((last - first + 1) / size, dim, first, last, size))
    if not ranges or min(ranges)[0] == 1:
        return ""
    _, dim, first, last, size = min(ranges)
    return f"elements {first} to {last} of {size} along dimension {dim}"
