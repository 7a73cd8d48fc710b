"""What the records of several jobs say beside each other: names, winners, distances. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from scalewise.reports import number_format
from scalewise.reports.records import MetricSeries, RunRecord, SweepRecord

SPEED = "throughput/tokens_per_s"
STEP = "time/step_s"
PEAK = "memory/peak_bytes"
FORESEEN_PEAK = "plan/peak_bytes"
FORESEEN_STEP = "plan/step_s"
FORESEEN = {PEAK: FORESEEN_PEAK, STEP: FORESEEN_STEP}
"""What was measured: under which key it was foreseen."""
PRICE = "price/dollars_per_billion_tokens"
LOSS = "train/loss"
VALIDATION = "val/loss"
UNTRAINED = "val/loss_first"
PREFERRED = "val/reward_accuracy"
CHANCE = 0.5
"""What a model that is its own reference has of it."""
REWARD = "val/reward"
ACCURACY = "val/accuracy"

EQUIVALENT = 1e-5
"""Nats per token below which two losses come from the same mathematics, summed in another order."""

SHOWN = 24
"""Jobs that a chart draws one by one; beyond it the page picks."""


@dataclass(frozen=True)
class StackPart:
    """One layer of a stack: its metric, how the page calls it and the CSS variable it wears."""

    key: str
    label: str
    colour: str


MEMORY = (
    StackPart("memory/parameters_bytes", "parameters", "--m-params"),
    StackPart("memory/gradients_bytes", "gradients", "--m-grads"),
    StackPart("memory/optimizer_bytes", "optimizer", "--m-opt"),
    StackPart("memory/activations_bytes", "activations", "--m-act"),
)
MEMORY_REST = StackPart("", "other", "--m-other")
PASSES = (
    StackPart("time/forward_s", "forward", "--t-fwd"),
    StackPart("time/backward_s", "backward", "--t-bwd"),
)
BOTH_PASSES = StackPart("time/forward_backward_s", "forward + backward", "--t-both")
TIME = (
    StackPart("time/data_s", "data", "--t-data"),
    *PASSES,
    BOTH_PASSES,
    StackPart("time/optimizer_s", "optimizer", "--t-opt"),
)
TIME_REST = StackPart("", "other, idle", "--t-idle")


@dataclass(frozen=True, eq=False)
class ReportJob:
    """A run under the name it has everywhere on the page."""

    run: RunRecord
    name: str
    group: int = 0

    def measured(self, key: str) -> float | None:
        """Returns the run's summary of ``key``, ``None`` if missing or not finite."""
        return measured_value(self.run, key)

    def predicted(self, key: str) -> float | None:
        """Returns what the planner said of the peak or of the step, before the run."""
        said = measured_value(self.run, FORESEEN[key])
        return self.run.predicted.get(FORESEEN[key]) if said is None else said

    def prediction_error(self, key: str) -> float | None:
        """Returns how far off the planner was, as a share of what was measured."""
        said, came = self.predicted(key), self.measured(key)
        return said / came - 1 if said is not None and came else None


def is_preference(jobs: Iterable[ReportJob]) -> bool:
    """Returns whether all jobs compare pairs of answers: their losses are of a pair."""
    return {job.run.choices.get("objective") for job in jobs} == {"dpo"}


