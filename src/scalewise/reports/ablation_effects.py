"""What was changed in time and memory: rung by rung, value by value, or against one job."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from scalewise.reports import charts, number_format, summary_sentences
from scalewise.reports.chart_layout import draw_both_widths
from scalewise.reports.charts import BarSegment, StackedBar
from scalewise.reports.compare import LOSS, PEAK, PRICE, STEP, ReportComparison, ReportJob
from scalewise.reports.number_format import MemoryUnit
from scalewise.reports.records import RunRecord
from scalewise.reports.sections import ChartPanel, NumbersTable, ReportSection
from scalewise.reports.summary_tables import format_price

SENTENCES = 8
"""Jobs that are told in a sentence each, at most."""
AT_ONCE = 2
"""Parts that a rung of a ladder may change at once."""
ALIKE = 0.005
"""Share by which two numbers differ that are said to be the same."""
CHANCE = "seed"
"""The setting whose values are no change of anything, and tell chance from the rest."""
HARDLY = 0.02
"""Share by which a setting must move time or memory to be told of by itself."""
CROWDED = (
    "Times are not compared: jobs ran at once on the cores of one machine, and slowed each other."
)
ASIDE = ("name", "question", "resume", "tracking", "launch", "checkpoint", "plan")
"""Settings that change nothing of how a step is computed."""


_BOLD = Markup("<b>{}</b>")


@dataclass(frozen=True)
class AblationStep:
    """A job of a ladder and what it adds to the one before it: ``key=value`` each."""

    job: ReportJob
    added_overrides: tuple[str, ...]


def changes_section(comparison: ReportComparison, unit: MemoryUnit) -> ReportSection | None:
    """Returns what the jobs changed; ``None`` where no two of them were measured."""
    ablation_steps = as_ablation(comparison)
    if ablation_steps:
        return _ablation_panel(ablation_steps, unit)
    return _paired_swaps(comparison) or _reference_panel(comparison)


def as_ablation(comparison: ReportComparison) -> tuple[AblationStep, ...]:
    """Returns the finished jobs as a ladder, the first without anything added; else nothing.

    It is one where each job keeps all that the one before it was set to and adds something new.
    With that a compiler may go, which does not reach into everything; all else is kept.
    """
    jobs = [job for job in comparison.finished if job.measured(STEP) is not None]
    if len(jobs) < 3:
        return ()
    ablation_steps, seen = [AblationStep(jobs[0], ())], set[str]()
    for before, job in pairwise(jobs):
        old, new = _setting_texts(before.run), _setting_texts(job.run)
        keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
        parts = {key.split(".")[0] for key in keys}
        left = [key for key in keys if key == "compile" and key not in new and seen - {key}]
        if keys == left or len(parts) > AT_ONCE or seen & {*keys} - {*left}:
            return ()
        seen |= set(keys)
        # A field of an option that has just been chosen goes without saying.
        told = [key for key in keys if "." not in key or key.split(".")[0] not in keys]
        added = [f"{key}={new.get(key, 'default')}" for key in told if key not in left]
        ablation_steps.append(
            AblationStep(job, (*added, *(f"without {key}={old[key]}" for key in left)))
        )
    return tuple(ablation_steps)


def _setting_texts(run: RunRecord) -> Mapping[str, str]:
    changed = {
        change.key: number_format.format_value(change.value) for change in run.changed_settings
    }
    return {key: text for key, text in changed.items() if key.split(".")[0] not in ASIDE}


def effect_text(time_ratio: float | None, memory_ratio: float | None) -> str:
    """Returns what ratios of step time and peak memory say: ``cut the step by 4% for 7% more ...``.

    Empty where neither is known.
    """
    if time_ratio is None and memory_ratio is None:
        return ""
    less, more, same = [], [], []
    for ratio, whole, noun in (
        (memory_ratio, "peak memory", "memory"),
        (time_ratio, "the step", "time"),
    ):
        if ratio is None:
            continue
        if abs(ratio - 1) < ALIKE:
            same.append(noun)
        elif ratio < 1:
            less.append(f"{whole} by {number_format.format_percent(1 - ratio)}")
        else:
            more.append(_more_text(ratio, noun))
    if less:
        cost = more or [f"no more {noun}" for noun in same]
        return f"cut {' and '.join(less)}" + (f" for {cost[0]}" if cost else "")
    if more:
        return f"took {' and '.join(more)}" + "".join(f" for no less {noun}" for noun in same)
    return f"changed neither {' nor '.join(same)}" if len(same) > 1 else f"left {same[0]} as it was"


def _more_text(ratio: float, noun: str) -> str:
    if ratio >= 2:
        return f"{number_format.format_ratio(ratio)} the {noun}"
    return f"{number_format.format_percent(ratio - 1)} more {noun}"


def _ratio_text(job: ReportJob, base: ReportJob, key: str) -> float | None:
    ours, theirs = job.measured(key), base.measured(key)
    return ours / theirs if ours is not None and theirs else None


def _between_text(job: ReportJob, base: ReportJob, *, timed: bool = True) -> str:
    return effect_text(
        _ratio_text(job, base, STEP) if timed else None, _ratio_text(job, base, PEAK)
    )


@dataclass(frozen=True)
class ValueSwap:
    """One value of a setting in the place of another, all else being equal: geometric means."""

    key: str
    value: str
    base: str
    time_ratio: float | None
    memory_ratio: float | None
    pairs: int

    @property
    def magnitude(self) -> float:
        """Returns how much it moved time or memory, whichever it moved more."""
        return max(
            abs(math.log(ratio)) for ratio in (self.time_ratio, self.memory_ratio, 1.0) if ratio
        )


def value_swaps(comparison: ReportComparison) -> list[ValueSwap]:
    """Returns what each value of each setting changed against the reference's value.

    From the pairs of finished jobs that differ in that setting alone; a value without a pair is
    left out.
    """
    reference, keys = comparison.reference, list(comparison.varying)
    jobs = {
        tuple(number_format.format_value(job.run.varied_settings.get(key)) for key in keys): job
        for job in comparison.finished
    }
    found = []
    for place, key in enumerate(keys):
        if key == CHANCE:
            continue
        base = (
            number_format.format_value(reference.run.varied_settings.get(key)) if reference else ""
        )
        for item in comparison.varying[key]:
            value = number_format.format_value(item)
            pairs = [
                (job, jobs[other])
                for at, job in jobs.items()
                if at[place] == value != base
                and (other := (*at[:place], base, *at[place + 1 :])) in jobs
            ]
            time, memory = (
                _geometric_mean([_ratio_text(*pair, of) for pair in pairs]) for of in (STEP, PEAK)
            )
            time = None if comparison.is_oversubscribed else time
            if time is not None or memory is not None:
                found.append(ValueSwap(key, value, base, time, memory, len(pairs)))
    return found


def _geometric_mean(ratios: Sequence[float | None]) -> float | None:
    known = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(known) / len(known)) if known else None


def _paired_swaps(comparison: ReportComparison) -> ReportSection | None:
    """Returns what swapping one value for another did, the largest change first."""
    found = sorted(value_swaps(comparison), key=lambda swap: -swap.magnitude)
    if not found or len(comparison.varying) < 2:
        return None
    moving = [swap for swap in found if swap.magnitude >= HARDLY]
    still = [key for key in comparison.varying if key not in {swap.key for swap in moving}]
    still = [key for key in still if key in {swap.key for swap in found}]
    said = [Markup("{}.").format(_swap_text(swap, _BOLD)) for swap in moving[1:SENTENCES]]
    if still and moving:
        what = "memory" if comparison.is_oversubscribed else "time and memory"
        less = f"moved {what} by less than {number_format.format_percent(HARDLY)}"
        said.append(Markup("{} {}.").format(summary_sentences.join_words(still), less))
    finding = _swap_text(found[0], Markup("{}"))
    note = "Each value against the reference's, from jobs alike in all else; geometric means."
    notes = (note, CROWDED) if comparison.is_oversubscribed else (note,)
    return ReportSection("changes", "Changes", finding, (), notes=notes, said=tuple(said))


def _swap_text(swap: ValueSwap, name: Markup) -> Markup:
    """Returns what one swap did, its value in the form of ``name``."""
    over = f", over {number_format.pluralize(swap.pairs, 'pair')} of jobs" if swap.pairs > 1 else ""
    said = effect_text(swap.time_ratio, swap.memory_ratio)
    value = name.format(_value_name(swap.key, swap.value))
    return Markup("{} instead of {} {}{}").format(value, swap.base, said, over)


def _value_name(key: str, value: str) -> str:
    """Returns how a value is called: a word by itself, a number with its setting."""
    word = not value.replace(".", "").replace("-", "").replace("e", "").isdigit()
    return value if word and value not in ("true", "false", "null") else f"{key}={value}"


def _reference_panel(comparison: ReportComparison) -> ReportSection | None:
    base = comparison.reference
    if base is None or not base.run.ok or set(comparison.varying) == {CHANCE}:
        return None
    others = [
        (job, said)
        for job in comparison.rank_jobs(*comparison.headline_metric)
        if job is not base
        and (said := _between_text(job, base, timed=not comparison.is_oversubscribed))
    ]
    if not others:
        return None
    (first, finding), rest = others[0], others[1:]
    against = f"All against {base.name}: medians of its step time and its peak memory."
    notes = [against] if rest else []  # the heading alone is no section
    notes += [CROWDED] if comparison.is_oversubscribed else []
    if len(rest) > SENTENCES:
        notes.append(f"{len(rest) - SENTENCES} more jobs stand in the comparison.")
    told = [Markup("<b>{}</b> {}.").format(job.name, did) for job, did in rest[:SENTENCES]]
    heading = Markup("{} {}").format(first.name, finding)
    return ReportSection(
        "changes", "Changes", heading, (), notes=tuple(notes),
        said=tuple(told or [escape(against)]),
    )  # fmt: skip


def _ablation_panel(steps: Sequence[AblationStep], unit: MemoryUnit) -> ReportSection:
    first, last = steps[0].job, steps[-1].job
    count = number_format.capitalize_first(number_format.pluralize(len(steps) - 1, "technique"))
    finding = f"{count} together {_between_text(last, first)}"
    said = [
        Markup("<b>{}</b> ({}) {}.").format(
            ablation_step.job.name,
            ", ".join(ablation_step.added_overrides),
            _between_text(ablation_step.job, before.job),
        )
        for before, ablation_step in pairwise(steps)
    ]
    panels = [
        _effects_panel(
            steps, STEP, "Step time", "ms", 1e3, number_format.format_milliseconds, "--t-bwd"
        ),
        _effects_panel(
            steps, PEAK, "Peak memory", unit.name, 1 / unit.size, unit.text, "--m-params"
        ),
    ]
    return ReportSection(
        "changes",
        "Ladder",
        finding,
        tuple(panel for panel in panels if panel is not None),
        notes=(f"Each job keeps what the one above it has, and adds to it; all begin at "
               f"{first.name}.",),
        numbers=_effect_numbers(steps, unit),
        reading=("In grey is the change from the job above; a dark line is what was foreseen.",),
        said=tuple(said),
    )  # fmt: skip


def _effects_panel(
    steps: Sequence[AblationStep],
    key: str,
    title: str,
    unit: str,
    scale: float,
    text: Callable[[float | None], str],
    colour: str,
) -> ChartPanel | None:
    bars = []
    for before, ablation_step in zip((steps[0], *steps), steps, strict=False):
        number = ablation_step.job.measured(key)
        if number is None:
            continue
        shown, name = f"{text(number)} {unit}", ablation_step.job.name
        part = BarSegment(colour, number * scale, f"{name}: {shown}")
        said = ablation_step.job.predicted(key)
        bars.append(
            StackedBar(
                name,
                (part,),
                shown,
                predicted=None if said is None else said * scale,
                error=_change_text(ablation_step, before, key),
            )
        )
    if len(bars) < 2:
        return None
    sentence = (
        f"Bars: {title.lower()} of {number_format.pluralize(len(bars), 'job')}, in their order."
    )
    picture = draw_both_widths(
        lambda width: charts.draw_stacks(bars, width), f"ladder-{key.split('/')[0]}", sentence
    )
    return ChartPanel(title, f"{unit}, in the order of the jobs", picture)


def _change_text(step: AblationStep, base: AblationStep, key: str) -> str:
    ratio = _ratio_text(step.job, base.job, key)
    return "" if ratio is None or step is base else number_format.format_error(ratio - 1)


def _effect_numbers(steps: Sequence[AblationStep], unit: MemoryUnit) -> NumbersTable:
    first = steps[0]
    priced = any(ablation_step.job.measured(PRICE) is not None for ablation_step in steps)
    heads = ["adds"]
    for key, head in ((STEP, "step, ms"), (PEAK, f"peak, {unit.name}")):
        known = any(ablation_step.job.predicted(key) is not None for ablation_step in steps)
        heads += [head, *(["foreseen"] if known else []), "change", "in all"]
    heads += [*(["$ a billion tokens"] if priced else []), "train loss"]
    rows = []
    for before, ablation_step in zip((first, *steps), steps, strict=False):
        job, cells = (
            ablation_step.job,
            [", ".join(ablation_step.added_overrides) or number_format.MISSING],
        )
        for key, text in ((STEP, number_format.format_milliseconds), (PEAK, unit.text)):
            known = any(each.job.predicted(key) is not None for each in steps)
            cells += [
                text(job.measured(key)),
                *([text(job.predicted(key))] if known else []),
                _change_text(ablation_step, before, key),
                _change_text(ablation_step, first, key),
            ]
        if priced:
            cells.append(format_price(job.measured(PRICE)))
        rows.append((job.name, (*cells, number_format.format_loss(job.measured(LOSS)))))
    return NumbersTable("", tuple(heads), tuple(rows))
