"""Where the bytes and the milliseconds go: the stacked parts of the page."""

from collections.abc import Callable, Sequence

from markupsafe import Markup

from scalewise.reports import charts, number_format, section_titles, summary_sentences
from scalewise.reports.chart_layout import draw_both_widths
from scalewise.reports.charts import BarSegment, StackedBar
from scalewise.reports.compare import (
    BOTH_PASSES,
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
    drawn_jobs,
    left_out_note,
    window_note,
)
from scalewise.reports.wandb_panels import BarsPanel, CurvesPanel, SummaryNumber, TitledPanel

LIMIT_SHOWN = 1.35
"""How far above the largest peak a limit may lie and still be drawn: beyond it says nothing."""


def _prediction_error_text(
    jobs: Sequence[ReportJob], key: str, format_number: Callable[[float], str], noun: str
) -> str | None:
    """Returns how near the planner came to peaks or steps; None where it said nothing."""
    errors = [
        (far, job) for job in jobs if job.run.ok and (far := job.prediction_error(key)) is not None
    ]
    if not errors:
        return None
    worst = number_format.format_percent(max(abs(far) for far, _ in errors))
    if len(errors) == 1:
        said = errors[0][1].predicted(key) or 0
        return f"The planner foresaw a {noun} of {format_number(said)}, {worst} off."
    return f"The planner foresaw these {noun}s within {worst}."


def _common_limit(jobs: Sequence[ReportJob], unit: MemoryUnit) -> tuple[float, str] | None:
    """Returns the memory that all jobs may take, where it is near enough to matter."""
    limits = {job.run.predicted.get("limit_bytes") for job in jobs}
    limit = limits.pop() if len(limits) == 1 else None
    tops = [size for job in jobs for size in (job.measured(PEAK), job.predicted(PEAK)) if size]
    if limit is None or not tops or limit > LIMIT_SHOWN * max(tops):
        return None
    return limit / unit.size, f"limit {unit.full(limit)}"


def memory_section(comparison: ReportComparison, unit: MemoryUnit) -> ReportSection | None:
    """Returns what fills the memory, largest peak first; ``None`` if nothing measured it."""
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
    drawn, bars, key, table = stack
    found = section_titles.part_shares(comparison.jobs, MEMORY, PEAK, MEMORY_REST)
    notes: list[str | Markup] = []
    reading = [
        "Blue is model state, ochre is activations, grey is what the peak holds beyond them: "
        "buffers, workspace and the allocator's reserve."
    ]
    lost = [
        (job, said)
        for job in jobs
        if job not in drawn and job.run.status == "out_of_memory" and (said := job.predicted(PEAK))
    ]
    for job, said in lost:
        tip = f"{job.name}: {unit.full(said)} foreseen"
        pale = BarSegment("--faint", said / unit.size, tip)
        bars.insert(0, StackedBar(job.name, (pale,), summary_sentences.status_word(job.run.status)))
    if lost:
        reading.append("A pale bar was foreseen and never reached.")
    state = [
        (sum(size for part, size in breakdown(j, MEMORY[:3], "", MEMORY_REST).items()), j)
        for j in drawn
    ]
    low, high = min(state, key=lambda s: s[0]), max(state, key=lambda s: s[0])
    if len(drawn) == 1:
        notes.append(f"Parameters, gradients and optimizer together take {unit.full(low[0])}.")
    elif unit.text(low[0]) == unit.text(high[0]):
        notes.append(f"Parameters, gradients and optimizer take {unit.full(low[0])} in every job.")
    else:
        notes.append(
            Markup("<b>Model state</b> takes {} in {} and {} in {}.").format(
                unit.full(high[0]), high[1].name, unit.full(low[0]), low[1].name
            )
        )
    if told := _prediction_error_text(comparison.jobs, PEAK, unit.full, "peak"):
        notes.append(told)
    short = [job.name for job in drawn if not job.run.ok]
    if short and len(drawn) > 1:
        notes.append(f"Did not finish, drawn as far as measured: {', '.join(short)}.")
    notes += left_out_note(comparison, [*drawn, *(job for job, _ in lost)])
    title = "Peak of the fullest rank" if any(job.run.world_size > 1 for job in drawn) else "Peak"
    count = number_format.pluralize(len(drawn), "job")
    sentence = f"Stacked bars: peak memory of {count} by what fills it."
    detail = f"{unit.name}{drawn_jobs(comparison, drawn)}"
    return ReportSection(
        "memory",
        "Memory",
        section_titles.memory_heading(found, peaks, unit, MEMORY_REST),
        (
            _bars_panel(
                title, detail, bars, "memory", sentence, _common_limit(comparison.jobs, unit)
            ),
        ),
        key,
        tuple(notes),
        table,
        tuple(reading),
        live=_memory_panels(comparison),
    )


