"""Memory and step-time sections: stacked bars of measured parts with predicted totals."""

from collections.abc import Callable, Sequence

from markupsafe import Markup

from scalewise.reports import charts, number_format, sections, summary_sentences
from scalewise.reports.chart_layout import draw_both_widths
from scalewise.reports.charts import BarSegment, StackedBar
from scalewise.reports.compare import (
    FORWARD_BACKWARD,
    MEMORY,
    MEMORY_REST,
    PEAK,
    STEP,
    TIME,
    TIME_REST,
    ReportComparison,
    ReportJob,
    StackPart,
    breakdown,
    join_forward_backward,
)
from scalewise.reports.number_format import MemoryUnit
from scalewise.reports.sections import (
    ChartPanel,
    NumbersTable,
    ReportSection,
    charted_jobs_text,
    missing_jobs_note,
    window_note,
)
from scalewise.reports.wandb_panels import BarsPanel, CurvesPanel, SummaryNumber, TitledPanel

MAX_LIMIT_RATIO = 1.35
"""Largest ratio of the memory limit to the largest peak at which the limit is drawn."""


def _prediction_error_text(
    jobs: Sequence[ReportJob], key: str, format_number: Callable[[float], str], noun: str
) -> str | None:
    """Largest relative error of the predictions; ``None`` without a prediction."""
    errors = [
        (error, job)
        for job in jobs
        if job.run.ok and (error := job.prediction_error(key)) is not None
    ]
    if not errors:
        return None
    worst = number_format.format_percent(max(abs(error) for error, _ in errors))
    if len(errors) == 1:
        predicted = errors[0][1].predicted(key) or 0
        return f"Predicted {noun}: {format_number(predicted)}, error {worst}."
    return f"Predicted vs. measured {noun}: the largest error is {worst}."


def _common_limit(jobs: Sequence[ReportJob], unit: MemoryUnit) -> tuple[float, str] | None:
    """Memory limit with its label, if all jobs share it and it is close to the peaks."""
    limits = {job.run.predicted.get("limit_bytes") for job in jobs}
    limit = limits.pop() if len(limits) == 1 else None
    tops = [size for job in jobs for size in (job.measured(PEAK), job.predicted(PEAK)) if size]
    if limit is None or not tops or limit > MAX_LIMIT_RATIO * max(tops):
        return None
    return limit / unit.size, f"limit {unit.full(limit)}"


