"""A walk over the runs that do the same job otherwise, judged by ledger and step time.

Every layout is tried on every power-of-two part of the devices, with the micro batches, the
recomputation and, where asked, the formats that it admits. What a user typed is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from scalewise.adapters import Lora
from scalewise.errors import ConfigError
from scalewise.memory import Checkpointing, Recompute
from scalewise.optimizers import SGD
from scalewise.plan import layouts
from scalewise.plan.cure import CHUNK
from scalewise.plan.line import typed_keys
from scalewise.plan.plan import Plan
from scalewise.plan.spec import Rank, Search
from scalewise.plan.steptime import of_step, rates
from scalewise.plan.verdict import Verdict, judged
from scalewise.precision import Number, Precision
from scalewise.quantization import NoQuantization
from scalewise.quantization.packing import NF4

if TYPE_CHECKING:
    from scalewise.run import Run

Told = tuple[str, ...]
Way = tuple[Told, "Run"]
"""A run, and what says so on the command line."""


@dataclass(frozen=True)
class Candidate(Plan):
    """A plan that a search came to."""

    training: Told = ()
    """What of ``told`` changes what is trained, or how exactly."""

    @property
    def good(self) -> bool:
        """Returns whether it surely fits."""
        return self.fit.verdict.good

    def cost(self, rank: Rank) -> tuple[float, float]:
        """Returns what a search wants least of, and then what breaks a tie."""
        seconds, peak = self.seconds, float(self.fit.ledger.peak)
        if rank is Rank.memory:
            return peak, seconds
        return seconds * (self.run.world_size if rank is Rank.price else 1), peak

    @cached_property
    def seconds(self) -> float:
        """Returns the time of a step; 0 where the profile lacks a rate."""
        return 0.0 if self.step is None else self.step.seconds


@dataclass(frozen=True)
class Found:
    """All that a search came to."""

    asked: Run
    candidates: tuple[Candidate, ...]

    @cached_property
    def rank(self) -> Rank:
        """Returns what is wanted least of; memory where the profile tells of no time."""
        return self.asked.plan.rank_by if rates(self.asked) is not None else Rank.memory

    @cached_property
    def best(self) -> Candidate | None:
        """Returns what a user should run: what fits before what may, and what trains as asked."""
        rank = self.rank
        return min(
            (candidate for candidate in self.candidates if not candidate.fit.verdict.bad),
            key=lambda it: (not it.good, len(it.training), it.cost(rank)),
            default=None,
        )

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """Returns what fits, trained as asked, and none such beats in time, memory and price."""
        return _unbeaten(one for one in self.candidates if not one.training)

    @cached_property
    def otherwise(self) -> tuple[Candidate, ...]:
        """Returns what fits, trained otherwise, and none at all beats."""
        return tuple(one for one in _unbeaten(self.candidates) if one.training)


def _unbeaten(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Returns those that fit and that none beats in time, memory and price, fastest first."""
    kept: list[Candidate] = []
    for candidate in sorted((one for one in candidates if one.good), key=_costs):
        if not any(_beats(other, candidate) for other in kept):
            kept.append(candidate)
    return tuple(kept)


def _costs(candidate: Candidate) -> tuple[float, float, float]:
    (seconds, peak), (price, _) = candidate.cost(Rank.time), candidate.cost(Rank.price)
    return seconds, peak, price


def _beats(one: Candidate, other: Candidate) -> bool:
    return all(a <= b for a, b in zip(_costs(one), _costs(other), strict=True))


def searched(run: Run, tell: Callable[[int], None] = lambda count: None) -> Found:
    """Returns what ``run.plan.search`` finds; ``tell`` hears of each run how many there were.

    Raises ``ConfigError`` for sizes that were typed and that no layout of the devices has.
    """
    if wrong := [*layouts.complaints(run, typed_keys(run.overrides))]:
        raise ConfigError(wrong)
    candidates = []
    for candidate in walk(run):
        candidates.append(candidate)
        tell(len(candidates))
    return Found(run, tuple(candidates))


def walk(run: Run) -> Iterator[Candidate]:
    """Yields candidates, but for those that the ledger has ruled out.

    Where a micro batch is out of memory no larger one is tried; where all rows fit at once nothing
    is computed twice to save memory, unless that is what is wanted least of.
    """
    typed = typed_keys(run.overrides)  # what was typed is held
    for training, trained in _trainings(run, typed):
        for laid_out, laid in _layouts(trained, typed):
            if any((*laid.quantization.complaints_with(laid), *laid.model.complaints_with(laid))):
                continue
            for saving, saved in _savings(laid, typed):
                tried = list(_sizes(saved, typed))
                for passes, plan in tried:
                    told = (*training, *laid_out, *saving, *passes)
                    yield Candidate(plan.run, plan.fit, plan.step, told, training=training)
                roomy = bool(tried) and tried[-1][1].fit.verdict.good
                if roomy and run.plan.rank_by is not Rank.memory:
                    break


