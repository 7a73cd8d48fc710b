"""Settings with the value auto: ``memory=auto`` and ``trainer.micro_batch=auto``.

``memory=auto`` chooses the cheapest activation checkpointing within a memory budget. Blocks are
alike, so the number of checkpointed blocks determines memory and time; every number is tried, which
is exact up to the choice of blocks.

``trainer.micro_batch=auto`` chooses the largest micro-batch that fits, among all sizes that divide
the global batch of a rank. The global batch stays the same: a smaller micro-batch means more
gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from scalewise.errors import ConfigError
from scalewise.memory_config import AutoCheckpointing, FixedCheckpointing
from scalewise.models.op_graph import Recompute
from scalewise.planner import step_time
from scalewise.planner.fit_check import FitStatus, RunVariant
from scalewise.planner.operator_time import DeviceRates
from scalewise.planner.suggested_fix import suggest_fix
from scalewise.run_config import RunConfig
from scalewise.trainer_config import AUTO, MICRO_BATCH_KEY
from scalewise.units import GIB, GIGA, TERA, format_bytes

RECOMPUTE_PAIRS = (
    (Recompute.selective, Recompute.nothing),
    (Recompute.full, Recompute.selective),
    (Recompute.full, Recompute.nothing),
)
"""Recomputation of some blocks, and of all others; a third kind would save no time."""
DIGITS = 4
DEFAULT_RATES = DeviceRates(100 * TERA, 200 * TERA, 50 * TERA, 1000 * GIGA, 0.0)
"""Rates of a typical accelerator, to compare recomputation where the profile has no rates."""
OUT_OF_MEMORY = "out_of_memory"


def resolve_auto_checkpointing(variant: RunVariant) -> RunVariant:
    """Variant with ``memory=auto`` replaced by the chosen activation checkpointing.

    Raises:
        ConfigError: Full recomputation of all blocks exceeds ``memory.budget_gib``.
    """
    if not isinstance(variant.run.memory, AutoCheckpointing):
        return variant
    budget = variant.run.memory.budget_gib
    if candidates := list(_candidates_within_budget(variant, budget)):
        return min(candidates, key=_recompute_seconds)
    smallest, note = variant.set_checkpointing(FixedCheckpointing(Recompute.full)), "full"
    if not smallest.is_valid:  # zero-bubble schedules support no recomputation
        smallest, note = variant.set_checkpointing(FixedCheckpointing()), "no"
    peak = smallest.fit.breakdown.peak
    if budget is None or peak <= budget * GIB:
        return smallest  # the fit status reports the missing memory
    reason = f"is less than the {format_bytes(peak)} that remain with {note} recomputation"
    fix = f"set memory.budget_gib={_round_up_gib(peak)}, or a smaller trainer.micro_batch"
    raise ConfigError.for_key("memory.budget_gib", budget, reason, fix)


def _recompute_seconds(variant: RunVariant) -> float:
    rates = step_time.device_rates(variant.run) or DEFAULT_RATES
    return step_time.recompute_seconds(variant.run, rates)


def _candidates_within_budget(variant: RunVariant, budget: float | None) -> Iterator[RunVariant]:
    """Yield the run without recomputation if it fits, else the least recomputation of each pair."""
    without_recompute = variant.set_checkpointing(FixedCheckpointing())
    if _is_within_budget(without_recompute, budget):
        yield without_recompute
        return
    for recompute, otherwise in RECOMPUTE_PAIRS:
        candidates = (
            _with_checkpointing(variant, recompute, otherwise, count)
            for count in range(1, variant.run.model.layers + 1)
        )
        cheapest = next((it for it in candidates if _is_within_budget(it, budget)), None)
        if cheapest is not None and cheapest.is_valid:
            yield cheapest


def _with_checkpointing(
    variant: RunVariant, recompute: Recompute, other_recompute: Recompute, count: int
) -> RunVariant:
    layers = variant.run.model.layers
    if count == layers:
        return variant.set_checkpointing(FixedCheckpointing(recompute))
    every = round(layers / count, DIGITS)
    return variant.set_checkpointing(FixedCheckpointing(recompute, every, other_recompute))


def _is_within_budget(variant: RunVariant, budget: float | None) -> bool:
    """Whether a run fits the budget and its device; a budget may exceed the device memory."""
    if budget is None:
        return variant.fit.status.is_acceptable
    return variant.fit.breakdown.peak <= budget * GIB and not variant.fit.status.is_out_of_memory


def _round_up_gib(size: int) -> str:
    """Round a size up to three digits of GiB."""
    gib = size / GIB
    digits = f"{gib:.3g}"
    return digits if float(digits) >= gib else f"{gib * 1.01:.3g}"


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of a few training steps with one micro-batch size."""

    micro_batch: int
    """Micro-batch size."""
    status: str
    """Status of the job."""