def memory_section(comparison: ReportComparison, unit: MemoryUnit) -> ReportSection | None:
    """Memory section, largest peak first; ``None`` if no job measured memory."""
    jobs = sorted(comparison.charted_jobs, key=lambda j: -(j.measured(PEAK) or 0))
    stack = _stacked_bar(
        comparison,
        jobs,
        MEMORY,
        MEMORY_REST,
        PEAK,
        scale=1 / unit.size,
        text=unit.text,
        unit=unit.name,
    )
    peaks = sorted(p for job in comparison.jobs if (p := job.measured(PEAK)) is not None)
    if stack is None or not peaks:
        return None
    charted, bars, key, table = stack
    shares = sections.part_shares(comparison.jobs, MEMORY, PEAK, MEMORY_REST)
    notes: list[str | Markup] = []
    explanation = [
        "Blue: model state. Ochre: activations. Grey: the rest of the peak, such as buffers, "
        "workspace and memory reserved by the allocator."
    ]
    out_of_memory = [
        (job, predicted)
        for job in jobs
        if job not in charted
        and job.run.status == "out_of_memory"
        and (predicted := job.predicted(PEAK))
    ]
    for job, predicted in out_of_memory:
        tip = f"{job.name}: {unit.full(predicted)} predicted"
        segment = BarSegment("--faint", predicted / unit.size, tip)
        status = summary_sentences.status_word(job.run.status)
        bars.insert(0, StackedBar(job.name, (segment,), status))
    if out_of_memory:
        explanation.append("Pale bar: predicted peak of a job that ran out of memory.")
    state = [
        (sum(size for part, size in breakdown(j, MEMORY[:3], "", MEMORY_REST).items()), j)
        for j in charted
    ]
    low, high = min(state, key=lambda s: s[0]), max(state, key=lambda s: s[0])
    if len(charted) == 1:
        notes.append(f"Parameters, gradients and optimizer state take {unit.full(low[0])}.")
    elif unit.text(low[0]) == unit.text(high[0]):
        notes.append(
            f"Parameters, gradients and optimizer state take {unit.full(low[0])} in every job."
        )
    else:
        notes.append(
            Markup("<b>Model state</b> takes {} in {} and {} in {}.").format(
                unit.full(high[0]), high[1].name, unit.full(low[0]), low[1].name
            )
        )
    if error_text := _prediction_error_text(comparison.jobs, PEAK, unit.full, "peak memory"):
        notes.append(error_text)
    unfinished = [job.name for job in charted if not job.run.ok]
    if unfinished and len(charted) > 1:
        notes.append(f"Unfinished, charted up to the last measurement: {', '.join(unfinished)}.")
    notes += missing_jobs_note(comparison, [*charted, *(job for job, _ in out_of_memory)])
    is_distributed = any(job.run.world_size > 1 for job in charted)
    title = "Peak memory of the worst rank" if is_distributed else "Peak memory"
    count = number_format.pluralize(len(charted), "job")
    sentence = f"Stacked bars: peak memory of {count} by component."
    detail = f"{unit.name}{charted_jobs_text(comparison, charted)}"
    return ReportSection(
        "memory",
        "Memory",
        sections.memory_heading(shares, peaks, unit, MEMORY_REST),
        (
            _bars_panel(
                title, detail, bars, "memory", sentence, _common_limit(comparison.jobs, unit)
            ),
        ),
        key,
        tuple(notes),
        table,
        tuple(explanation),
        wandb_panels=_memory_panels(comparison),
    )


def time_section(comparison: ReportComparison) -> ReportSection | None:
    """Step-time section, fastest job first; ``None`` if no job measured step time."""
    timed = list(comparison.jobs)
    if comparison.reference is not None:
        timed = comparison.rank_jobs(STEP, False)
    jobs = [job for job in timed if job in comparison.charted_jobs]
    stack = _stacked_bar(
        comparison,
        jobs,
        TIME,
        TIME_REST,
        STEP,
        scale=1e3,
        text=number_format.format_milliseconds,
        unit="ms",
    )
    if stack is None:
        return None
    charted, bars, key, table = stack
    shares = sections.part_shares(timed, TIME, STEP, TIME_REST)
    notes: list[str | Markup] = []
    has_rest = any(label.startswith(TIME_REST.label) for _, label in key)
    explanation = ("Grey: the rest of the step, outside all timers.",) if has_rest else ()
    if len(charted) > 1:
        fast, slow = (breakdown(j, TIME, STEP, TIME_REST) for j in (charted[0], charted[-1]))
        if FORWARD_BACKWARD in {*fast, *slow}:
            fast, slow = join_forward_backward(fast), join_forward_backward(slow)
        both = [part for part in fast if part in slow]
        widest = max(both, key=lambda p: abs(slow[p] - fast[p]), default=None)
        if widest:
            template = Markup(
                "Between <b>{}</b> and <b>{}</b>, the fastest and the slowest charted job, "
                "{} time differs most: {}\u00a0ms vs. {}\u00a0ms."
            )
            spans = (
                number_format.format_milliseconds(fast[widest]),
                number_format.format_milliseconds(slow[widest]),
            )
            notes.append(template.format(charted[0].name, charted[-1].name, widest.label, *spans))
    error_text = _prediction_error_text(
        timed,
        STEP,
        lambda s: f"{number_format.format_milliseconds(s)}{number_format.NO_BREAK}ms",
        "step time",
    )
    if error_text:
        notes.append(error_text)
    notes += missing_jobs_note(comparison, charted)
    detail = ", ".join(filter(None, ("ms", window_note(charted))))
    detail += charted_jobs_text(comparison, charted)
    count = number_format.pluralize(len(charted), "job")
    sentence = f"Stacked bars: step time of {count} by phase."
    return ReportSection(
        "time",
        "Step time",
        sections.time_heading(shares),
        (_bars_panel("Step time by phase", detail, bars, "time", sentence),),
        key,
        tuple(notes),
        table,
        explanation,
        wandb_panels=_time_panels(comparison),
    )


