"""Plan of a run: memory, step time, throughput, price and padded samples; totals of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from scalewise.data.prepare import DataSplits
from scalewise.planner.auto_settings import resolve_auto_checkpointing, resolve_auto_micro_batch
from scalewise.planner.communication import list_collectives
from scalewise.planner.fit_check import FitReport, RunVariant, check_fit
from scalewise.planner.step_parts import StepTime
from scalewise.planner.step_time import predict_step_time
from scalewise.planner.suggested_fix import SuggestedFix, suggest_fix
from scalewise.run_config import RunConfig

HOUR = 3600.0


@dataclass(frozen=True)
class Plan:
    """Predicted memory, time and price of a run on its hardware."""

    run: RunConfig
    """The run, with ``auto`` values resolved."""
    fit: FitReport
    """Predicted memory compared with the hardware."""
    step_time: StepTime | None
    """Predicted step time; None if the hardware profile lacks a rate."""
    overrides: tuple[str, ...] = ()
    """Overrides that turn the requested run into ``run``."""

    @cached_property
    def suggested_fix(self) -> SuggestedFix | None:
        """The cheapest change that makes the run fit; None if it fits, or if no change helps."""
        if self.fit.status.is_acceptable or self.run.objective.trace_only:
            return None
        return suggest_fix(self.run)

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """Shortest and longest step time, in seconds."""
        if self.step_time is None:
            return None
        hardware, seconds = self.run.hardware, self.step_time.seconds
        return seconds * hardware.step_shortest, seconds * hardware.step_longest

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of all devices, in tokens/s."""
        return None if self.step_time is None else self.run.tokens_per_step / self.step_time.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: FLOP/s of the model over the peak of the devices.

        The FLOPs are 6 per weight, and those of causal attention.
        """
        run = self.run
        peak = run.hardware.peak_flops(run.precision.peak_kind)
        if self.step_time is None or not peak:
            return None
        return run.flops_per_step / run.world_size / self.step_time.seconds / peak

    @property
    def mfu_palm(self) -> float | None:
        """Model FLOPs utilization by PaLM's convention, where attention is not causal."""
        return None if self.mfu is None else self.mfu * self.run.palm_to_causal_flops

    @cached_property
    def stage_seconds(self) -> Mapping[int, float]:
        """Step time by tokens of a step, of each stage of a warm-up and of the steps after it.

        In seconds; empty without a predicted step time.
        """
        times = {
            tokens: self.step_time if run is self.run else predict_step_time(run)
            for tokens, run in self.run.warmup_runs.items()
        }
        return {tokens: time.seconds for tokens, time in times.items() if time is not None}

    def step_seconds_at(self, step: int) -> float | None:
        """Return the time of a step, which counts from 1, in seconds."""
        return self.stage_seconds.get(self.run.tokens_in_step.at(step - 1))

    def seconds_for_steps(self, steps: int) -> float | None:
        """Return the time of the first ``steps`` optimizer steps, in seconds."""
        stages = [*self._stage_rates(steps)]
        return sum(tokens / rate for tokens, rate in stages) if self.step_time else None

    def dollars_for_steps(self, steps: int) -> float | None:
        """Return the price of the first ``steps`` optimizer steps, in US dollars."""
        stages = [*self._stage_rates(steps)]
        prices = [
            price * tokens / 1e9
            for tokens, rate in stages
            if (price := dollars_per_billion_tokens(self.run, rate)) is not None
        ]
        return sum(prices) if prices else None

    def _stage_rates(self, steps: int) -> Iterator[tuple[int, float]]:
        """Yield the tokens of each stage of a run, and its throughput in tokens/s."""
        for _, count, tokens in self.run.tokens_in_step.iter_stages(steps):
            if (seconds := self.stage_seconds.get(tokens)) is not None:
                yield count * tokens, tokens / seconds

    def seconds_for(self, tokens: float) -> float | None:
        """Return the training time for ``tokens`` after any warm-up, in seconds."""
        return None if self.tokens_per_s is None else tokens / self.tokens_per_s

    def dollars_for(self, tokens: float) -> float | None:
        """Return the price of training on ``tokens``, in US dollars."""
        price = dollars_per_billion_tokens(self.run, self.tokens_per_s)
        return None if price is None else price * tokens / 1e9

    def kwh_for(self, tokens: float) -> float | None:
        """Return the energy of training on ``tokens``, in kWh."""
        seconds, watts = self.seconds_for(tokens), self.run.hardware.watts
        return None if seconds is None or not watts else self._device_hours(seconds) * watts / 1e3

    def _device_hours(self, seconds: float) -> float:
        return seconds / HOUR * self.run.world_size


def build_plan(run: RunConfig) -> Plan:
    """Return the plan of a run from its configs, with ``auto`` values resolved."""
    variant = resolve_auto_checkpointing(resolve_auto_micro_batch(RunVariant(run)))
    return Plan(variant.run, variant.fit, predict_step_time(variant.run), variant.overrides)