@dataclass(frozen=True)
class MicroBatchChoice:
    """Chosen micro-batch size."""

    micro_batch: int
    """Micro-batch size."""
    fit_status: FitStatus
    """Predicted fit status."""
    probes: tuple[ProbeResult, ...] = ()
    """Probe runs, in order."""
    skip_reason: str = ""
    """Reason why no probe run was started."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that select the micro-batch size."""
        return (f"{MICRO_BATCH_KEY}={self.micro_batch}",)

    @property
    def description(self) -> str:
        """Text of the prediction and of the probe runs."""
        probes = ", ".join(f"{probe.micro_batch} {probe.status}" for probe in self.probes)
        return f"predicted: {self.fit_status}; " + (
            f"probed: {probes}" if probes else self.skip_reason
        )


def micro_batch_variants(variant: RunVariant) -> tuple[RunVariant, ...]:
    """All micro-batch sizes that keep the global batch, smallest first."""
    trainer = variant.run.trainer
    largest = variant.run.micro_batch  # ``auto`` counts as the whole global batch of a rank
    variants = (
        variant.change(f"{MICRO_BATCH_KEY}={size}", trainer=replace(trainer, micro_batch=size))
        for size in range(1, largest + 1)
        if largest % size == 0
    )
    return tuple(it for it in variants if it.is_valid)


def choose_by_plan(variants: Sequence[RunVariant]) -> int:
    """Index of the largest size that is predicted to fit, or 0."""
    acceptable = (index for index, it in enumerate(variants) if it.fit.status.is_acceptable)
    return max(acceptable, default=0)


def resolve_auto_micro_batch(variant: RunVariant) -> RunVariant:
    """Variant with ``trainer.micro_batch=auto`` replaced by the size that is predicted to fit."""
    if variant.run.trainer.micro_batch != AUTO:
        return variant
    variants = micro_batch_variants(variant)
    return variants[choose_by_plan(variants)]


def choose_by_probes(
    run: RunConfig, run_probe: Callable[[RunConfig], str] | None, skip_reason: str = ""
) -> MicroBatchChoice:
    """Return the largest micro-batch size that runs, starting from the predicted one.

    Args:
        run: Run with ``trainer.micro_batch=auto``.
        run_probe: Function that trains a few steps and returns the job status; None to use the
            prediction alone.
        skip_reason: Reason why ``run_probe`` is None.

    Raises:
        ConfigError: The smallest micro-batch does not fit.
    """
    variants = micro_batch_variants(RunVariant(run))
    index = choose_by_plan(variants)
    if variants[index].fit.status.is_out_of_memory:
        raise _too_large_error(variants[0], f"{variants[0].fit.status} is predicted")
    if run_probe is None:
        chosen = variants[index]
        return MicroBatchChoice(chosen.run.micro_batch, chosen.fit.status, (), skip_reason)
    probes: list[ProbeResult] = []

    def fits(variant: RunVariant) -> bool:
        probes.append(ProbeResult(variant.run.micro_batch, run_probe(variant.run)))
        return probes[-1].status == "ok"

    if fits(variants[index]):
        larger = variants[index + 1 :]
        while larger and not larger[0].fit.status.is_out_of_memory and fits(larger[0]):
            index, larger = index + 1, larger[1:]
    while (
        probes[-1].status == OUT_OF_MEMORY
        and probes[-1].micro_batch == variants[index].run.micro_batch
    ):
        if index == 0:
            raise _too_large_error(variants[0], "a probe run ran out of memory")
        index -= 1
        fits(variants[index])
    chosen = variants[index]
    return MicroBatchChoice(chosen.run.micro_batch, chosen.fit.status, tuple(probes))


def _too_large_error(variant: RunVariant, cause: str) -> ConfigError:
    run, fit, fix = variant.run, variant.fit, suggest_fix(variant.run)
    needed, capacity = format_bytes(fit.reserved[0]), format_bytes(fit.capacity or 0)
    reason = f"micro-batch {run.micro_batch} needs {needed} of {capacity}: {cause}"
    return ConfigError.for_key(
        MICRO_BATCH_KEY, AUTO, reason, f"set {fix.override_text}" if fix else "see `scalewise plan`"
    )
