"""Building blocks of the chart sections, and texts that several sections share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from scalewise.reports import number_format, summary_sentences
from scalewise.reports.chart_layout import ChartPicture
from scalewise.reports.compare import (
    EQUIVALENCE_BOUND,
    LOSS,
    MAX_CHARTED_JOBS,
    PEAK,
    SPEED,
    STEP,
    TIME_REST,
    UNTRAINED_LOSS,
    VALIDATION_LOSS,
    ReportComparison,
    ReportJob,
    StackPart,
    breakdown,
    finite_series,
    largest_distance,
)
from scalewise.reports.number_format import MemoryUnit
from scalewise.reports.records import MetricSeries
from scalewise.reports.summary_sentences import status_word
from scalewise.reports.wandb_panels import TitledPanel


@dataclass(frozen=True)
class ChartPanel:
    """A chart with its title."""

    title: str
    """Title in bold."""
    detail: str
    """Unit and scope, after the title."""
    picture: ChartPicture
    """The chart."""


@dataclass(frozen=True)
class NumbersTable:
    """The values of a chart as a table."""

    corner: str
    """Heading of the first column."""
    heads: tuple[str, ...]
    """Headings of the other columns."""
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """Row name and cells."""


@dataclass(frozen=True)
class ReportSection:
    """A report section with charts."""

    anchor: str
    """Id of the section's HTML element."""
    topic: str
    """First words of the heading, the same in every report."""
    finding: str
    """Heading after the topic, chosen from the numbers."""
    panels: tuple[ChartPanel, ...]
    """Charts of the HTML page."""
    key: tuple[tuple[str, str], ...] = ()
    """Legend: CSS color variable or shape, and label."""
    notes: tuple[str | Markup, ...] = ()
    """Findings next to the charts."""
    numbers: NumbersTable | None = None
    """Values of the charts."""
    explanation: tuple[str | Markup, ...] = ()
    """Notes on how to read the charts."""
    bullets: tuple[str | Markup, ...] = ()
    """Bulleted findings above the charts."""
    wandb_panels: tuple[TitledPanel, ...] = ()
    """Panels of the W&B report, in place of ``panels``."""


def charted_jobs_text(comparison: ReportComparison, charted: Sequence[ReportJob]) -> str:
    """Note on the charted jobs, if a chart cannot show all; else empty."""
    total = len(comparison.jobs)
    if total <= MAX_CHARTED_JOBS:
        return ""
    return f"; {len(charted)} of {total} jobs: the Pareto front, then the fastest"


def missing_jobs_note(comparison: ReportComparison, charted: Sequence[ReportJob]) -> list[str]:
    """Note on the jobs without a measurement to chart; empty if there are none."""
    if len(comparison.jobs) > MAX_CHARTED_JOBS:
        return []
    missing = [job for job in comparison.jobs if job not in charted and job.run.status != "not_run"]
    if not missing:
        return []
    names = [f"{job.name} ({summary_sentences.status_word(job.run.status)})" for job in missing]
    return [f"No measurement, not charted: {'; '.join(names)}."]


def window_note(jobs: Sequence[ReportJob]) -> str:
    """Steps and statistic behind the reported medians; empty if the jobs differ in them."""
    windows = {job.run.summary.window for job in jobs if job.run.summary and job.run.summary.window}
    return windows.pop().replace("-", "\u2013") if len(windows) == 1 else ""


NOUNS = {
    "parallelism": "parallelism strategy",
    "precision": "precision",
    "optimizer": "optimizer",
    "model": "model",
    "adapter": "adapter",
    "quantization": "quantization",
    "schedule": "schedule",
    "seed": "seed",
}


MAX_NAMED_SETTINGS = 3
"""Maximum number of varied settings that a heading names."""


def matrix_heading(comparison: ReportComparison) -> str:
    """Varied settings and number of jobs run: ``Two models, all four jobs ran``."""
    nouns = [
        number_format.pluralize(len(values), NOUNS[key])
        if key in NOUNS
        else f"{number_format.pluralize(len(values), 'value')} of {key}"
        for key, values in comparison.varying.items()
    ]
    num_jobs = len(comparison.jobs)
    started_jobs = (job for job in comparison.jobs if job.run.started is not None)
    num_ran = sum(job.run.status not in ("not_run", "refused") for job in started_jobs)
    ran_text = (
        f"all {number_format.pluralize(num_jobs, 'job')} ran" if num_jobs > 1 else "one job ran"
    )
    if num_ran < num_jobs:
        total = number_format.pluralize(num_jobs, "job")
        ran_text = f"{number_format.number_word(num_ran)} of {total} ran"
    grid = f" {number_format.TIMES} ".join(nouns) or "no varied setting"
    if len(nouns) > MAX_NAMED_SETTINGS:
        grid = number_format.pluralize(len(nouns), "varied setting")
    return number_format.capitalize_first(f"{grid}, {ran_text}")


