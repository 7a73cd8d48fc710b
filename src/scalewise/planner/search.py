"""Search over runs with the same training result, or over cheaper ones if requested.

The search tries every layout on all devices and on fewer, with each micro-batch size, activation
checkpointing and, with ``plan.search=memory`` or ``all``, precision, adapter and optimizer. Values
typed on the command line stay fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import FixedCheckpointing
from scalewise.adapters import LoRAAdapterConfig
from scalewise.errors import ConfigError
from scalewise.models.op_graph import Recompute
from scalewise.optimizers import SGDConfig
from scalewise.plan_config import PlanSearch, RankBy
from scalewise.planner import layout_enumeration
from scalewise.planner.fit_check import FitStatus, check_fit
from scalewise.planner.override_edit import override_keys
from scalewise.planner.plan import Plan
from scalewise.planner.step_time import device_rates, predict_step_time
from scalewise.planner.suggested_fix import LOSS_CHUNK_TOKENS
from scalewise.precision import FloatFormat, Precision
from scalewise.quantization import NoQuantizationConfig
from scalewise.quantization.bitsandbytes_config import NF4Config
from scalewise.validation.model_rules import model_issues
from scalewise.validation.parallelism_rules import parallelism_issues
from scalewise.validation.quantization_rules import quantization_issues
from scalewise.validation.run_issues import iter_issues

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

Overrides = tuple[str, ...]
SearchOption = tuple[Overrides, "RunConfig"]
"""Overrides, and the run that they result in."""


@dataclass(frozen=True)
class SearchCandidate(Plan):
    """Plan of one run of a search."""

    training_overrides: Overrides = ()
    """Overrides that change the training result or its precision."""

    @property
    def is_acceptable(self) -> bool:
        """Whether the run fits."""
        return self.fit.status.is_acceptable

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
        """The best candidate: by fit, then by changes of training, then by the ranked quantity."""
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
    return SearchResult(run, tuple(candidates))


def iter_candidates(run: RunConfig) -> Iterator[SearchCandidate]:
    """Yield the candidates of a search.

    Micro-batches larger than one that runs out of memory are skipped. If the largest micro-batch
    fits without recomputation, more recomputation is skipped, unless the search ranks by memory.
    """
    typed = override_keys(run.overrides)
    for training_overrides, trained_run in _training_options(run, typed):
        for layout_overrides, laid_run in _layout_options(trained_run, typed):
            if any(
                (
                    *quantization_issues(laid_run.quantization, laid_run),
                    *model_issues(laid_run.model, laid_run),
                )
            ):
                continue
            for memory_overrides, memory_run in _memory_options(laid_run, typed):
                plans = list(_iter_micro_batches(memory_run, typed))
                for size_overrides, plan in plans:
                    overrides = (
                        *training_overrides,
                        *layout_overrides,
                        *memory_overrides,
                        *size_overrides,
                    )
                    yield SearchCandidate(
                        plan.run,
                        plan.fit,
                        plan.step_time,
                        overrides,
                        training_overrides=training_overrides,
                    )
                largest_fits = bool(plans) and plans[-1][1].fit.status.is_acceptable
                if largest_fits and run.plan.rank_by is not RankBy.memory:
                    break


def _iter_micro_batches(
    run: RunConfig, fixed_keys: frozenset[str]
) -> Iterator[tuple[Overrides, Plan]]:
    """Yield plans by increasing micro-batch size until one is out of memory."""
    for index, (overrides, candidate) in enumerate(_micro_batch_options(run, fixed_keys)):
        # Only the checks of the strategy depend on the micro-batch size.
        strategy_issues = parallelism_issues(candidate.parallelism, candidate)
        if any(strategy_issues if index else iter_issues(candidate)):
            continue
        fit = check_fit(candidate)
        is_out_of_memory = fit.status is FitStatus.out_of_memory
        yield (
            overrides,
            Plan(candidate, fit, None if is_out_of_memory else predict_step_time(candidate)),
        )
        if is_out_of_memory:
            return


def _training_options(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[SearchOption]:
    if run.plan.search not in (PlanSearch.memory, PlanSearch.all):
        yield (), run
        return
    trainings: list[SearchOption] = [((), run)]
    if "precision" not in fixed_keys and run.hardware.bf16_tflops != 0:
        formats = {"bf16_mixed": Precision(compute=FloatFormat.bf16)}
        formats["bf16_true"] = Precision(FloatFormat.bf16, FloatFormat.bf16)
        trainings += [
            ((f"precision={name}",), replace(run, precision=precision))
            for name, precision in formats.items()
            if _peak_bytes(precision) < _peak_bytes(run.precision)
        ]
    for overrides, trained_run in trainings:
        yield overrides, trained_run
        adapted: list[SearchOption] = [(overrides, trained_run)] if run.has_frozen_weights else []
        if "adapter" not in fixed_keys and not run.has_frozen_weights:
            adapted = [
                ((*overrides, "adapter=lora"), replace(trained_run, adapter=LoRAAdapterConfig()))
            ]
            yield from adapted
        if "quantization" not in fixed_keys and isinstance(run.quantization, NoQuantizationConfig):
            for adapter_overrides, adapted_run in adapted:
                quantized_run = replace(adapted_run, quantization=NF4Config())
                yield (*adapter_overrides, "quantization=nf4"), quantized_run
        if "optimizer" not in fixed_keys and not isinstance(run.optimizer, SGDConfig):
            yield (*overrides, "optimizer=sgd"), replace(trained_run, optimizer=SGDConfig())


def _peak_bytes(precision: Precision) -> int:
    return precision.parameters.bytes + precision.compute.bytes


def _layout_options(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[SearchOption]:
    if run.plan.search is PlanSearch.memory:
        yield (), run
        return
    global_batch = run.global_batch
    if run.trainer.global_batch is None:  # at least one sequence per device
        global_batch = max(global_batch, layout_enumeration.available_devices(run))
    for overrides, layout in layout_enumeration.enumerate_layouts(run, fixed_keys):
        if global_batch % layout.data_parallel_size:
            continue
        trainer = replace(run.trainer, global_batch=global_batch)
        yield overrides, replace(run, parallelism=layout, trainer=trainer)


def _memory_options(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[SearchOption]:
    chunks: list[int | None] = [run.objective.loss_chunk]
    if run.plan.search is not PlanSearch.layout and chunks == [None]:
        chunks = chunks if "objective.loss_chunk" in fixed_keys else [None, LOSS_CHUNK_TOKENS]
    is_fixed = any(key.split(".")[0] == "memory" for key in fixed_keys)
    for recompute in [None] if is_fixed else Recompute:
        for chunk in chunks:
            overrides: Overrides = ()
            changed = run
            if recompute is not None and (memory := FixedCheckpointing(recompute)) != run.memory:
                changed = replace(changed, memory=memory)
                name = "none" if recompute is Recompute.nothing else f"checkpoint_{recompute}"
                overrides += (f"memory={name}",)
            if chunk != run.objective.loss_chunk:
                changed = replace(changed, objective=replace(run.objective, loss_chunk=chunk))
                overrides += (f"objective.loss_chunk={chunk}",)
            yield overrides, changed


def _micro_batch_options(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[SearchOption]:
    """Yield micro-batch sizes, or numbers of pipeline micro-batches, from the least memory on."""
    rank_sequences = run.global_batch // run.parallelism.data_parallel_size
    trainer = replace(run.trainer, global_batch=run.global_batch)
    layout, batch_overrides = run.parallelism, (f"trainer.global_batch={run.global_batch}",)
    if layout_enumeration.is_pipeline(layout):
        size = run.micro_batch if "trainer.micro_batch" in fixed_keys else rank_sequences
        base_run = replace(run, trainer=replace(trainer, micro_batch=size))
        for num_micro_batches in reversed(_powers_of_two_below(size)):
            if num_micro_batches >= layout.num_stages and size % num_micro_batches == 0:
                overrides: Overrides = (f"trainer.micro_batch={size}", *batch_overrides)
                overrides += (f"parallelism.pipeline_micro_batches={num_micro_batches}",)
                pipeline = replace(layout, pipeline_micro_batches=num_micro_batches)
                yield overrides, replace(base_run, parallelism=pipeline)
        return
    for size in (
        [run.micro_batch]
        if "trainer.micro_batch" in fixed_keys
        else _powers_of_two_below(rank_sequences)
    ):
        if rank_sequences % size == 0:
            overrides = (f"trainer.micro_batch={size}", *batch_overrides)
            yield overrides, replace(run, trainer=replace(trainer, micro_batch=size))


def _powers_of_two_below(count: int) -> list[int]:
    """Return the powers of two below ``count``, and ``count``."""
    return [*(1 << power for power in range(count.bit_length()) if 1 << power < count), count]