@dataclass(frozen=True)
class ReportComparison:
    """The jobs of a sweep, or the one of a run, ready to be laid side by side."""

    jobs: tuple[ReportJob, ...]
    reference: ReportJob | None
    varying: Mapping[str, tuple[object, ...]]
    group_key: str
    groups: tuple[str, ...]

    @cached_property
    def finished(self) -> tuple[ReportJob, ...]:
        """The jobs that went to their end."""
        return tuple(job for job in self.jobs if job.run.ok)

    @cached_property
    def unfinished(self) -> tuple[ReportJob, ...]:
        """The jobs that ended in any other way, unasked; not those running or still to come."""
        waiting = ("ok", "pruned", "running", "not_run")
        return tuple(job for job in self.jobs if job.run.status not in waiting)

    @cached_property
    def is_oversubscribed(self) -> bool:
        """Whether jobs ran at the same time on the cores of one machine, slowing each other."""
        spans = sorted(
            (job.run.started, job.run.ended)
            for job in self.finished
            if job.run.started and job.run.ended and job.run.machine.get("device") == "cpu"
        )
        return any(later[0] < earlier[1] for earlier, later in pairwise(spans))

    def rank_jobs(self, key: str, largest_first: bool) -> list[ReportJob]:
        """Returns the finished jobs that measured ``key``, in its order."""
        having = [(job.measured(key), job) for job in self.finished]
        known = [(number, job) for number, job in having if number is not None]
        return [job for _, job in sorted(known, key=lambda p: p[0], reverse=largest_first)]

    @cached_property
    def headline_metric(self) -> tuple[str, bool]:
        """The metric that orders the page, and whether the largest comes first."""
        for key, largest_first in ((SPEED, True), (STEP, False), (LOSS, False)):
            if self.rank_jobs(key, largest_first):
                return key, largest_first
        return SPEED, True

    @cached_property
    def pareto_front(self) -> tuple[ReportJob, ...]:
        """Finished jobs that no other beats on both step time and peak memory, fastest first."""
        return self.find_pareto_front(STEP, PEAK)

    def find_pareto_front(self, one: str, other: str) -> tuple[ReportJob, ...]:
        """Returns the finished jobs that none beats on two metrics of which less is better."""
        best: list[ReportJob] = []
        for job in sorted(
            (j for j in self.rank_jobs(one, False) if j.measured(other) is not None),
            key=lambda j: (j.measured(one), j.measured(other)),
        ):
            if not best or (job.measured(other) or 0) < (best[-1].measured(other) or 0):
                best.append(job)
        return tuple(best)

    @cached_property
    def charted_jobs(self) -> tuple[ReportJob, ...]:
        """The jobs that charts draw one by one: all, or the front, the failures and the best."""
        if len(self.jobs) <= SHOWN:
            return self.jobs
        first = [self.reference] if self.reference is not None else []
        first += [*self.pareto_front[: SHOWN // 2], *_is_drawable(self.unfinished)[: SHOWN // 4]]
        first += self.rank_jobs(*self.headline_metric)
        kept = set(list(dict.fromkeys(first))[:SHOWN])
        return tuple(job for job in self.jobs if job in kept)


def _is_drawable(jobs: Sequence[ReportJob]) -> list[ReportJob]:
    return [job for job in jobs if job.run.summary or LOSS in job.run.series]


def compare_run(run: RunRecord) -> ReportComparison:
    """Returns the comparison that a run's own page is drawn from."""
    return ReportComparison((ReportJob(run, run.name),), None, {}, "", ())


def compare_sweep(sweep: SweepRecord) -> ReportComparison:
    """Returns the jobs of ``sweep`` under their names; the reference is the first unless given."""
    varying = {key: sweep.varying[key] for key in _order_jobs(sweep.varying)}
    short = {key: _short_values(values) for key, values in varying.items()}
    group_key, groups = _color_groups(varying, short)
    names = _ablation_names(sweep.jobs, short) or [_job_name(run, short) for run in sweep.jobs]
    twice = {name for name, count in Counter(names).items() if count > 1}
    jobs = []
    for run, name in zip(sweep.jobs, names, strict=True):
        own = short.get(group_key, {}).get(
            number_format.format_value(run.varied_settings.get(group_key)), ""
        )
        group = groups.index(own) if own in groups else 0
        jobs.append(ReportJob(run, f"{name} #{run.number}" if name in twice else name, group))
    reference = jobs[sweep.reference or 0] if jobs else None
    return ReportComparison(tuple(jobs), reference, varying, group_key, groups)


def _order_jobs(varying: Mapping[str, object]) -> list[str]:
    first = ("model", "parallelism", "precision")
    return [*(key for key in first if key in varying), *(k for k in varying if k not in first)]


def _short_values(values: Sequence[object]) -> dict[str, str]:
    """Returns each value as names say it: ``bf16_mixed`` is ``bf16`` where nothing else is."""
    whole = [number_format.format_value(item) for item in values]
    cut = {text: text.removesuffix("_mixed").rsplit("/", 1)[-1] for text in whole}
    clear = Counter(text.split("_")[0] for text in whole)
    cuts = Counter(cut.values())
    return {
        text: cut[text] if cuts[cut[text]] == 1 and clear[text.split("_")[0]] == 1 else text
        for text in whole
    }


def _ablation_names(
    runs: Sequence[RunRecord], short: Mapping[str, Mapping[str, str]]
) -> list[str] | None:
    """Returns what each job adds to the one before it; None where that is not one setting each.

    With one that is added, a compiler may go.
    """
    names, seen = ["baseline"], set[str]()
    for before, run in pairwise(runs):
        values = (
            {key: number_format.format_value(r.varied_settings.get(key)) for key in short}
            for r in (before, run)
        )
        old, new = values
        keys = [key for key in short if old[key] != new[key]]
        keys = [key for key in keys if key != "compile" or new[key] != "none"] or keys
        if len(keys) != 1 or seen & set(keys):
            return None
        seen |= set(keys)
        turned_on = new[keys[0]].lower() == "true"
        told = keys[0].rsplit(".", 1)[-1] if turned_on else _value_word(run, keys[0], short)
        names.append(f"+ {told}")
    return names if len(names) > 2 else None


def _job_name(run: RunRecord, short: Mapping[str, Mapping[str, str]]) -> str:
    words = [_value_word(run, key, short) for key in short if key in run.varied_settings]
    return " · ".join(words) or run.name or f"job {run.number}"


def _value_word(run: RunRecord, key: str, short: Mapping[str, Mapping[str, str]]) -> str:
    item = run.varied_settings.get(key)
    text = short[key].get(number_format.format_value(item), number_format.format_value(item))
    bare = isinstance(item, str) and not text.replace(".", "").isdigit()
    return text if bare else f"{key.rsplit('.', 1)[-1]} {text}"


def _color_groups(
    varying: Mapping[str, tuple[object, ...]], short: Mapping[str, Mapping[str, str]]
) -> tuple[str, tuple[str, ...]]:
    """Returns the key whose values colour the curves, with its two to four values."""
    few = [key for key, values in varying.items() if 2 <= len(values) <= 4]
    if not few:
        return "", ()
    key = "precision" if "precision" in few else min(few, key=lambda k: len(varying[k]))
    return key, tuple(short[key].values())


def measured_value(run: RunRecord, key: str) -> float | None:
    """Returns the run's summary of ``key``, ``None`` if missing or not finite."""
    found = run.summary.metrics.get(key) if run.summary else None
    return found if found is not None and math.isfinite(found) else None


def breakdown(
    job: ReportJob, parts: Sequence[StackPart], total: str, rest: StackPart
) -> dict[StackPart, float]:
    """Returns the measured parts of ``total`` and, where positive, what they leave of it."""
    found = {part: size for part in parts if (size := job.measured(part.key)) is not None}
    whole = job.measured(total)
    if found and whole is not None and whole > sum(found.values()):
        found[rest] = whole - sum(found.values())
    return found


def join_forward_backward(parts: Mapping[StackPart, float]) -> dict[StackPart, float]:
    """Returns a step's parts with forward and backward as one, as a pipeline measures them."""
    both = sum(size for part, size in parts.items() if part in (*PASSES, BOTH_PASSES))
    return {part: size for part, size in parts.items() if part not in PASSES} | {BOTH_PASSES: both}


def best_index(
    values: Sequence[float | None], largest: bool, text: Callable[[float | None], str]
) -> int | None:
    """Returns the place of the best value; ``None`` where there is no choice or it reads a tie."""
    known = [number for number in values if number is not None]
    if len(known) < 2:
        return None
    top = max(known) if largest else min(known)
    if sum(text(number) == text(top) for number in known) > 1:
        return None
    return values.index(top)


def loss_distance(job: ReportJob, reference: ReportJob | None) -> MetricSeries | None:
    """Returns |loss - reference's loss| at the steps both measured (``None`` below two)."""
    if reference is None or job is reference:
        return None
    ours, theirs = (j.run.series.get(LOSS, MetricSeries()) for j in (job, reference))
    other = dict(zip(theirs.steps, theirs.values, strict=True))
    pairs = [
        (step, abs(number - other[step]))
        for step, number in zip(ours.steps, ours.values, strict=True)
        if step in other and math.isfinite(number) and math.isfinite(other[step])
    ]
    if len(pairs) < 2:
        return None
    return MetricSeries(tuple(step for step, _ in pairs), tuple(far for _, far in pairs))


def largest_distance(job: ReportJob, reference: ReportJob | None) -> float | None:
    """Returns the largest of :func:`distance`, in nats per token."""
    found = loss_distance(job, reference)
    return max(found.values) if found else None


def finite_series(series: MetricSeries) -> MetricSeries:
    """Returns ``series`` without the steps at which it was not a number."""
    pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    return MetricSeries(tuple(step for step, _ in pairs), tuple(number for _, number in pairs))


def lttb(series: MetricSeries, count: int) -> MetricSeries:
    """Returns at most ``count`` points of a finite ``series`` that keep its look.

    Largest triangle, three buckets (S. Steinarsson, 2013): of each bucket stays the point that
    spans the largest triangle with the point kept before it and the mean of the next bucket.
    The first and the last point always stay.
    """
    size = len(series.steps)
    if size <= count or count < 3:
        return series
    x, y = np.asarray(series.steps, float), np.asarray(series.values, float)
    edges = np.linspace(1, size - 1, count - 1).astype(int)
    kept = [0]
    for place in range(count - 2):
        start, stop = edges[place], edges[place + 1]
        after = slice(stop, edges[place + 2] if place + 2 < len(edges) else size)
        next_x, next_y = x[after].mean(), y[after].mean()
        last = kept[-1]
        area = np.abs(
            (x[last] - next_x) * (y[start:stop] - y[last])
            - (x[last] - x[start:stop]) * (next_y - y[last])
        )
        kept.append(int(start + np.argmax(area)))
    kept.append(size - 1)
    return MetricSeries(tuple(series.steps[i] for i in kept), tuple(series.values[i] for i in kept))