def comparison_heading(comparison: ReportComparison) -> str:
    """Ratio of the largest to the smallest throughput and peak memory."""
    findings = []
    for key, noun in ((SPEED, "throughput"), (PEAK, "peak memory")):
        values = [job.measured(key) or 0 for job in comparison.rank_jobs(key, False)]
        if len(values) > 1 and values[0] > 0:
            spread = values[-1] / values[0]
            ratio_text = (
                number_format.format_ratio(spread)
                if spread >= 1.1
                else number_format.format_percent(spread - 1)
            )
            findings.append(
                f"{noun} varies by {ratio_text}" if spread > 1 else f"{noun} does not vary"
            )
    if not findings:
        finished = len(comparison.finished)
        return number_format.capitalize_first(
            f"{number_format.number_word(finished)} of "
            f"{number_format.pluralize(len(comparison.jobs), 'job')} finished"
        )
    return number_format.capitalize_first(" and ".join(findings))


def part_shares(
    jobs: Sequence[ReportJob], parts: Sequence[StackPart], total: str, rest: StackPart
) -> dict[StackPart, list[tuple[float, ReportJob]]]:
    """Share of ``total`` of each part, for each job that measured both."""
    shares: dict[StackPart, list[tuple[float, ReportJob]]] = {}
    for job in jobs:
        total_value = job.measured(total)
        for part, size in breakdown(job, parts, total, rest).items():
            if total_value:
                shares.setdefault(part, []).append((size / total_value, job))
    return shares


def largest_part(shares: Mapping[StackPart, Sequence[tuple[float, ReportJob]]]) -> StackPart | None:
    """Part with the largest share in every job; ``None`` if the jobs differ."""
    largest: dict[str, tuple[float, StackPart]] = {}
    for part, rows in shares.items():
        for share, job in rows:
            if share > largest.get(job.name, (0.0, part))[0]:
                largest[job.name] = (share, part)
    distinct = {part for _, part in largest.values()}
    return distinct.pop() if len(distinct) == 1 else None


def _share_range(rows: Sequence[tuple[float, ReportJob]]) -> str:
    low, high = min(rows, key=lambda r: r[0])[0], max(rows, key=lambda r: r[0])[0]
    return number_format.format_range(
        number_format.format_percent(low), number_format.format_percent(high)
    )


_VERBS = {"parameters": "take", "gradients": "take", "activations": "take"}


def _share_text(part: StackPart, rest: StackPart, total_name: str) -> str:
    label = f"unattributed {total_name}" if part is rest else part.label
    label = "the optimizer" if label == "optimizer" else label
    return number_format.capitalize_first(f"{label} {_VERBS.get(part.label, 'takes')}")


def memory_heading(
    shares: Mapping[StackPart, Sequence[tuple[float, ReportJob]]],
    peaks: Sequence[float],
    unit: MemoryUnit,
    rest: StackPart,
) -> str:
    """Largest part of the peak, or the range of ``peaks`` (bytes, ascending)."""
    top = largest_part(shares)
    low, high = unit.text(peaks[0]), unit.text(peaks[-1])
    peak_range = f"peaks range from {low} to {unit.full(peaks[-1])}"
    if low == high:
        peak_range = f"the peak is {unit.full(peaks[-1])}"
    if top is None:
        return number_format.capitalize_first(peak_range)
    share = _share_range(shares[top])
    if len(peaks) == 1:
        return f"{_share_text(top, rest, 'memory')} {share} of the {unit.full(peaks[0])} peak"
    return f"{_share_text(top, rest, 'memory')} {share} of the peak; {peak_range}"


def time_heading(shares: Mapping[StackPart, Sequence[tuple[float, ReportJob]]]) -> Markup:
    """Largest part of the step, or a stall if its share is above a threshold."""
    by_label = {part.label: rows for part, rows in shares.items()}
    single = all(len(rows) == 1 for rows in shares.values())
    for label, limit, subject in (
        ("data", 0.10, "Waiting for data takes"),
        (TIME_REST.label, 0.25, "Time outside data, forward, backward and optimizer takes"),
    ):
        rows = by_label.get(label, [])
        worst = max(rows, key=lambda row: row[0], default=None)
        if worst is not None and worst[0] >= limit:
            step_text = "the step" if single else Markup("the step of {}").format(worst[1].name)
            return Markup("{} {} of {}").format(
                subject, number_format.format_percent(worst[0]), step_text
            )
    top = largest_part(shares)
    if top is None:
        return Markup("No single part is the largest in every job")
    return Markup("{} {} of the step").format(
        _share_text(top, TIME_REST, "time"), _share_range(shares[top])
    )


