"""Search over runs with the same training result, or over cheaper ones if requested.

The search tries every layout on all devices and on fewer, with each micro-batch size, activation
checkpointing and, with ``plan.search=memory`` or ``all``, precision, adapter and optimizer. Values
typed on the command line stay fixed. These two start from ``precision=bf16_mixed`` on a GPU with
bf16, unless a precision is typed. ``all`` then changes more options of the best runs, one by one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Any

from scalewise.adapters import LoRAAdapterConfig
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.op_graph import Recompute
from scalewise.objectives import ObjectiveConfig
from scalewise.optimizers import SGDConfig
from scalewise.plan_config import PlanSearch, RankBy
from scalewise.planner import layout_enumeration, search_refinement
from scalewise.planner.fit_check import FitStatus, RunVariant
from scalewise.planner.search_result import SearchCandidate, SearchResult
from scalewise.planner.step_time import least_step_seconds
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
    with _pause_garbage_collection():
        for candidate in iter_candidates(run):
            candidates.append(candidate)
            report_progress(len(candidates))
        if run.plan.search is PlanSearch.all:
            candidates += _iter_refined(SearchResult(run, tuple(candidates)))
            report_progress(len(candidates))
    return SearchResult(run, tuple(candidates))


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pause the search for reference cycles: candidates have none, and all of them are kept."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
    """Return the candidate of a run."""
    return SearchCandidate(
        variant.run,
        variant.fit,
        overrides=variant.overrides,
        training_overrides=training_overrides,
        refinement=refinement,
        least_seconds=least_step_seconds(variant.run),
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

    def with_size(size: int, *more: str, **groups: Any) -> RunVariant:
        trainer = _with_batch(run.trainer, size, global_batch)
        overrides = (f"trainer.micro_batch={size}", f"trainer.global_batch={global_batch}")
        return variant.change(*overrides, *more, trainer=trainer, **groups)

    if layout_enumeration.is_pipeline(layout):
        size = run.micro_batch if is_fixed else rank_sequences
        for num_micro_batches in reversed(_powers_of_two_below(size)):
            if num_micro_batches >= layout.num_stages and size % num_micro_batches == 0:
                override = f"parallelism.pipeline_micro_batches={num_micro_batches}"
                pipeline = replace(layout, pipeline_micro_batches=num_micro_batches)
                yield with_size(size, override, parallelism=pipeline)
        return
    for size in [run.micro_batch] if is_fixed else _powers_of_two_below(rank_sequences):
        if rank_sequences % size == 0:
            yield with_size(size)


def _powers_of_two_below(count: int) -> list[int]:
    """Return the powers of two below ``count``, and ``count``."""
    return [*(1 << power for power in range(count.bit_length()) if 1 << power < count), count]
