"""What was changed in time and memory: rung by rung, value by value, or against one job."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from scalewise.reports import charts, findings, numbers
from scalewise.reports.charts import Bar, Segment
from scalewise.reports.compare import LOSS, PEAK, PRICE, STEP, Comparison, Job
from scalewise.reports.layout import twice
from scalewise.reports.numbers import MemoryUnit
from scalewise.reports.overview import dollars
from scalewise.reports.records import RunRecord
from scalewise.reports.sections import Numbers, Panel, Section

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
class Rung:
    """A job of a ladder and what it adds to the one before it: ``key=value`` each."""

    job: Job
    added: tuple[str, ...]


def changes(comparison: Comparison, unit: MemoryUnit) -> Section | None:
    """Returns what the jobs changed; ``None`` where no two of them were measured."""
    rungs = ladder(comparison)
    if rungs:
        return _climbed(rungs, unit)
    return _paired(comparison) or _against_reference(comparison)


def ladder(comparison: Comparison) -> tuple[Rung, ...]:
    """Returns the finished jobs as a ladder, the first without anything added; else nothing.

    It is one where each job keeps all that the one before it was set to and adds something new.
    With that a compiler may go, which does not reach into everything; all else is kept.
    """
    jobs = [job for job in comparison.finished if job.measured(STEP) is not None]
    if len(jobs) < 3:
        return ()
    rungs, seen = [Rung(jobs[0], ())], set[str]()
    for before, job in pairwise(jobs):
        old, new = _settings(before.run), _settings(job.run)
        keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
        parts = {key.split(".")[0] for key in keys}
        left = [key for key in keys if key == "compile" and key not in new and seen - {key}]
        if keys == left or len(parts) > AT_ONCE or seen & {*keys} - {*left}:
            return ()
        seen |= set(keys)
        # A field of an option that has just been chosen goes without saying.
        told = [key for key in keys if "." not in key or key.split(".")[0] not in keys]
        added = [f"{key}={new.get(key, 'default')}" for key in told if key not in left]
        rungs.append(Rung(job, (*added, *(f"without {key}={old[key]}" for key in left))))
    return tuple(rungs)


def _settings(run: RunRecord) -> Mapping[str, str]:
    changed = {change.key: numbers.value(change.value) for change in run.changed}
    return {key: text for key, text in changed.items() if key.split(".")[0] not in ASIDE}


def effect(time: float | None, memory: float | None) -> str:
    """Returns what ratios of step time and peak memory say: ``cut the step by 4% for 7% more ...``.

    Empty where neither is known.
    """
    if time is None and memory is None:
        return ""
    less, more, same = [], [], []
    for ratio, whole, noun in ((memory, "peak memory", "memory"), (time, "the step", "time")):
        if ratio is None:
            continue
        if abs(ratio - 1) < ALIKE:
            same.append(noun)
        elif ratio < 1:
            less.append(f"{whole} by {numbers.percent(1 - ratio)}")
        else:
            more.append(_more(ratio, noun))
    if less:
        cost = more or [f"no more {noun}" for noun in same]
        return f"cut {' and '.join(less)}" + (f" for {cost[0]}" if cost else "")
    if more:
        return f"took {' and '.join(more)}" + "".join(f" for no less {noun}" for noun in same)
    return f"changed neither {' nor '.join(same)}" if len(same) > 1 else f"left {same[0]} as it was"


def _more(ratio: float, noun: str) -> str:
    if ratio >= 2:
        return f"{numbers.ratio(ratio)} the {noun}"
    return f"{numbers.percent(ratio - 1)} more {noun}"


def _ratio(job: Job, base: Job, key: str) -> float | None:
    ours, theirs = job.measured(key), base.measured(key)
    return ours / theirs if ours is not None and theirs else None


def _between(job: Job, base: Job, *, timed: bool = True) -> str:
    return effect(_ratio(job, base, STEP) if timed else None, _ratio(job, base, PEAK))


@dataclass(frozen=True)
class Swap:
    """One value of a setting in the place of another, all else being equal: geometric means."""

    key: str
    value: str
    base: str
    time: float | None
    memory: float | None
    pairs: int

    @property
    def size(self) -> float:
        """Returns how much it moved time or memory, whichever it moved more."""
        return max(abs(math.log(ratio)) for ratio in (self.time, self.memory, 1.0) if ratio)


def swaps(comparison: Comparison) -> list[Swap]:
    """Returns what each value of each setting changed against the reference's value.

    From the pairs of finished jobs that differ in that setting alone; a value without a pair is
    left out.
    """
    reference, keys = comparison.reference, list(comparison.varying)
    jobs = {
        tuple(numbers.value(job.run.varied.get(key)) for key in keys): job
        for job in comparison.finished
    }
    found = []
    for place, key in enumerate(keys):
        if key == CHANCE:
            continue
        base = numbers.value(reference.run.varied.get(key)) if reference else ""
        for item in comparison.varying[key]:
            value = numbers.value(item)
            pairs = [
                (job, jobs[other])
                for at, job in jobs.items()
                if at[place] == value != base
                and (other := (*at[:place], base, *at[place + 1 :])) in jobs
            ]
            time, memory = (_mean([_ratio(*pair, of) for pair in pairs]) for of in (STEP, PEAK))
            time = None if comparison.crowded else time
            if time is not None or memory is not None:
                found.append(Swap(key, value, base, time, memory, len(pairs)))
    return found


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(known) / len(known)) if known else None


def _paired(comparison: Comparison) -> Section | None:
    """Returns what swapping one value for another did, the largest change first."""
    found = sorted(swaps(comparison), key=lambda swap: -swap.size)
    if not found or len(comparison.varying) < 2:
        return None
    moving = [swap for swap in found if swap.size >= HARDLY]
    still = [key for key in comparison.varying if key not in {swap.key for swap in moving}]
    still = [key for key in still if key in {swap.key for swap in found}]
    said = [Markup("{}.").format(_swapped(swap, _BOLD)) for swap in moving[1:SENTENCES]]
    if still and moving:
        what = "memory" if comparison.crowded else "time and memory"
        less = f"moved {what} by less than {numbers.percent(HARDLY)}"
        said.append(Markup("{} {}.").format(findings.listed(still), less))
    finding = _swapped(found[0], Markup("{}"))
    note = "Each value against the reference's, from jobs alike in all else; geometric means."
    notes = (note, CROWDED) if comparison.crowded else (note,)
    return Section("changes", "Changes", finding, (), notes=notes, said=tuple(said))


def _swapped(swap: Swap, name: Markup) -> Markup:
    """Returns what one swap did, its value in the form of ``name``."""
    over = f", over {numbers.plural(swap.pairs, 'pair')} of jobs" if swap.pairs > 1 else ""
    said = effect(swap.time, swap.memory)
    value = name.format(_named(swap.key, swap.value))
    return Markup("{} instead of {} {}{}").format(value, swap.base, said, over)


def _named(key: str, value: str) -> str:
    """Returns how a value is called: a word by itself, a number with its setting."""
    word = not value.replace(".", "").replace("-", "").replace("e", "").isdigit()
    return value if word and value not in ("true", "false", "null") else f"{key}={value}"


def _against_reference(comparison: Comparison) -> Section | None:
    base = comparison.reference
    if base is None or not base.run.ok or set(comparison.varying) == {CHANCE}:
        return None
    others = [
        (job, said) for job in comparison.ranked(*comparison.headline)
        if job is not base and (said := _between(job, base, timed=not comparison.crowded))
    ]  # fmt: skip
    if not others:
        return None
    (first, finding), rest = others[0], others[1:]
    against = f"All against {base.name}: medians of its step time and its peak memory."
    notes = [against] if rest else []  # the heading alone is no section
    notes += [CROWDED] if comparison.crowded else []
    if len(rest) > SENTENCES:
        notes.append(f"{len(rest) - SENTENCES} more jobs stand in the comparison.")
    told = [Markup("<b>{}</b> {}.").format(job.name, did) for job, did in rest[:SENTENCES]]
    heading = Markup("{} {}").format(first.name, finding)
    return Section(
        "changes", "Changes", heading, (), notes=tuple(notes),
        said=tuple(told or [escape(against)]),
    )  # fmt: skip


def _climbed(rungs: Sequence[Rung], unit: MemoryUnit) -> Section:
    first, last = rungs[0].job, rungs[-1].job
    count = numbers.sentence(numbers.plural(len(rungs) - 1, "technique"))
    finding = f"{count} together {_between(last, first)}"
    said = [
        Markup("<b>{}</b> ({}) {}.").format(
            rung.job.name, ", ".join(rung.added), _between(rung.job, before.job)
        )
        for before, rung in pairwise(rungs)
    ]
    panels = [
        _panel(rungs, STEP, "Step time", "ms", 1e3, numbers.milliseconds, "--t-bwd"),
        _panel(rungs, PEAK, "Peak memory", unit.name, 1 / unit.size, unit.text, "--m-params"),
    ]
    return Section(
        "changes",
        "Ladder",
        finding,
        tuple(panel for panel in panels if panel is not None),
        notes=(f"Each job keeps what the one above it has, and adds to it; all begin at "
               f"{first.name}.",),
        numbers=_numbers(rungs, unit),
        reading=("In grey is the change from the job above; a dark line is what was foreseen.",),
        said=tuple(said),
    )  # fmt: skip


def _panel(
    rungs: Sequence[Rung],
    key: str,
    title: str,
    unit: str,
    scale: float,
    text: Callable[[float | None], str],
    colour: str,
) -> Panel | None:
    bars = []
    for before, rung in zip((rungs[0], *rungs), rungs, strict=False):
        number = rung.job.measured(key)
        if number is None:
            continue
        shown, name = f"{text(number)} {unit}", rung.job.name
        part = Segment(colour, number * scale, f"{name}: {shown}")
        said = rung.job.foreseen(key)
        bars.append(
            Bar(
                name,
                (part,),
                shown,
                foreseen=None if said is None else said * scale,
                error=_change(rung, before, key),
            )
        )
    if len(bars) < 2:
        return None
    sentence = f"Bars: {title.lower()} of {numbers.plural(len(bars), 'job')}, in their order."
    picture = twice(
        lambda width: charts.stacks(bars, width), f"ladder-{key.split('/')[0]}", sentence
    )
    return Panel(title, f"{unit}, in the order of the jobs", picture)


def _change(rung: Rung, base: Rung, key: str) -> str:
    ratio = _ratio(rung.job, base.job, key)
    return "" if ratio is None or rung is base else numbers.error(ratio - 1)


def _numbers(rungs: Sequence[Rung], unit: MemoryUnit) -> Numbers:
    first = rungs[0]
    priced = any(rung.job.measured(PRICE) is not None for rung in rungs)
    heads = ["adds"]
    for key, head in ((STEP, "step, ms"), (PEAK, f"peak, {unit.name}")):
        known = any(rung.job.foreseen(key) is not None for rung in rungs)
        heads += [head, *(["foreseen"] if known else []), "change", "in all"]
    heads += [*(["$ a billion tokens"] if priced else []), "train loss"]
    rows = []
    for before, rung in zip((first, *rungs), rungs, strict=False):
        job, cells = rung.job, [", ".join(rung.added) or numbers.MISSING]
        for key, text in ((STEP, numbers.milliseconds), (PEAK, unit.text)):
            known = any(each.job.foreseen(key) is not None for each in rungs)
            cells += [
                text(job.measured(key)),
                *([text(job.foreseen(key))] if known else []),
                _change(rung, before, key),
                _change(rung, first, key),
            ]
        if priced:
            cells.append(dollars(job.measured(PRICE)))
        rows.append((job.name, (*cells, numbers.loss(job.measured(LOSS)))))
    return Numbers("", tuple(heads), tuple(rows))