def time_section(comparison: ReportComparison) -> ReportSection | None:
    """Returns where the step goes, fastest first; ``None`` if nothing timed it."""
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
    drawn, bars, key, table = stack
    found = section_titles.part_shares(timed, TIME, STEP, TIME_REST)
    notes: list[str | Markup] = []
    rest = any(label.startswith(TIME_REST.label) for _, label in key)
    reading = ("Grey at the end is the rest of the step: what no timer covers.",) if rest else ()
    if len(drawn) > 1:
        fast, slow = (breakdown(j, TIME, STEP, TIME_REST) for j in (drawn[0], drawn[-1]))
        if BOTH_PASSES in {*fast, *slow}:
            fast, slow = join_forward_backward(fast), join_forward_backward(slow)
        both = [part for part in fast if part in slow]
        widest = max(both, key=lambda p: abs(slow[p] - fast[p]), default=None)
        if widest:
            told = Markup(
                "Between <b>{}</b> and <b>{}</b>, the fastest and the slowest step drawn, "
                "{} differs most: {}\u00a0ms against {}\u00a0ms."
            )
            spans = (
                number_format.format_milliseconds(fast[widest]),
                number_format.format_milliseconds(slow[widest]),
            )
            notes.append(told.format(drawn[0].name, drawn[-1].name, widest.label, *spans))
    if near := _prediction_error_text(
        timed,
        STEP,
        lambda s: f"{number_format.format_milliseconds(s)}{number_format.NO_BREAK}ms",
        "step",
    ):
        notes.append(near)
    notes += left_out_note(comparison, drawn)
    detail = ", ".join(filter(None, ("ms", window_note(drawn)))) + drawn_jobs(comparison, drawn)
    sentence = f"Stacked bars: step time of {number_format.pluralize(len(drawn), 'job')} by phase."
    return ReportSection(
        "time",
        "Time",
        section_titles.time_heading(found),
        (_bars_panel("Step split", detail, bars, "time", sentence),),
        key,
        tuple(notes),
        table,
        reading,
        live=_time_panels(comparison),
    )


def _memory_panels(comparison: ReportComparison) -> tuple[TitledPanel, ...]:
    if comparison.reference is None:
        parts = tuple(part.key for part in MEMORY)
        return (
            TitledPanel("Memory of the fullest rank, bytes", CurvesPanel(parts, stacked=True)),
            TitledPanel("Peak memory, bytes", CurvesPanel((PEAK,), from_zero=True)),
        )
    return (TitledPanel("Peak memory, bytes", BarsPanel(SummaryNumber(PEAK))),)


def _time_panels(comparison: ReportComparison) -> tuple[TitledPanel, ...]:
    if comparison.reference is None:
        parts = tuple(part.key for part in TIME if part.key)
        return (TitledPanel("Parts of a step, s", CurvesPanel(parts, stacked=True)),)
    return (TitledPanel("Step time, s", BarsPanel(SummaryNumber(STEP))),)


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
    split = {job.name: breakdown(job, parts, total, rest) for job in jobs}
    drawn = [job for job in jobs if split[job.name]]
    if not drawn:
        return None
    present = [p for p in (*parts, rest) if any(p in split[job.name] for job in drawn)]
    bars = [
        StackedBar(
            job.name if len(comparison.jobs) > 1 else "",
            tuple(
                BarSegment(
                    part.colour, size * scale, f"{job.name}, {part.label}: {text(size)} {unit}"
                )
                for part, size in split[job.name].items()
            ),
            f"{text(job.measured(total))} {unit}",
            None if (said := job.predicted(total)) is None else said * scale,
            ""
            if job.prediction_error(total) is None
            else number_format.format_error(job.prediction_error(total)),
        )
        for job in drawn
    ]
    told = any(bar.predicted is not None for bar in bars)
    key = tuple((part.colour, part.label) for part in present)
    if len(drawn) == 1:
        whole = drawn[0].measured(total)
        key = tuple(
            (p.colour, f"{p.label} {text(size)}{number_format.NO_BREAK}{unit}"
             + (f", {number_format.format_percent(size / whole)}" if whole else ""))
            for p, size in split[drawn[0].name].items()
        )  # fmt: skip
    if told:
        key = (*key, ("tick", "foreseen"))
    rows = tuple(
        (
            job.name,
            (
                *(text(split[job.name].get(p)) for p in present),
                text(job.measured(total)),
                *(
                    (
                        text(job.predicted(total)),
                        number_format.format_error(job.prediction_error(total)),
                    )
                    if told
                    else ()
                ),
            ),
        )
        for job in drawn
    )
    heads = (*(part.label for part in present), "whole", *(("foreseen", "error") if told else ()))
    return drawn, bars, key, NumbersTable(unit, heads, rows)


def _bars_panel(
    title: str,
    detail: str,
    bars: Sequence[StackedBar],
    ident: str,
    sentence: str,
    limit: tuple[float, str] | None = None,
) -> ChartPanel:
    told = f"{sentence} The same numbers stand in the table below."
    picture = draw_both_widths(lambda width: charts.draw_stacks(bars, width, limit), ident, told)
    return ChartPanel(title, detail, picture)
