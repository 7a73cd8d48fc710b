"""Comparison of the jobs of a sweep: names, ranking, Pareto front and loss differences."""

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
PREDICTED_PEAK = "plan/peak_bytes"
PREDICTED_STEP = "plan/step_s"
PREDICTED_KEYS = {PEAK: PREDICTED_PEAK, STEP: PREDICTED_STEP}
"""Key of the predicted value, by key of the measured one."""
PRICE = "price/dollars_per_billion_tokens"
LOSS = "train/loss"
VALIDATION_LOSS = "val/loss"
UNTRAINED_LOSS = "val/loss_first"
PREFERENCE_ACCURACY = "val/reward_accuracy"
CHANCE_ACCURACY = 0.5
"""Preference accuracy of an untrained model, which equals its reference model."""
REWARD = "val/reward"
ACCURACY = "val/accuracy"

EQUIVALENCE_BOUND = 1e-5
"""Loss difference in nats per token that is explained by floating-point summation order."""

MAX_CHARTED_JOBS = 24
"""Jobs with their own mark or label in a chart; of more, a selection is charted."""


@dataclass(frozen=True)
class StackPart:
    """A segment of a stacked bar."""

    key: str
    """Metric key; empty for the remainder."""
    label: str
    """Name in the legend."""
    color: str
    """CSS variable."""


MEMORY = (
    StackPart("memory/parameters_bytes", "parameters", "--m-params"),
    StackPart("memory/gradients_bytes", "gradients", "--m-grads"),
    StackPart("memory/optimizer_bytes", "optimizer", "--m-opt"),
    StackPart("memory/activations_bytes", "activations", "--m-act"),
)
MEMORY_REST = StackPart("", "other", "--m-other")
FORWARD_BACKWARD_PARTS = (
    StackPart("time/forward_s", "forward", "--t-fwd"),
    StackPart("time/backward_s", "backward", "--t-bwd"),
)
FORWARD_BACKWARD = StackPart("time/forward_backward_s", "forward + backward", "--t-both")
TIME = (
    StackPart("time/data_s", "data", "--t-data"),
    *FORWARD_BACKWARD_PARTS,
    FORWARD_BACKWARD,
    StackPart("time/optimizer_s", "optimizer", "--t-opt"),
)
TIME_REST = StackPart("", "other, idle", "--t-idle")


@dataclass(frozen=True, eq=False)
class ReportJob:
    """A run with its name in the report."""

    run: RunRecord
    """Record of the run."""
    name: str
    """Name, composed of the varied values."""
    group: int = 0
    """Index into :attr:`ReportComparison.groups`, which sets the color."""

    def measured(self, key: str) -> float | None:
        """Measured value of ``key``; ``None`` if missing or not finite."""
        return measured_value(self.run, key)

    def predicted(self, key: str) -> float | None:
        """Predicted value of ``key``, the peak memory or the step time."""
        summary_value = measured_value(self.run, PREDICTED_KEYS[key])
        return (
            self.run.predicted.get(PREDICTED_KEYS[key]) if summary_value is None else summary_value
        )

    def prediction_error(self, key: str) -> float | None:
        """Relative error of the prediction, (predicted - measured) / measured."""
        predicted, measured = self.predicted(key), self.measured(key)
        return predicted / measured - 1 if predicted is not None and measured else None


def is_preference(jobs: Iterable[ReportJob]) -> bool:
    """Whether all jobs train with a preference objective, whose loss is per pair."""
    return {job.run.choices.get("objective") for job in jobs} == {"dpo"}


