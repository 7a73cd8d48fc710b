"""Search over runs with the same training result, or over cheaper ones if requested.

The search tries every layout on all devices and on fewer, with each micro-batch size, activation
checkpointing and, with ``plan.search=memory`` or ``all``, precision, adapter and optimizer. Values
typed on the command line stay fixed. These two start from ``precision=bf16_mixed`` on a GPU with
bf16, unless a precision is typed. ``all`` then changes more options of the best runs, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil

from scalewise.adapters import LoRAAdapterConfig
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.op_graph import Recompute
from scalewise.objectives import ObjectiveConfig
from scalewise.optimizers import SGDConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.plan_config import PlanSearch, RankBy
from scalewise.planner import layout_enumeration, search_refinement
from scalewise.planner.fit_check import FitStatus, RunVariant
from scalewise.planner.plan import Plan
from scalewise.planner.step_time import device_rates, predict_step_time
from scalewise.planner.suggested_fix import LOSS_CHUNK_TOKENS
from scalewise.precision import FloatFormat, Precision
from scalewise.quantization import NoQuantizationConfig
from scalewise.quantization.config import NF4Config
from scalewise.run_config import RunConfig
from scalewise.trainer_config import TrainerConfig
from scalewise.typed_override import override_keys, replace_overrides
from scalewise.validation.model_rules import model_issues
from scalewise.validation.parallelism_rules import parallelism_issues
from scalewise.validation.precision_rules import quantization_issues

Overrides = tuple[str, ...]
NUM_REFINED = 12
"""Number of runs that the second stage of ``plan.search=all`` changes."""
SHOWN_GROUPS = {"memory", "objective"}
"""Groups whose value each row of a search shows."""
TIME_TOLERANCE = 0.05
"""Relative difference of step times that is too small to prefer a layout with more mesh axes: half
the median error of predicted times (``scalewise bench planner``)."""


@dataclass(frozen=True)
class SearchCandidate(Plan):
    """Plan of one run of a search."""

    training_overrides: Overrides = ()
    """Overrides that change the training result or its precision."""
    refinement: Overrides = ()
    """Other overrides that the second stage of a search has added."""

    @property
    def is_acceptable(self) -> bool:
        """Whether the run fits."""
        return self.fit.status.is_acceptable

    @property
    def needs_deepspeed(self) -> bool:
        """Whether the run trains with DeepSpeed, a package that others do not need."""
        return isinstance(self.run.parallelism, DeepSpeedConfig)

    def cost(self, rank: RankBy) -> tuple[float, float]:
        """Return the ranked quantity, and the one that breaks a tie."""
        seconds, peak = self.step_seconds, float(self.fit.breakdown.peak)
        if rank is RankBy.memory:
            return peak, seconds
        return seconds * (self.run.world_size if rank is RankBy.price else 1), peak

    @cached_property
    def step_seconds(self) -> float:
        """Step time, in seconds; 0 if the hardware profile lacks a rate."""
        return 0.0 if self.step_time is None else self.step_time.seconds


@dataclass(frozen=True)
class SearchResult:
    """Candidates of a search."""

    base_run: RunConfig
    """Requested run."""
    candidates: tuple[SearchCandidate, ...]
    """Plans of all valid runs."""

    @cached_property
    def rank_by(self) -> RankBy:
        """Ranked quantity; memory if the hardware profile lacks a rate."""
        return (
            self.base_run.plan.rank_by if device_rates(self.base_run) is not None else RankBy.memory
        )

    @cached_property
    def best(self) -> SearchCandidate | None:
        """The best candidate: by fit, then by changes of training, then by the ranked quantity.

        Of those within ``TIME_TOLERANCE`` of the least time or price, it has the fewest mesh axes,
        and needs no DeepSpeed if another one has as few.
        """
        first, rank = self.lowest_cost, self.rank_by
        if first is None or rank is RankBy.memory:
            return first
        (limit, _), changes = first.cost(rank), len(first.training_overrides)
        return min(
            (
                candidate
                for candidate in self.candidates
                if candidate.is_acceptable == first.is_acceptable
                and not candidate.fit.status.is_out_of_memory
                and len(candidate.training_overrides) == changes
                and candidate.cost(rank)[0] <= limit * (1 + TIME_TOLERANCE)
            ),
            key=lambda it: (_num_axes(it), it.needs_deepspeed, it.cost(rank)),
        )

    @cached_property
    def lowest_cost(self) -> SearchCandidate | None:
        """The best candidate whatever its number of mesh axes; None: none can fit."""
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
        """Pareto front of time, memory and price among runs with unchanged training."""
        return _pareto_front(one for one in self.candidates if not one.training_overrides)

    @cached_property
    def changed_training_front(self) -> tuple[SearchCandidate, ...]:
        """Runs with changed training on the Pareto front of all candidates."""
        return tuple(one for one in _pareto_front(self.candidates) if one.training_overrides)


def _num_axes(candidate: SearchCandidate) -> int:
    return sum(size > 1 for size in layout_enumeration.axis_sizes(candidate.run.parallelism))


def _pareto_front(candidates: Iterable[SearchCandidate]) -> tuple[SearchCandidate, ...]:
    """Return the candidates that fit and that no other dominates, fastest first."""
    front: list[SearchCandidate] = []
    for candidate in sorted((one for one in candidates if one.is_acceptable), key=_candidate_costs):
        if not any(_dominates(other, candidate) for other in front):
            front.append(candidate)
    return tuple(front)


def _candidate_costs(candidate: SearchCandidate) -> tuple[float, float, float]:
    (seconds, peak), (price, _) = candidate.cost(RankBy.time), candidate.cost(RankBy.price)
    return seconds, peak, price


def _dominates(one: SearchCandidate, other: SearchCandidate) -> bool:
    return all(a <= b for a, b in zip(_candidate_costs(one), _candidate_costs(other), strict=True))


def search_runs(
    run: RunConfig, report_progress: Callable[[int], None] = lambda count: None
) -> SearchResult:
    """Run the search that ``run.plan.search`` selects.

    ``report_progress`` is called with the number of candidates after each of them.

    Raises:
        ConfigError: Fixed mesh sizes need more devices than there are.
    """
    if issues := [*layout_enumeration.layout_issues(run, override_keys(run.overrides))]:
        raise ConfigError(issues)
    candidates = []
    for candidate in iter_candidates(run):
        candidates.append(candidate)
        report_progress(len(candidates))
    if run.plan.search is PlanSearch.all:
        candidates += _iter_refined(SearchResult(run, tuple(candidates)))
        report_progress(len(candidates))
    return SearchResult(run, tuple(candidates))


def _iter_refined(result: SearchResult) -> Iterator[SearchCandidate]:
    """Yield changes of the best candidate and of others on the Pareto front.

    If nothing fits without a change of training, those that need the least memory are changed.
    """
    unchanged = [one for one in result.candidates if not one.training_overrides]
    front: Sequence[SearchCandidate] = result.pareto_front
    if not front:
        front = sorted(unchanged, key=lambda it: it.fit.peak)[:NUM_REFINED]
    spread = front[:: ceil(len(front) / NUM_REFINED)] if front else ()
    best = [result.best] if result.best in unchanged else []
    keys = override_keys(result.base_run.overrides)
    for candidate in {id(one): one for one in (*best, *spread)}.values():
        for change in search_refinement.iter_refinements(candidate.run, keys):
            overrides = tuple(replace_overrides(candidate.overrides, change.overrides))
            variant = RunVariant(
                replace(candidate.run, **change.groups), overrides, result.base_run
            )
            if not variant.is_valid:
                continue
            # Tables have columns of their own for these groups.
            is_shown = not change.changes_training and not SHOWN_GROUPS & change.groups.keys()
            yield _build_candidate(
                variant,
                change.overrides * change.changes_training,
                change.overrides * is_shown,
            )


def _build_candidate(
    variant: RunVariant, training_overrides: Overrides, refinement: Overrides = ()
) -> SearchCandidate:
    """Return the plan of a run; the step time is None if it runs out of memory."""
    run, fit = variant.run, variant.fit
    fails = fit.status is FitStatus.out_of_memory
    step_time = None if fails else predict_step_time(run)
    return SearchCandidate(
        run,
        fit,
        step_time,
        variant.overrides,
        training_overrides=training_overrides,
        refinement=refinement,
    )


def iter_candidates(run: RunConfig) -> Iterator[SearchCandidate]:
    """Yield the candidates of a search.

    Micro-batches larger than one that runs out of memory are skipped. If the largest micro-batch
    fits without recomputation, more recomputation is skipped, unless the search ranks by memory.
    """
    typed = override_keys(run.overrides)
    base = _base_variant(RunVariant(run, validated=run), typed)
    layouts = [*layout_enumeration.enumerate_layouts(run, typed)]
    for trained in _training_variants(base, typed):
        training_overrides = trained.overrides[len(base.overrides) :]
        for laid in _layout_variants(trained, layouts):
            if any(
                (
                    *quantization_issues(laid.run.quantization, laid.run),
                    *model_issues(laid.run.model, laid.run),
                )
            ):
                continue
            for variant in _memory_variants(laid, typed):
                candidates = list(_iter_micro_batches(variant, typed, training_overrides))
                yield from candidates
                largest_fits = bool(candidates) and candidates[-1].is_acceptable
                if largest_fits and run.plan.rank_by is not RankBy.memory:
                    break


def _iter_micro_batches(
    base: RunVariant, fixed_keys: frozenset[str], training_overrides: Overrides
) -> Iterator[SearchCandidate]:
    """Yield candidates by increasing micro-batch size until one is out of memory."""
    for index, variant in enumerate(_micro_batch_variants(base, fixed_keys)):
        run = variant.run
        # Only the checks of the strategy depend on the micro-batch size.
        if any(parallelism_issues(run.parallelism, run)) if index else not variant.is_valid:
            continue
        candidate = _build_candidate(variant, training_overrides)
        yield candidate
        if candidate.fit.status is FitStatus.out_of_memory:
            return


def _base_variant(variant: RunVariant, fixed_keys: frozenset[str]) -> RunVariant:
    """Variant in bf16_mixed instead of the default fp32, on a GPU with bf16."""
    run = variant.run
    varies_precision = run.plan.search in (PlanSearch.memory, PlanSearch.all)
    has_bf16 = run.hardware.device is DeviceKind.cuda and run.hardware.bf16_tflops != 0
    if not varies_precision or not has_bf16 or "precision" in fixed_keys:
        return variant
    if run.precision != Precision():
        return variant
    return variant.change("precision=bf16_mixed", precision=Precision(compute=FloatFormat.bf16))


def _training_variants(variant: RunVariant, fixed_keys: frozenset[str]) -> Iterator[RunVariant]:
    run = variant.run
    if run.plan.search not in (PlanSearch.memory, PlanSearch.all):
        yield variant
        return
    trained_variants = [variant]
    if "precision" not in fixed_keys and run.hardware.bf16_tflops != 0:
        formats = {"bf16_mixed": Precision(compute=FloatFormat.bf16)}
        formats["bf16_true"] = Precision(FloatFormat.bf16, FloatFormat.bf16)
        trained_variants += [
            variant.change(f"precision={name}", precision=precision)
            for name, precision in formats.items()
            if _peak_bytes(precision) < _peak_bytes(run.precision)
        ]
    for trained in trained_variants:
        yield trained
        adapted_variants = [trained] if run.has_frozen_weights else []
        if "adapter" not in fixed_keys and not run.has_frozen_weights:
            adapted_variants = [trained.change("adapter=lora", adapter=LoRAAdapterConfig())]
            yield from adapted_variants
        if "quantization" not in fixed_keys and isinstance(run.quantization, NoQuantizationConfig):
            for adapted in adapted_variants:
                yield adapted.change("quantization=nf4", quantization=NF4Config())
        if "optimizer" not in fixed_keys and not isinstance(run.optimizer, SGDConfig):
            yield trained.change("optimizer=sgd", optimizer=SGDConfig())


def _peak_bytes(precision: Precision) -> int:
    return precision.parameters.bytes + precision.compute.bytes


def _layout_variants(
    variant: RunVariant, layouts: Sequence[layout_enumeration.Layout]
) -> Iterator[RunVariant]:
    run = variant.run
    if run.plan.search is PlanSearch.memory:
        yield variant
        return
    global_batch = run.global_batch
    if run.trainer.global_batch is None:  # at least one sequence per device
        global_batch = max(global_batch, layout_enumeration.available_devices(run))
    trainer = replace(run.trainer, global_batch=global_batch)
    for overrides, layout in layouts:
        if global_batch % layout.data_parallel_size == 0:
            yield variant.change(*overrides, parallelism=layout, trainer=trainer)


def _memory_variants(variant: RunVariant, fixed_keys: frozenset[str]) -> Iterator[RunVariant]:
    run = variant.run
    chunks: list[int | None] = [run.objective.loss_chunk]
    if run.plan.search in (PlanSearch.memory, PlanSearch.all) and chunks == [None]:
        chunks = chunks if "objective.loss_chunk" in fixed_keys else [None, LOSS_CHUNK_TOKENS]
    is_fixed = any(key.split(".")[0] == "memory" for key in fixed_keys)
    for recompute in [None] if is_fixed else Recompute:
        for chunk in chunks:
            changed = variant
            if recompute is not None and (memory := _checkpointing(recompute)) != run.memory:
                changed = changed.set_checkpointing(memory)
            if chunk != run.objective.loss_chunk:
                objective = _with_loss_chunk(run.objective, chunk)
                changed = changed.change(f"objective.loss_chunk={chunk}", objective=objective)
            yield changed


# Cached: all layouts share one object, which caches of the planner find by identity.
@lru_cache
def _checkpointing(recompute: Recompute) -> FixedCheckpointing:
    return FixedCheckpointing(recompute)


@lru_cache
def _with_loss_chunk(objective: ObjectiveConfig, chunk: int | None) -> ObjectiveConfig:
    return replace(objective, loss_chunk=chunk)


@lru_cache
def _with_batch(trainer: TrainerConfig, micro_batch: int, global_batch: int) -> TrainerConfig:
    return replace(trainer, micro_batch=micro_batch, global_batch=global_batch)


def _micro_batch_variants(variant: RunVariant, fixed_keys: frozenset[str]) -> Iterator[RunVariant]:
    """Yield micro-batch sizes, or numbers of pipeline micro-batches, from the least memory on."""
    run, layout, global_batch = variant.run, variant.run.parallelism, variant.run.global_batch
    rank_sequences = global_batch // layout.data_parallel_size
    is_fixed = "trainer.micro_batch" in fixed_keys

    def with_size(size: int) -> RunVariant:
        trainer = _with_batch(run.trainer, size, global_batch)
        overrides = (f"trainer.micro_batch={size}", f"trainer.global_batch={global_batch}")
        return variant.change(*overrides, trainer=trainer)

    if layout_enumeration.is_pipeline(layout):
        size = run.micro_batch if is_fixed else rank_sequences
        for num_micro_batches in reversed(_powers_of_two_below(size)):
            if num_micro_batches >= layout.num_stages and size % num_micro_batches == 0:
                override = f"parallelism.pipeline_micro_batches={num_micro_batches}"
                pipeline = replace(layout, pipeline_micro_batches=num_micro_batches)
                yield with_size(size).change(override, parallelism=pipeline)
        return
    for size in [run.micro_batch] if is_fixed else _powers_of_two_below(rank_sequences):
        if rank_sequences % size == 0:
            yield with_size(size)


def _powers_of_two_below(count: int) -> list[int]:
    """Return the powers of two below ``count``, and ``count``."""
    return [*(1 << power for power in range(count.bit_length()) if 1 << power < count), count]
