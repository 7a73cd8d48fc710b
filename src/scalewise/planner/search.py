"""A walk over the runs that do the same job otherwise, judged by ledger and step time.

Every layout is tried on every power-of-two part of the devices, with the micro batches, the
recomputation and, where asked, the formats that it admits. What a user typed is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import FixedCheckpointing, Recompute
from scalewise.adapters import LoRAAdapterConfig
from scalewise.errors import ConfigError
from scalewise.optimizers import SGDConfig
from scalewise.planner import layout_enumeration
from scalewise.planner.config import PlanSearch, RankBy
from scalewise.planner.fit_check import FitStatus, check_fit
from scalewise.planner.override_edit import override_keys
from scalewise.planner.plan import Plan
from scalewise.planner.step_time import device_rates, predict_step_time
from scalewise.planner.suggested_fix import CHUNK
from scalewise.precision import FloatFormat, Precision
from scalewise.quantization import NoQuantizationConfig
from scalewise.quantization.bitsandbytes_config import NF4Config

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

Told = tuple[str, ...]
Way = tuple[Told, "RunConfig"]
"""A run, and what says so on the command line."""


@dataclass(frozen=True)
class SearchCandidate(Plan):
    """A plan that a search came to."""

    training_overrides: Told = ()
    """What of ``overrides`` changes what is trained, or how exactly."""

    @property
    def is_acceptable(self) -> bool:
        """Returns whether it surely fits."""
        return self.fit.status.is_acceptable

    def cost(self, rank: RankBy) -> tuple[float, float]:
        """Returns what a search wants least of, and then what breaks a tie."""
        seconds, peak = self.step_seconds, float(self.fit.breakdown.peak)
        if rank is RankBy.memory:
            return peak, seconds
        return seconds * (self.run.world_size if rank is RankBy.price else 1), peak

    @cached_property
    def step_seconds(self) -> float:
        """Returns the time of a step; 0 where the profile lacks a rate."""
        return 0.0 if self.step_time is None else self.step_time.seconds


@dataclass(frozen=True)
class SearchResult:
    """All that a search came to."""

    base_run: RunConfig
    candidates: tuple[SearchCandidate, ...]

    @cached_property
    def rank_by(self) -> RankBy:
        """Returns what is wanted least of; memory where the profile tells of no time."""
        return (
            self.base_run.plan.rank_by if device_rates(self.base_run) is not None else RankBy.memory
        )

    @cached_property
    def best(self) -> SearchCandidate | None:
        """Returns what a user should run: what fits before what may, and what trains as asked."""
        rank = self.rank_by
        return min(
            (
                candidate
                for candidate in self.candidates
                if not candidate.fit.status.is_out_of_memory
            ),
            key=lambda it: (not it.is_acceptable, len(it.training_overrides), it.cost(rank)),
            default=None,
        )

    @cached_property
    def pareto_front(self) -> tuple[SearchCandidate, ...]:
        """Returns what fits, trained as asked, and none such beats in time, memory and price."""
        return _pareto_front(one for one in self.candidates if not one.training_overrides)

    @cached_property
    def changed_training_front(self) -> tuple[SearchCandidate, ...]:
        """Returns what fits, trained otherwise, and none at all beats."""
        return tuple(one for one in _pareto_front(self.candidates) if one.training_overrides)


def _pareto_front(candidates: Iterable[SearchCandidate]) -> tuple[SearchCandidate, ...]:
    """Returns those that fit and that none beats in time, memory and price, fastest first."""
    kept: list[SearchCandidate] = []
    for candidate in sorted((one for one in candidates if one.is_acceptable), key=_candidate_costs):
        if not any(_dominates(other, candidate) for other in kept):
            kept.append(candidate)
    return tuple(kept)


def _candidate_costs(candidate: SearchCandidate) -> tuple[float, float, float]:
    (seconds, peak), (price, _) = candidate.cost(RankBy.time), candidate.cost(RankBy.price)
    return seconds, peak, price


def _dominates(one: SearchCandidate, other: SearchCandidate) -> bool:
    return all(a <= b for a, b in zip(_candidate_costs(one), _candidate_costs(other), strict=True))


def search_runs(
    run: RunConfig, report_progress: Callable[[int], None] = lambda count: None
) -> SearchResult:
    """Returns what ``run.plan.search`` finds; ``report_progress`` hears of each run how many there
    were.

    Raises ``ConfigError`` for sizes that were typed and that no layout of the devices has.
    """
    if wrong := [*layout_enumeration.layout_issues(run, override_keys(run.overrides))]:
        raise ConfigError(wrong)
    candidates = []
    for candidate in iter_candidates(run):
        candidates.append(candidate)
        report_progress(len(candidates))
    return SearchResult(run, tuple(candidates))


def iter_candidates(run: RunConfig) -> Iterator[SearchCandidate]:
    """Yields candidates, but for those that the ledger has ruled out.

    Where a micro batch is out of memory no larger one is tried; where all rows fit at once nothing
    is computed twice to save memory, unless that is what is wanted least of.
    """
    typed = override_keys(run.overrides)  # what was typed is held
    for training, trained in _training_options(run, typed):
        for laid_out, laid in _layout_options(trained, typed):
            if any((*laid.quantization.validate_with(laid), *laid.model.validate_with(laid))):
                continue
            for saving, saved in _memory_options(laid, typed):
                tried = list(_iter_micro_batches(saved, typed))
                for passes, plan in tried:
                    told = (*training, *laid_out, *saving, *passes)
                    yield SearchCandidate(
                        plan.run, plan.fit, plan.step_time, told, training_overrides=training
                    )
                roomy = bool(tried) and tried[-1][1].fit.status.is_acceptable
                if roomy and run.plan.rank_by is not RankBy.memory:
                    break


def _iter_micro_batches(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[tuple[Told, Plan]]:
    """Yields plans by micro batch until one is out of memory."""
    for number, (told, tried) in enumerate(_micro_batch_options(run, fixed_keys)):
        # All but the layout's rules are the same for every micro batch.
        rules = tried.parallelism.validate_with(tried)
        if any(rules if number else tried.validate()):
            continue
        fit = check_fit(tried)
        out = fit.status is FitStatus.out_of_memory
        yield told, Plan(tried, fit, None if out else predict_step_time(tried))
        if out:
            return


def _training_options(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[Way]:
    if run.plan.search not in (PlanSearch.memory, PlanSearch.all):
        yield (), run
        return
    trainings: list[Way] = [((), run)]
    if "precision" not in fixed_keys and run.hardware.bf16_tflops != 0:
        formats = {"bf16_mixed": Precision(compute=FloatFormat.bf16)}
        formats["bf16_true"] = Precision(FloatFormat.bf16, FloatFormat.bf16)
        trainings += [
            ((f"precision={name}",), replace(run, precision=precision))
            for name, precision in formats.items()
            if _peak_bytes(precision) < _peak_bytes(run.precision)
        ]
    for told, trained in trainings:
        yield told, trained
        adapted: list[Way] = [(told, trained)] if run.has_frozen_weights else []
        if "adapter" not in fixed_keys and not run.has_frozen_weights:
            adapted = [((*told, "adapter=lora"), replace(trained, adapter=LoRAAdapterConfig()))]
            yield from adapted
        if "quantization" not in fixed_keys and isinstance(run.quantization, NoQuantizationConfig):
            for words, frozen in adapted:
                packed = replace(frozen, quantization=NF4Config())
                yield (*words, "quantization=nf4"), packed
        if "optimizer" not in fixed_keys and not isinstance(run.optimizer, SGDConfig):
            yield (*told, "optimizer=sgd"), replace(trained, optimizer=SGDConfig())


def _peak_bytes(precision: Precision) -> int:
    return precision.parameters.bytes + precision.compute.bytes


def _layout_options(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[Way]:
    if run.plan.search is PlanSearch.memory:
        yield (), run
        return
    rows = run.global_batch
    if run.trainer.global_batch is None:  # a row for every device, at the least
        rows = max(rows, layout_enumeration.available_devices(run))
    for told, layout in layout_enumeration.enumerate_layouts(run, fixed_keys):
        if rows % layout.data_parallel_size:
            continue
        trainer = replace(run.trainer, global_batch=rows)
        yield told, replace(run, parallelism=layout, trainer=trainer)


def _memory_options(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[Way]:
    chunks: list[int | None] = [run.objective.loss_chunk]
    if run.plan.search is not PlanSearch.layout and chunks == [None]:
        chunks = chunks if "objective.loss_chunk" in fixed_keys else [None, CHUNK]
    held = any(key.split(".")[0] == "memory" for key in fixed_keys)
    for recompute in [None] if held else Recompute:
        for chunk in chunks:
            told: Told = ()
            changed = run
            if recompute is not None and (memory := FixedCheckpointing(recompute)) != run.memory:
                changed = replace(changed, memory=memory)
                name = "none" if recompute is Recompute.nothing else f"checkpoint_{recompute}"
                told += (f"memory={name}",)
            if chunk != run.objective.loss_chunk:
                changed = replace(changed, objective=replace(run.objective, loss_chunk=chunk))
                told += (f"objective.loss_chunk={chunk}",)
            yield told, changed


def _micro_batch_options(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[Way]:
    """Yields ways to take a rank's rows, those with fewest rows at once first."""
    rows = run.global_batch // run.parallelism.data_parallel_size
    trainer = replace(run.trainer, global_batch=run.global_batch)
    layout, batch = run.parallelism, (f"trainer.global_batch={run.global_batch}",)
    if layout_enumeration.is_pipeline(layout):
        size = run.micro_batch if "trainer.micro_batch" in fixed_keys else rows
        whole = replace(run, trainer=replace(trainer, micro_batch=size))
        for pieces in reversed(_powers_of_two_below(size)):
            if pieces >= layout.num_stages and size % pieces == 0:
                told: Told = (f"trainer.micro_batch={size}", *batch)
                told += (f"parallelism.pipeline_micro_batches={pieces}",)
                laid = replace(layout, pipeline_micro_batches=pieces)
                yield told, replace(whole, parallelism=laid)
        return
    for size in (
        [run.micro_batch] if "trainer.micro_batch" in fixed_keys else _powers_of_two_below(rows)
    ):
        if rows % size == 0:
            told = (f"trainer.micro_batch={size}", *batch)
            yield told, replace(run, trainer=replace(trainer, micro_batch=size))


def _powers_of_two_below(count: int) -> list[int]:
    """Returns the powers of two below ``count``, and ``count``."""
    return [*(1 << power for power in range(count.bit_length()) if 1 << power < count), count]