def _sizes(run: Run, typed: frozenset[str]) -> Iterator[tuple[Told, Plan]]:
    """Yields plans by micro batch until one is out of memory."""
    for number, (told, tried) in enumerate(_passes(run, typed)):
        # All but the layout's rules are the same for every micro batch.
        rules = tried.parallelism.complaints_with(tried)
        if any(rules if number else tried.complaints()):
            continue
        fit = judged(tried)
        out = fit.verdict is Verdict.out_of_memory
        yield told, Plan(tried, fit, None if out else of_step(tried))
        if out:
            return


def _trainings(run: Run, typed: frozenset[str]) -> Iterator[Way]:
    if run.plan.search not in (Search.memory, Search.all):
        yield (), run
        return
    trainings: list[Way] = [((), run)]
    if "precision" not in typed and run.hardware.bf16_tflops != 0:
        formats = {"bf16_mixed": Precision(compute=Number.bf16)}
        formats["bf16_true"] = Precision(Number.bf16, Number.bf16)
        trainings += [
            ((f"precision={name}",), replace(run, precision=precision))
            for name, precision in formats.items()
            if _bytes(precision) < _bytes(run.precision)
        ]
    for told, trained in trainings:
        yield told, trained
        adapted: list[Way] = [(told, trained)] if run.is_frozen else []
        if "adapter" not in typed and not run.is_frozen:
            adapted = [((*told, "adapter=lora"), replace(trained, adapter=Lora()))]
            yield from adapted
        if "quantization" not in typed and isinstance(run.quantization, NoQuantization):
            for words, frozen in adapted:
                packed = replace(frozen, quantization=NF4())
                yield (*words, "quantization=nf4"), packed
        if "optimizer" not in typed and not isinstance(run.optimizer, SGD):
            yield (*told, "optimizer=sgd"), replace(trained, optimizer=SGD())


def _bytes(precision: Precision) -> int:
    return precision.parameters.bytes + precision.compute.bytes


def _layouts(run: Run, typed: frozenset[str]) -> Iterator[Way]:
    if run.plan.search is Search.memory:
        yield (), run
        return
    rows = run.global_batch
    if run.trainer.global_batch is None:  # a row for every device, at the least
        rows = max(rows, layouts.devices(run))
    for told, layout in layouts.every(run, typed):
        if rows % layout.data_parallel_size:
            continue
        trainer = replace(run.trainer, global_batch=rows)
        yield told, replace(run, parallelism=layout, trainer=trainer)


def _savings(run: Run, typed: frozenset[str]) -> Iterator[Way]:
    chunks: list[int | None] = [run.objective.loss_chunk]
    if run.plan.search is not Search.layout and chunks == [None]:
        chunks = chunks if "objective.loss_chunk" in typed else [None, CHUNK]
    held = any(key.split(".")[0] == "memory" for key in typed)
    for recompute in [None] if held else Recompute:
        for chunk in chunks:
            told: Told = ()
            changed = run
            if recompute is not None and (memory := Checkpointing(recompute)) != run.memory:
                changed = replace(changed, memory=memory)
                name = "none" if recompute is Recompute.nothing else f"checkpoint_{recompute}"
                told += (f"memory={name}",)
            if chunk != run.objective.loss_chunk:
                changed = replace(changed, objective=replace(run.objective, loss_chunk=chunk))
                told += (f"objective.loss_chunk={chunk}",)
            yield told, changed


def _passes(run: Run, typed: frozenset[str]) -> Iterator[Way]:
    """Yields ways to take a rank's rows, those with fewest rows at once first."""
    rows = run.global_batch // run.parallelism.data_parallel_size
    trainer = replace(run.trainer, global_batch=run.global_batch)
    layout, batch = run.parallelism, (f"trainer.global_batch={run.global_batch}",)
    if layouts.is_pipeline(layout):
        size = run.micro_batch if "trainer.micro_batch" in typed else rows
        whole = replace(run, trainer=replace(trainer, micro_batch=size))
        for pieces in reversed(_halves(size)):
            if pieces >= layout.stages and size % pieces == 0:
                told: Told = (f"trainer.micro_batch={size}", *batch)
                told += (f"parallelism.pipeline_micro_batches={pieces}",)
                laid = replace(layout, pipeline_micro_batches=pieces)
                yield told, replace(whole, parallelism=laid)
        return
    for size in [run.micro_batch] if "trainer.micro_batch" in typed else _halves(rows):
        if rows % size == 0:
            told = (f"trainer.micro_batch={size}", *batch)
            yield told, replace(run, trainer=replace(trainer, micro_batch=size))


def _halves(count: int) -> list[int]:
    """Returns the powers of two below ``count``, and ``count``."""
    return [*(1 << power for power in range(count.bit_length()) if 1 << power < count), count]