def _memory_panels(comparison: ReportComparison) -> tuple[TitledPanel, ...]:
    if comparison.reference is None:
        parts = tuple(part.key for part in MEMORY)
        return (
            TitledPanel("Memory of the worst rank (bytes)", CurvesPanel(parts, stacked=True)),
            TitledPanel("Peak memory (bytes)", CurvesPanel((PEAK,), from_zero=True)),
        )
    return (TitledPanel("Peak memory (bytes)", BarsPanel(SummaryNumber(PEAK))),)


def _time_panels(comparison: ReportComparison) -> tuple[TitledPanel, ...]:
    if comparison.reference is None:
        parts = tuple(part.key for part in TIME if part.key)
        return (TitledPanel("Step time by phase (s)", CurvesPanel(parts, stacked=True)),)
    return (TitledPanel("Step time (s)", BarsPanel(SummaryNumber(STEP))),)


def _stacked_bar(
    comparison: ReportComparison,
    jobs: Sequence[ReportJob],
    parts: Sequence[StackPart],
    rest: StackPart,
    total: str,
    *,
    scale: float,
    text: Callable[[float | None], str],
    unit: str,
) -> tuple[list[ReportJob], list[StackedBar], tuple[tuple[str, str], ...], NumbersTable] | None:
    sizes = {job.name: breakdown(job, parts, total, rest) for job in jobs}
    charted = [job for job in jobs if sizes[job.name]]
    if not charted:
        return None
    present = [p for p in (*parts, rest) if any(p in sizes[job.name] for job in charted)]
    bars = [
        StackedBar(
            job.name if len(comparison.jobs) > 1 else "",
            tuple(
                BarSegment(
                    part.color, size * scale, f"{job.name}, {part.label}: {text(size)} {unit}"
                )
                for part, size in sizes[job.name].items()
            ),
            f"{text(job.measured(total))} {unit}",
            None if (predicted := job.predicted(total)) is None else predicted * scale,
            ""
            if job.prediction_error(total) is None
            else number_format.format_error(job.prediction_error(total)),
        )
        for job in charted
    ]
    has_prediction = any(bar.predicted is not None for bar in bars)
    key = tuple((part.color, part.label) for part in present)
    if len(charted) == 1:
        total_size = charted[0].measured(total)
        key = tuple(
            (p.color, f"{p.label} {text(size)}{number_format.NO_BREAK}{unit}"
             + (f", {number_format.format_percent(size / total_size)}" if total_size else ""))
            for p, size in sizes[charted[0].name].items()
        )  # fmt: skip
    if has_prediction:
        key = (*key, ("tick", "predicted"))
    rows = tuple(
        (
            job.name,
            (
                *(text(sizes[job.name].get(p)) for p in present),
                text(job.measured(total)),
                *(
                    (
                        text(job.predicted(total)),
                        number_format.format_error(job.prediction_error(total)),
                    )
                    if has_prediction
                    else ()
                ),
            ),
        )
        for job in charted
    )
    prediction_heads = ("predicted", "error") if has_prediction else ()
    heads = (*(part.label for part in present), "total", *prediction_heads)
    return charted, bars, key, NumbersTable(unit, heads, rows)


def _bars_panel(
    title: str,
    detail: str,
    bars: Sequence[StackedBar],
    anchor: str,
    sentence: str,
    limit: tuple[float, str] | None = None,
) -> ChartPanel:
    description = f"{sentence} The table below has the same numbers."
    picture = draw_both_widths(
        lambda width: charts.draw_stacks(bars, width, limit), anchor, description
    )
    return ChartPanel(title, detail, picture)