def plan_record(run: RunConfig) -> dict[str, object]:
    """Return the prediction that a run folder stores in ``plan.json``.

    Memory is that of the rank with the highest peak, in bytes: by entry at the peak, and by phase.
    ``collectives`` are those of rank 0 in one step. Empty for runs that only a trace can plan.
    """
    if run.objective.trace_only:
        return {}
    fit, step = check_fit(run), predict_step_time(run)
    breakdown = fit.breakdown
    at_peak = {entry.name: entry.bytes.get(breakdown.peak_phase, 0) for entry in breakdown.entries}
    return {
        **predicted_metrics(run),
        "fullest": breakdown.peak_phase.value,
        "ledger": {name: size for name, size in at_peak.items() if size},
        "phases": {phase.value: size for phase, size in breakdown.phases.items() if size},
        "step_parts": {} if step is None else step.parts(),
        "collectives": [
            {
                "kind": collective.kind.value,
                "axes": list(collective.axes),
                "what": collective.name,
                "bytes": collective.bytes,
                "count": collective.count,
            }
            for collective in list_collectives(run.parallelism, run)
        ],
        "limit_bytes": fit.capacity,
    }


def dollars_per_billion_tokens(run: RunConfig, tokens_per_s: float | None) -> float | None:
    """Return the price of a billion tokens, in US dollars; None without a price in the profile.

    ``tokens_per_s``: throughput of all ranks.
    """
    dollars_per_hour = run.hardware.dollars_per_hour
    if not tokens_per_s or not dollars_per_hour:
        return None
    return dollars_per_hour * run.world_size * 1e9 / tokens_per_s / HOUR


def predicted_metrics(run: RunConfig) -> dict[str, float | None]:
    """Return the predictions for ``memory/peak_bytes`` and ``time/step_s``, with prefix ``plan/``.

    The step time is None if it is not predicted. Empty for runs that only a trace can plan.
    """
    if run.objective.trace_only:
        return {}
    step = predict_step_time(run)
    return {
        "plan/peak_bytes": check_fit(run).breakdown.peak,
        "plan/step_s": None if step is None else step.seconds,
    }


@dataclass(frozen=True)
class SweepTotals:
    """Totals over the jobs of a sweep."""

    jobs: int
    """Number of jobs."""
    unfit: int
    """Number of jobs that run out of memory; they count no time."""
    seconds: float
    """Summed time of the timed jobs, in seconds."""
    dollars: float | None
    """Summed price of the timed jobs, in US dollars; None without a price in the profile."""
    untimed: int
    """Number of jobs that may fit and have no predicted time."""
    unrated: int
    """Number of untimed jobs whose hardware profile lacks a rate."""


def sum_plans(plans: Sequence[Plan]) -> SweepTotals:
    """Totals over the plans of a sweep."""
    fitting = [plan for plan in plans if not plan.fit.status.is_out_of_memory]
    timed = [(plan, time) for plan in fitting if (time := training_seconds(plan)) is not None]
    totals = [plan.dollars_for_steps(plan.run.num_steps(samples=0)) for plan, _ in timed]
    prices = [price for price in totals if price is not None]
    return SweepTotals(
        len(plans),
        len(plans) - len(fitting),
        sum(time for _, time in timed),
        sum(prices) if prices else None,
        len(fitting) - len(timed),
        sum(plan.step_time is None and not plan.run.objective.trace_only for plan in fitting),
    )


def training_seconds(plan: Plan) -> float | None:
    """Training time of a run, in seconds.

    None without a predicted step time, or with epochs of unknown length.
    """
    if plan.run.trainer.max_epochs is not None:
        return None
    return plan.seconds_for_steps(plan.run.num_steps(samples=0))


def padding_notes(run: RunConfig, splits: DataSplits | None = None) -> Iterator[str]:
    """Yield one line for each kind of samples that a run pads or repeats.

    Args:
        run: Run with a chosen micro-batch size.
        splits: Prepared data. None: epochs are not covered, and validation is assumed to have its
            largest size.
    """
    ranks, micro_batch = run.parallelism.data_parallel_size, run.micro_batch

    def padded(what: str, samples: int, fix: str) -> Iterator[str]:
        accumulation = ceil(samples / (micro_batch * ranks))
        size = accumulation * micro_batch * ranks
        if size > samples:
            yield (
                f"{what}: {amount_text(samples, size, 'empty')}, computed but not counted in the "
                f"loss, to fill {ranks} rank{'s' * (ranks > 1)} x {micro_batch} x "
                f"{accumulation} micro-batch{'es' * (accumulation > 1)}{fix}"
            )

    step = run.accumulation * run.samples_per_forward
    yield from padded(
        "each step", run.global_batch, f"; set trainer.global_batch={step} to avoid padding"
    )
    epochs = run.trainer.max_epochs
    if splits is not None and epochs is not None and not splits.train.streamed:
        samples, steps = ceil(epochs * len(splits.train)), run.num_steps(len(splits.train))
        if (samples_read := run.samples_per_step.before(steps)) > samples:
            yield (
                f"all epochs: {amount_text(samples, samples_read, 'repeated')}, "
                f"to fill the last of {steps:,} steps of "
                f"{run.samples_per_step.at(steps - 1)} samples"
            )
    if run.trainer.validate_every is not None:
        held_out = run.trainer.validation_rows
        if splits is not None:
            held_out = min(held_out, len(splits.validation or ()))
        yield from padded("each validation", held_out, "")


def amount_text(samples: int, total: int, kind: str) -> str:
    """Return the numbers of samples before and after padding; ``kind`` is empty or repeated."""
    added = total - samples
    percentage = f"{added / total:.1%}" if added / total >= 0.0005 else "less than 0.1%"
    return (
        f"{samples:,} sample{'s' * (samples != 1)} padded to {total:,} "
        f"({added:,} {kind}, {percentage})"
    )