def loss_heading(comparison: ReportComparison) -> Markup:
    """Largest loss difference from the reference, else the range of final losses."""
    reference = comparison.reference
    distances = [
        (distance, job)
        for job in comparison.finished
        if (distance := largest_distance(job, reference)) is not None
    ]
    order = comparison.rank_jobs(LOSS, False)
    if reference is None or not distances or max(distances, key=lambda k: k[0])[0] > 0.1:
        return _loss_range(order)
    close = sorted(distance for distance, _ in distances if distance <= EQUIVALENCE_BOUND)
    rest = sorted(distance for distance, _ in distances if distance > EQUIVALENCE_BOUND)
    findings = []
    if close:
        verb = "matches" if len(close) == 1 else "match"
        extent = f"within {number_format.format_power(close[-1])}" if close[-1] else "exactly"
        findings.append(
            Markup("{} {} {} {}").format(
                number_format.pluralize(len(close), "job"), verb, reference.name, extent
            )
        )
    if rest:
        range_text = number_format.format_power(rest[-1])
        if number_format.format_power(rest[0]) != range_text:
            range_text = f"{number_format.format_power(rest[0])} to {range_text}"
        from_text = "" if close else Markup(" from {}").format(reference.name)
        verb = "differs by" if len(rest) == 1 else "differ by"
        findings.append(
            Markup("{} {} {}{}").format(
                number_format.pluralize(len(rest), "job"), verb, range_text, from_text
            )
        )
    text = Markup("; ").join(findings)
    return Markup("{}{}").format(text[:1].upper(), text[1:])


def _loss_range(order: Sequence[ReportJob]) -> Markup:
    if not order:
        return Markup("No job finished with a measured loss")
    low, high = order[0], order[-1]
    if len(order) == 1 or low.measured(LOSS) == high.measured(LOSS):
        return Markup("Final train loss is {}").format(
            number_format.format_loss(low.measured(LOSS))
        )
    return Markup("Final train loss ranges from {} ({}) to {} ({})").format(
        number_format.format_loss(low.measured(LOSS)),
        low.name,
        number_format.format_loss(high.measured(LOSS)),
        high.name,
    )


def loss_heading_of_one(job: ReportJob) -> str:
    """First and last loss of a run."""
    curve = job.run.series.get(LOSS, MetricSeries())
    clean = finite_series(curve)
    if len(clean.values) < len(curve.values):
        first_bad = next(s for s, v in zip(curve.steps, curve.values, strict=True) if v - v != 0)
        return f"Train loss becomes non-finite at step {first_bad:,}"
    if not clean.values:
        return "No train loss was recorded"
    first, last = clean.values[0], clean.values[-1]
    verb = "falls" if last < first else "rises" if last > first else "stays"
    start = f"from {number_format.format_loss(first)} to" if last != first else "at"
    text = f"Train loss {verb} {start} {number_format.format_loss(last)}"
    validation, untrained = job.measured(VALIDATION_LOSS), job.measured(UNTRAINED_LOSS)
    if validation is None:
        return text
    change = (
        "ends at" if untrained is None else f"goes from {number_format.format_loss(untrained)} to"
    )
    return f"{text}, validation loss {change} {number_format.format_loss(validation)}"


def throughput_heading(speeds: Sequence[float]) -> str:
    """Range of the throughput of 90% of the steps (``speeds`` in tokens/s, in any order)."""
    order = sorted(speeds)
    low, high = order[round(0.05 * (len(order) - 1))], order[round(0.95 * (len(order) - 1))]
    ends = number_format.format_whole(low), number_format.format_whole(high)
    return f"90% of the steps run at {number_format.format_range(*ends)} tok/s"


def trade_heading(comparison: ReportComparison) -> Markup:
    """Jobs on the Pareto front of step time and peak memory."""
    front = comparison.pareto_front
    if len(front) == 1:
        return Markup("{} has the lowest step time and peak memory").format(front[0].name)
    if len(front) > 4:
        num_measured = sum(
            job.measured(STEP) is not None and job.measured(PEAK) is not None
            for job in comparison.finished
        )
        return Markup("{} of {} jobs are Pareto-optimal").format(len(front), num_measured)
    count = number_format.capitalize_first(number_format.pluralize(len(front), "job"))
    names = Markup(", ").join(job.name for job in front)
    return Markup("{} are Pareto-optimal: {}").format(count, names)


def failed_heading(comparison: ReportComparison) -> str:
    """Number of unfinished jobs by status, or the status of a single run."""
    counts = sorted(Counter(job.run.status for job in comparison.unfinished).items())
    if comparison.reference is None:
        return f"The run {''.join(_outcome_heading(status, 1) for status, _ in counts)}"
    rest = [
        f"{number_format.number_word(count)} {_outcome_heading(status, count)}"
        for status, count in counts[1:]
    ]
    first = [
        f"{number_format.pluralize(n, 'job')} {_outcome_heading(status, n)}"
        for status, n in counts[:1]
    ]
    return number_format.capitalize_first(", ".join(first + rest))


def _outcome_heading(status: str, count: int) -> str:
    verbs = {"out_of_memory": "ran out of memory", "timeout": "timed out", "failed": "failed"}
    return verbs.get(status, f"{'was' if count == 1 else 'were'} {status_word(status)}")