@dataclass(frozen=True)
class ReportComparison:
    """The jobs of a sweep, or the single job of a run."""

    jobs: tuple[ReportJob, ...]
    """All jobs."""
    reference: ReportJob | None
    """Job with which the others are compared; ``None`` for a single run."""
    varying: Mapping[str, tuple[object, ...]]
    """Values of each varied setting."""
    group_key: str
    """Setting that sets the color of a curve; empty if none does."""
    groups: tuple[str, ...]
    """Values of ``group_key``."""

    @cached_property
    def finished(self) -> tuple[ReportJob, ...]:
        """Jobs with status ``ok``."""
        return tuple(job for job in self.jobs if job.run.ok)

    @cached_property
    def unfinished(self) -> tuple[ReportJob, ...]:
        """Jobs that failed or were interrupted; not those pruned, running or waiting."""
        excluded = ("ok", "pruned", "running", "not_run")
        return tuple(job for job in self.jobs if job.run.status not in excluded)

    @cached_property
    def is_oversubscribed(self) -> bool:
        """Whether CPU jobs overlapped in time on one machine and slowed each other."""
        spans = sorted(
            (job.run.started, job.run.ended)
            for job in self.finished
            if job.run.started and job.run.ended and job.run.machine.get("device") == "cpu"
        )
        return any(later[0] < earlier[1] for earlier, later in pairwise(spans))

    def rank_jobs(self, key: str, largest_first: bool) -> list[ReportJob]:
        """Finished jobs that measured ``key``, sorted by it."""
        values = [(job.measured(key), job) for job in self.finished]
        measured = [(value, job) for value, job in values if value is not None]
        return [job for _, job in sorted(measured, key=lambda p: p[0], reverse=largest_first)]

    @cached_property
    def headline_metric(self) -> tuple[str, bool]:
        """Metric that sorts the jobs, and whether the largest value comes first."""
        for key, largest_first in ((SPEED, True), (STEP, False), (LOSS, False)):
            if self.rank_jobs(key, largest_first):
                return key, largest_first
        return SPEED, True

    @cached_property
    def pareto_front(self) -> tuple[ReportJob, ...]:
        """Pareto front of step time and peak memory, fastest job first."""
        return self.find_pareto_front(STEP, PEAK)

    def find_pareto_front(self, one: str, other: str) -> tuple[ReportJob, ...]:
        """Pareto front of the finished jobs for two metrics that are to be minimized."""
        front: list[ReportJob] = []
        for job in sorted(
            (j for j in self.rank_jobs(one, False) if j.measured(other) is not None),
            key=lambda j: (j.measured(one), j.measured(other)),
        ):
            if not front or (job.measured(other) or 0) < (front[-1].measured(other) or 0):
                front.append(job)
        return tuple(front)

    @cached_property
    def charted_jobs(self) -> tuple[ReportJob, ...]:
        """Jobs shown in charts: all, or the Pareto front, the failures and the best."""
        if len(self.jobs) <= MAX_CHARTED_JOBS:
            return self.jobs
        first = [self.reference] if self.reference is not None else []
        first += self.pareto_front[: MAX_CHARTED_JOBS // 2]
        first += _drawable_jobs(self.unfinished)[: MAX_CHARTED_JOBS // 4]
        first += self.rank_jobs(*self.headline_metric)
        selected = set(list(dict.fromkeys(first))[:MAX_CHARTED_JOBS])
        return tuple(job for job in self.jobs if job in selected)


def _drawable_jobs(jobs: Sequence[ReportJob]) -> list[ReportJob]:
    return [job for job in jobs if job.run.summary or LOSS in job.run.series]


def compare_run(run: RunRecord) -> ReportComparison:
    """Comparison of a single run, without a reference."""
    return ReportComparison((ReportJob(run, run.name),), None, {}, "", ())


def compare_sweep(sweep: SweepRecord) -> ReportComparison:
    """Comparison of the jobs of ``sweep``; the default reference is the first job."""
    varying = {key: sweep.varying[key] for key in _order_keys(sweep.varying)}
    short = {key: _short_values(values) for key, values in varying.items()}
    group_key, groups = _color_groups(varying, short)
    names = _ablation_names(sweep.jobs, short) or [_job_name(run, short) for run in sweep.jobs]
    duplicates = {name for name, count in Counter(names).items() if count > 1}
    jobs = []
    for run, name in zip(sweep.jobs, names, strict=True):
        value = short.get(group_key, {}).get(
            number_format.format_value(run.varied_settings.get(group_key)), ""
        )
        group = groups.index(value) if value in groups else 0
        jobs.append(ReportJob(run, f"{name} #{run.number}" if name in duplicates else name, group))
    reference = jobs[sweep.reference or 0] if jobs else None
    return ReportComparison(tuple(jobs), reference, varying, group_key, groups)


def _order_keys(varying: Mapping[str, object]) -> list[str]:
    first = ("model", "parallelism", "precision")
    return [*(key for key in first if key in varying), *(k for k in varying if k not in first)]


def _short_values(values: Sequence[object]) -> dict[str, str]:
    """Short form of each value, where unambiguous: ``bf16`` for ``bf16_mixed``."""
    texts = [number_format.format_value(item) for item in values]
    short = {text: text.removesuffix("_mixed").rsplit("/", 1)[-1] for text in texts}
    prefix_counts = Counter(text.split("_")[0] for text in texts)
    short_counts = Counter(short.values())
    return {
        text: short[text]
        if short_counts[short[text]] == 1 and prefix_counts[text.split("_")[0]] == 1
        else text
        for text in texts
    }


def _ablation_names(
    runs: Sequence[RunRecord], short: Mapping[str, Mapping[str, str]]
) -> list[str] | None:
    """Names of ablation steps; ``None`` unless each job adds one setting to the job before it.

    A step may also disable ``compile``.
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
        added = keys[0].rsplit(".", 1)[-1] if turned_on else _value_word(run, keys[0], short)
        names.append(f"+ {added}")
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
    """Setting that sets the color of the curves, with its two to four values."""
    candidates = [key for key, values in varying.items() if 2 <= len(values) <= 4]
    if not candidates:
        return "", ()
    if "precision" in candidates:
        key = "precision"
    else:
        key = min(candidates, key=lambda k: len(varying[k]))
    return key, tuple(short[key].values())


def measured_value(run: RunRecord, key: str) -> float | None:
    """Value of ``key`` in the run's summary; ``None`` if missing or not finite."""
    value = run.summary.metrics.get(key) if run.summary else None
    return value if value is not None and math.isfinite(value) else None


def breakdown(
    job: ReportJob, parts: Sequence[StackPart], total: str, rest: StackPart
) -> dict[StackPart, float]:
    """Measured parts of ``total``, and the remainder ``rest`` if it is positive."""
    sizes = {part: size for part in parts if (size := job.measured(part.key)) is not None}
    total_size = job.measured(total)
    if sizes and total_size is not None and total_size > sum(sizes.values()):
        sizes[rest] = total_size - sum(sizes.values())
    return sizes


def join_forward_backward(parts: Mapping[StackPart, float]) -> dict[StackPart, float]:
    """Parts of a step with forward and backward merged, as pipeline parallelism measures them."""
    merged = sum(
        size for part, size in parts.items() if part in (*FORWARD_BACKWARD_PARTS, FORWARD_BACKWARD)
    )
    return {part: size for part, size in parts.items() if part not in FORWARD_BACKWARD_PARTS} | {
        FORWARD_BACKWARD: merged
    }


def best_index(
    values: Sequence[float | None], largest: bool, text: Callable[[float | None], str]
) -> int | None:
    """Index of the best value; ``None`` below two values or if the formatted best ties."""
    finite_values = [number for number in values if number is not None]
    if len(finite_values) < 2:
        return None
    best = max(finite_values) if largest else min(finite_values)
    if sum(text(number) == text(best) for number in finite_values) > 1:
        return None
    return values.index(best)


def loss_distance(job: ReportJob, reference: ReportJob | None) -> MetricSeries | None:
    """|loss - loss of the reference| at common steps; ``None`` below two such steps."""
    if reference is None or job is reference:
        return None
    own, base = (j.run.series.get(LOSS, MetricSeries()) for j in (job, reference))
    base_values = dict(zip(base.steps, base.values, strict=True))
    pairs = [
        (step, abs(number - base_values[step]))
        for step, number in zip(own.steps, own.values, strict=True)
        if step in base_values and math.isfinite(number) and math.isfinite(base_values[step])
    ]
    if len(pairs) < 2:
        return None
    return MetricSeries(tuple(step for step, _ in pairs), tuple(distance for _, distance in pairs))


def largest_distance(job: ReportJob, reference: ReportJob | None) -> float | None:
    """Maximum of :func:`loss_distance`, in nats per token."""
    distances = loss_distance(job, reference)
    return max(distances.values) if distances else None


def finite_series(series: MetricSeries) -> MetricSeries:
    """``series`` without non-finite values."""
    pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    return MetricSeries(tuple(step for step, _ in pairs), tuple(number for _, number in pairs))


def lttb(series: MetricSeries, count: int) -> MetricSeries:
    """Downsample a finite ``series`` to at most ``count`` points (LTTB).

    Largest triangle, three buckets (S. Steinarsson, 2013): each bucket keeps the point that spans
    the largest triangle with the previously kept point and the mean of the next bucket. The first
    and the last point are always kept.
    """
    size = len(series.steps)
    if size <= count or count < 3:
        return series
    x, y = np.asarray(series.steps, float), np.asarray(series.values, float)
    edges = np.linspace(1, size - 1, count - 1).astype(int)
    selected = [0]
    for bucket in range(count - 2):
        start, stop = edges[bucket], edges[bucket + 1]
        after = slice(stop, edges[bucket + 2] if bucket + 2 < len(edges) else size)
        next_x, next_y = x[after].mean(), y[after].mean()
        last = selected[-1]
        area = np.abs(
            (x[last] - next_x) * (y[start:stop] - y[last])
            - (x[last] - x[start:stop]) * (next_y - y[last])
        )
        selected.append(int(start + np.argmax(area)))
    selected.append(size - 1)
    return MetricSeries(
        tuple(series.steps[i] for i in selected), tuple(series.values[i] for i in selected)
    )
