"""The headings of a page's parts, each the part's finding.

Chosen by thresholds from the numbers; where none holds, the range is stated.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from scalewise.reports import number_format
from scalewise.reports.compare import (
    EQUIVALENT,
    LOSS,
    PEAK,
    SPEED,
    STEP,
    TIME_REST,
    UNTRAINED,
    VALIDATION,
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

NOUNS = {
    "parallelism": "layout",
    "precision": "precision",
    "optimizer": "optimizer",
    "model": "model",
    "adapter": "adapter",
    "quantization": "quantization",
    "schedule": "schedule",
    "seed": "seed",
}


def matrix_heading(comparison: ReportComparison) -> str:
    """Returns what the matrix shows: ``Two layouts by two precisions, three of four jobs ...``."""
    nouns = [
        number_format.pluralize(len(values), NOUNS[key])
        if key in NOUNS
        else f"{number_format.pluralize(len(values), 'value')} of {key}"
        for key, values in comparison.varying.items()
    ]
    cells = len(comparison.jobs)
    begun = (job for job in comparison.jobs if job.run.started is not None)
    ran = sum(job.run.status not in ("not_run", "refused") for job in begun)
    tail = f"all {number_format.pluralize(cells, 'job')} ran" if cells > 1 else "one job ran"
    if ran < cells:
        tail = f"{number_format.number_word(ran)} of {number_format.pluralize(cells, 'job')} ran"
    return number_format.capitalize_first(f"{' by '.join(nouns) or 'nothing'}, {tail}")


def comparison_heading(comparison: ReportComparison) -> str:
    """Returns how far apart the jobs are in speed and memory."""
    said = []
    for key, noun in ((SPEED, "speed"), (PEAK, "peak memory")):
        known = [job.measured(key) or 0 for job in comparison.rank_jobs(key, False)]
        if len(known) > 1 and known[0] > 0:
            spread = known[-1] / known[0]
            far = (
                number_format.format_ratio(spread)
                if spread >= 1.1
                else number_format.format_percent(spread - 1)
            )
            said.append(f"{noun} by {far}" if spread > 1 else f"{noun} not at all")
    if not said:
        finished = len(comparison.finished)
        return number_format.capitalize_first(
            f"{number_format.number_word(finished)} of "
            f"{number_format.pluralize(len(comparison.jobs), 'job')} finished"
        )
    return f"The jobs differ in {' and in '.join(said)}"


def part_shares(
    jobs: Sequence[ReportJob], parts: Sequence[StackPart], total: str, rest: StackPart
) -> dict[StackPart, list[tuple[float, ReportJob]]]:
    """Returns for each part its share of ``total`` in every job that measured both."""
    found: dict[StackPart, list[tuple[float, ReportJob]]] = {}
    for job in jobs:
        whole = job.measured(total)
        for part, size in breakdown(job, parts, total, rest).items():
            if whole:
                found.setdefault(part, []).append((size / whole, job))
    return found


def largest_part(shares: Mapping[StackPart, Sequence[tuple[float, ReportJob]]]) -> StackPart | None:
    """Returns the part that is the largest in every job, if there is one."""
    tops: dict[str, tuple[float, StackPart]] = {}
    for part, rows in shares.items():
        for share, job in rows:
            if share > tops.get(job.name, (0.0, part))[0]:
                tops[job.name] = (share, part)
    firsts = {part for _, part in tops.values()}
    return firsts.pop() if len(firsts) == 1 else None


def _share_range(rows: Sequence[tuple[float, ReportJob]]) -> str:
    low, high = min(rows, key=lambda r: r[0])[0], max(rows, key=lambda r: r[0])[0]
    return number_format.format_range(
        number_format.format_percent(low), number_format.format_percent(high)
    )


_TAKES = {"parameters": "take", "gradients": "take", "activations": "take"}


def _share_verb(part: StackPart, rest: StackPart, total_name: str) -> str:
    label = f"what no {total_name} names" if part is rest else part.label
    label = "the optimizer" if label == "optimizer" else label
    return number_format.capitalize_first(f"{label} {_TAKES.get(part.label, 'takes')}")


def memory_heading(
    shares: Mapping[StackPart, Sequence[tuple[float, ReportJob]]],
    peaks: Sequence[float],
    unit: MemoryUnit,
    rest: StackPart,
) -> str:
    """Returns what fills the memory, or the range of the peaks (bytes, smallest first)."""
    top = largest_part(shares)
    low, high = unit.text(peaks[0]), unit.text(peaks[-1])
    whole = f"peaks run from {low} to {unit.full(peaks[-1])}"
    if low == high:
        whole = f"the peak is {unit.full(peaks[-1])}"
    if top is None:
        return number_format.capitalize_first(whole)
    share = _share_range(shares[top])
    if len(peaks) == 1:
        return f"{_share_verb(top, rest, 'counter')} {share} of the {unit.full(peaks[0])} peak"
    return f"{_share_verb(top, rest, 'counter')} {share} of the peak; {whole}"


def time_heading(shares: Mapping[StackPart, Sequence[tuple[float, ReportJob]]]) -> Markup:
    """Returns where the step goes: a stall where there is one, else the largest part."""
    by_label = {part.label: rows for part, rows in shares.items()}
    single = all(len(rows) == 1 for rows in shares.values())
    for label, limit, command in (
        ("data", 0.10, "Waiting for data takes"),
        (TIME_REST.label, 0.25, "Time outside data, forward, backward and optimizer takes"),
    ):
        rows = by_label.get(label, [])
        worst = max(rows, key=lambda row: row[0], default=None)
        if worst is not None and worst[0] >= limit:
            whose = "the step" if single else Markup("the step of {}").format(worst[1].name)
            return Markup("{} {} of {}").format(
                command, number_format.format_percent(worst[0]), whose
            )
    top = largest_part(shares)
    if top is None:
        return Markup("No one part leads in every job")
    return Markup("{} {} of the step").format(
        _share_verb(top, TIME_REST, "timer"), _share_range(shares[top])
    )


def loss_heading(comparison: ReportComparison) -> Markup:
    """Returns whether the jobs train the same model: distances from the reference, else range."""
    reference = comparison.reference
    known = [
        (far, job)
        for job in comparison.finished
        if (far := largest_distance(job, reference)) is not None
    ]
    order = comparison.rank_jobs(LOSS, False)
    if reference is None or not known or max(known, key=lambda k: k[0])[0] > 0.1:
        return _loss_range(order)
    near = sorted(far for far, _ in known if far <= EQUIVALENT)
    rest = sorted(far for far, _ in known if far > EQUIVALENT)
    said = []
    if near:
        command = "follows" if len(near) == 1 else "follow"
        how = f"to within {number_format.format_power(near[-1])}" if near[-1] else "exactly"
        said.append(
            Markup("{} {} {} {}").format(
                number_format.pluralize(len(near), "job"), command, reference.name, how
            )
        )
    if rest:
        span = number_format.format_power(rest[-1])
        if number_format.format_power(rest[0]) != span:
            span = f"{number_format.format_power(rest[0])} to {span}"
        whose = "" if near else Markup(" from {}").format(reference.name)
        command = "strays" if len(rest) == 1 else "stray"
        said.append(
            Markup("{} {} {}{}").format(
                number_format.pluralize(len(rest), "job"), command, span, whose
            )
        )
    text = Markup("; ").join(said)
    return Markup("{}{}").format(text[:1].upper(), text[1:])


def _loss_range(order: Sequence[ReportJob]) -> Markup:
    if not order:
        return Markup("No job reached its last step")
    low, high = order[0], order[-1]
    if len(order) == 1 or low.measured(LOSS) == high.measured(LOSS):
        return Markup("Train loss ends at {}").format(number_format.format_loss(low.measured(LOSS)))
    return Markup("Train loss ends between {}, {}, and {}, {}").format(
        number_format.format_loss(low.measured(LOSS)),
        low.name,
        number_format.format_loss(high.measured(LOSS)),
        high.name,
    )


def loss_heading_of_one(job: ReportJob) -> str:
    """Returns where the loss went, from its first measured step to its last."""
    curve = job.run.series.get(LOSS, MetricSeries())
    clean = finite_series(curve)
    if len(clean.values) < len(curve.values):
        broken = next(s for s, v in zip(curve.steps, curve.values, strict=True) if v - v != 0)
        return f"Train loss stops being a number at step {broken:,}"
    if not clean.values:
        return "No step wrote a loss"
    first, last = clean.values[0], clean.values[-1]
    way = "falls" if last < first else "rises" if last > first else "stays"
    ends = f"from {number_format.format_loss(first)} to {number_format.format_loss(last)}"
    said = f"Train loss {way} {ends}"
    validation, untrained = job.measured(VALIDATION), job.measured(UNTRAINED)
    if validation is None:
        return said
    begins = (
        "ends at" if untrained is None else f"goes from {number_format.format_loss(untrained)} to"
    )
    return f"{said}, validation {begins} {number_format.format_loss(validation)}"


def throughput_heading(speeds: Sequence[float]) -> str:
    """Returns the range that nine of ten steps keep to (tokens per second, any order)."""
    order = sorted(speeds)
    low, high = order[round(0.05 * (len(order) - 1))], order[round(0.95 * (len(order) - 1))]
    ends = number_format.format_whole(low), number_format.format_whole(high)
    return f"Nine steps in ten run at {number_format.format_range(*ends)} tok/s"


def trade_heading(comparison: ReportComparison) -> Markup:
    """Returns the jobs that are worth having."""
    front = comparison.pareto_front
    if len(front) == 1:
        return Markup("{} beats the rest on time and memory").format(front[0].name)
    if len(front) > 4:
        both = sum(
            job.measured(STEP) is not None and job.measured(PEAK) is not None
            for job in comparison.finished
        )
        return Markup("{} of {} jobs are worth having").format(len(front), both)
    said = number_format.capitalize_first(number_format.pluralize(len(front), "job"))
    return Markup("{} are worth having: {}").format(said, Markup(", ").join(j.name for j in front))


def failed_heading(comparison: ReportComparison) -> str:
    """Returns how the jobs that did not finish, or the one run, ended."""
    ended = sorted(Counter(job.run.status for job in comparison.unfinished).items())
    if comparison.reference is None:
        return f"The run {''.join(_outcome_heading(status, 1) for status, _ in ended)}"
    said = [
        f"{number_format.number_word(count)} {_outcome_heading(status, count)}"
        for status, count in ended[1:]
    ]
    first = [
        f"{number_format.pluralize(n, 'job')} {_outcome_heading(status, n)}"
        for status, n in ended[:1]
    ]
    return number_format.capitalize_first(", ".join(first + said))


def _outcome_heading(status: str, count: int) -> str:
    verbs = {"out_of_memory": "ran out of memory", "timeout": "ran out of time", "failed": "failed"}
    return verbs.get(status, f"{'was' if count == 1 else 'were'} {status_word(status)}")
