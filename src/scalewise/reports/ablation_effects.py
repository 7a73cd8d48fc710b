"""Effects on step time and peak memory: per ablation step, per value, or vs. the reference."""

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

MAX_SENTENCES = 8
"""Maximum number of jobs or values described in a sentence."""
MAX_GROUPS_PER_STEP = 2
"""Maximum number of config groups that an ablation step may change."""
UNCHANGED = 0.005
"""Relative difference below which two values count as equal."""
SEED_KEY = "seed"
"""Setting whose values are replicates, not a change."""
MIN_EFFECT = 0.02
"""Smallest relative change of time or memory that is described by itself."""
OVERSUBSCRIBED_NOTE = (
    "Times are not compared: jobs overlapped on the CPU cores of one machine and slowed each other."
)
IGNORED_GROUPS = ("name", "question", "resume", "tracking", "launch", "checkpoint", "plan")
"""Settings that do not affect the computation of a step."""


_BOLD = Markup("<b>{}</b>")


@dataclass(frozen=True)
class AblationStep:
    """A step of an ablation."""

    job: ReportJob
    """Job of the step."""
    added_overrides: tuple[str, ...]
    """``key=value`` of each setting added to the previous step."""


def changes_section(comparison: ReportComparison, unit: MemoryUnit) -> ReportSection | None:
    """Section on the effect of the varied settings; ``None`` without two comparable jobs."""
    ablation_steps = as_ablation(comparison)
    if ablation_steps:
        return _ablation_section(ablation_steps, unit)
    return _value_swaps_section(comparison) or _reference_section(comparison)


def as_ablation(comparison: ReportComparison) -> tuple[AblationStep, ...]:
    """Finished jobs as ablation steps; empty if the sweep is not an ablation.

    In an ablation, each job keeps the settings of the job before it and adds at least one. Only
    ``compile`` may return to its value in the first job, as not every setting supports it.
    """
    jobs = [job for job in comparison.finished if job.measured(STEP) is not None]
    if len(jobs) < 3:
        return ()
    ablation_steps, seen = [AblationStep(jobs[0], ())], set[str]()
    first_compile = _setting_texts(jobs[0].run).get("compile")
    for before, job in pairwise(jobs):
        old, new = _setting_texts(before.run), _setting_texts(job.run)
        keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
        groups = {key.split(".")[0] for key in keys}
        is_dropped = new.get("compile") == first_compile and seen - {"compile"}
        dropped = [key for key in keys if key == "compile" and is_dropped]
        if keys == dropped or len(groups) > MAX_GROUPS_PER_STEP or seen & {*keys} - {*dropped}:
            return ()
        seen |= set(keys)
        # The fields of a newly chosen option follow from the option.
        listed = [key for key in keys if "." not in key or key.split(".")[0] not in keys]
        added = [f"{key}={new.get(key, 'default')}" for key in listed if key not in dropped]
        ablation_steps.append(
            AblationStep(
                job, (*added, *(f"without {key}={old.get(key, 'default')}" for key in dropped))
            )
        )
    return tuple(ablation_steps)


def _setting_texts(run: RunRecord) -> Mapping[str, str]:
    changed = {
        change.key: number_format.format_value(change.value) for change in run.changed_settings
    }
    return {key: text for key, text in changed.items() if key.split(".")[0] not in IGNORED_GROUPS}


def effect_text(time_ratio: float | None, memory_ratio: float | None) -> str:
    """Describe ratios of step time and peak memory: ``reduced step time by 4%, ...``.

    Empty if neither ratio is known.
    """
    if time_ratio is None and memory_ratio is None:
        return ""
    reduced, increased, unchanged = [], [], []
    for ratio, noun in ((memory_ratio, "peak memory"), (time_ratio, "step time")):
        if ratio is None:
            continue
        if abs(ratio - 1) < UNCHANGED:
            unchanged.append(noun)
        elif ratio < 1:
            reduced.append(f"{noun} by {number_format.format_percent(1 - ratio)}")
        else:
            increased.append(f"{noun} {_increase_text(ratio)}")
    clauses = [
        f"{verb} {conjunction.join(nouns)}"
        for verb, nouns, conjunction in (
            ("reduced", reduced, " and "),
            ("increased", increased, " and "),
            ("did not change", unchanged, " or "),
        )
        if nouns
    ]
    return " and ".join(clauses)


def _increase_text(ratio: float) -> str:
    if ratio >= 2:
        return f"to {number_format.format_ratio(ratio)}"
    return f"by {number_format.format_percent(ratio - 1)}"


def _ratio(job: ReportJob, base: ReportJob, key: str) -> float | None:
    value, base_value = job.measured(key), base.measured(key)
    return value / base_value if value is not None and base_value else None


def _job_effect_text(job: ReportJob, base: ReportJob, *, timed: bool = True) -> str:
    return effect_text(_ratio(job, base, STEP) if timed else None, _ratio(job, base, PEAK))


@dataclass(frozen=True)
class ValueSwap:
    """Effect of one value of a setting in place of another, with all other settings equal."""

    key: str
    """The setting."""
    value: str
    """Its value."""
    base: str
    """Value that it replaces, that of the reference."""
    time_ratio: float | None
    """Geometric mean of the step-time ratios."""
    memory_ratio: float | None
    """Geometric mean of the peak-memory ratios."""
    pairs: int
    """Number of job pairs."""

    @property
    def magnitude(self) -> float:
        """Larger of the log ratios of time and memory, in size."""
        return max(
            abs(math.log(ratio)) for ratio in (self.time_ratio, self.memory_ratio, 1.0) if ratio
        )


def value_swaps(comparison: ReportComparison) -> list[ValueSwap]:
    """Effect of each value of each setting compared with the value of the reference.

    Each effect is computed from the pairs of finished jobs that differ in this setting only; a
    value without a pair is omitted.
    """
    reference, keys = comparison.reference, list(comparison.varying)
    jobs = {
        tuple(number_format.format_value(job.run.varied_settings.get(key)) for key in keys): job
        for job in comparison.finished
    }
    swaps = []
    for index, key in enumerate(keys):
        if key == SEED_KEY:
            continue
        base = (
            number_format.format_value(reference.run.varied_settings.get(key)) if reference else ""
        )
        for item in comparison.varying[key]:
            value = number_format.format_value(item)
            pairs = [
                (job, jobs[other])
                for values, job in jobs.items()
                if values[index] == value != base
                and (other := (*values[:index], base, *values[index + 1 :])) in jobs
            ]
            time, memory = (
                _geometric_mean([_ratio(*pair, metric) for pair in pairs])
                for metric in (STEP, PEAK)
            )
            time = None if comparison.is_oversubscribed else time
            if time is not None or memory is not None:
                swaps.append(ValueSwap(key, value, base, time, memory, len(pairs)))
    return swaps


def _geometric_mean(ratios: Sequence[float | None]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _value_swaps_section(comparison: ReportComparison) -> ReportSection | None:
    """Section on value swaps, largest effect first; ``None`` below two settings."""
    swaps = sorted(value_swaps(comparison), key=lambda swap: -swap.magnitude)
    if not swaps or len(comparison.varying) < 2:
        return None
    notable = [swap for swap in swaps if swap.magnitude >= MIN_EFFECT]
    minor = [key for key in comparison.varying if key not in {swap.key for swap in notable}]
    minor = [key for key in minor if key in {swap.key for swap in swaps}]
    bullets = [Markup("{}.").format(_swap_text(swap, _BOLD)) for swap in notable[1:MAX_SENTENCES]]
    if minor and notable:
        metrics = "peak memory" if comparison.is_oversubscribed else "step time and peak memory"
        change = f"changed {metrics} by less than {number_format.format_percent(MIN_EFFECT)}"
        bullets.append(Markup("{} {}.").format(summary_sentences.join_words(minor), change))
    finding = _swap_text(swaps[0], Markup("{}"))
    note = (
        "Geometric means over pairs of jobs that differ in one setting only, compared with the "
        "value of the reference."
    )
    notes = (note, OVERSUBSCRIBED_NOTE) if comparison.is_oversubscribed else (note,)
    return ReportSection(
        "changes", "Effect of settings", finding, (), notes=notes, bullets=tuple(bullets)
    )


def _swap_text(swap: ValueSwap, name: Markup) -> Markup:
    """Sentence on one swap; ``name`` formats the value."""
    over = f", over {number_format.pluralize(swap.pairs, 'pair')} of jobs" if swap.pairs > 1 else ""
    effect = effect_text(swap.time_ratio, swap.memory_ratio)
    value = name.format(_value_name(swap.key, swap.value))
    return Markup("{} instead of {} {}{}").format(value, swap.base, effect, over)


def _value_name(key: str, value: str) -> str:
    """Name of a value: a word alone, a number or boolean with its key."""
    is_word = not value.replace(".", "").replace("-", "").replace("e", "").isdigit()
    return value if is_word and value not in ("true", "false", "null") else f"{key}={value}"


def _reference_section(comparison: ReportComparison) -> ReportSection | None:
    base = comparison.reference
    if base is None or not base.run.ok or set(comparison.varying) == {SEED_KEY}:
        return None
    others = [
        (job, effect)
        for job in comparison.rank_jobs(*comparison.headline_metric)
        if job is not base
        and (effect := _job_effect_text(job, base, timed=not comparison.is_oversubscribed))
    ]
    if not others:
        return None
    (first, finding), rest = others[0], others[1:]
    note = f"Compared with {base.name}: median step time and peak memory."
    notes = [note] if rest else []  # without other jobs, the note is the only bullet
    notes += [OVERSUBSCRIBED_NOTE] if comparison.is_oversubscribed else []
    if len(rest) > MAX_SENTENCES:
        notes.append(f"{len(rest) - MAX_SENTENCES} more jobs are in the comparison table.")
    bullets = [Markup("<b>{}</b> {}.").format(job.name, did) for job, did in rest[:MAX_SENTENCES]]
    heading = Markup("{} {}").format(first.name, finding)
    return ReportSection(
        "changes", "Effect of settings", heading, (), notes=tuple(notes),
        bullets=tuple(bullets or [escape(note)]),
    )  # fmt: skip


def _ablation_section(steps: Sequence[AblationStep], unit: MemoryUnit) -> ReportSection:
    first, last = steps[0].job, steps[-1].job
    count = number_format.capitalize_first(number_format.pluralize(len(steps) - 1, "technique"))
    finding = f"{count} together {_job_effect_text(last, first)}"
    bullets = [
        Markup("<b>{}</b> ({}) {}.").format(
            ablation_step.job.name,
            ", ".join(ablation_step.added_overrides),
            _job_effect_text(ablation_step.job, before.job),
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
        "Ablation",
        finding,
        tuple(panel for panel in panels if panel is not None),
        notes=(f"Each job adds settings to the job above it; the baseline is {first.name}.",),
        numbers=_effect_numbers(steps, unit),
        explanation=("Grey number: change from the job above. Dark tick: prediction.",),
        bullets=tuple(bullets),
    )  # fmt: skip


def _effects_panel(
    steps: Sequence[AblationStep],
    key: str,
    title: str,
    unit: str,
    scale: float,
    text: Callable[[float | None], str],
    color: str,
) -> ChartPanel | None:
    bars = []
    for before, ablation_step in zip((steps[0], *steps), steps, strict=False):
        number = ablation_step.job.measured(key)
        if number is None:
            continue
        number_text, name = f"{text(number)} {unit}", ablation_step.job.name
        segment = BarSegment(color, number * scale, f"{name}: {number_text}")
        predicted = ablation_step.job.predicted(key)
        bars.append(
            StackedBar(
                name,
                (segment,),
                number_text,
                predicted=None if predicted is None else predicted * scale,
                error=_change_text(ablation_step, before, key),
            )
        )
    if len(bars) < 2:
        return None
    sentence = (
        f"Bars: {title.lower()} of {number_format.pluralize(len(bars), 'job')}, in job order."
    )
    picture = draw_both_widths(
        lambda width: charts.draw_stacks(bars, width), f"ablation-{key.split('/')[0]}", sentence
    )
    return ChartPanel(title, f"{unit}, in job order", picture)


def _change_text(step: AblationStep, base: AblationStep, key: str) -> str:
    ratio = _ratio(step.job, base.job, key)
    return "" if ratio is None or step is base else number_format.format_error(ratio - 1)


def _effect_numbers(steps: Sequence[AblationStep], unit: MemoryUnit) -> NumbersTable:
    first = steps[0]
    is_priced = any(ablation_step.job.measured(PRICE) is not None for ablation_step in steps)
    heads = ["added settings"]
    for key, head in ((STEP, "step, ms"), (PEAK, f"peak, {unit.name}")):
        is_predicted = any(ablation_step.job.predicted(key) is not None for ablation_step in steps)
        heads += [head, *(["predicted"] if is_predicted else []), "change", "total change"]
    heads += [*(["$ per billion tokens"] if is_priced else []), "train loss"]
    rows = []
    for before, ablation_step in zip((first, *steps), steps, strict=False):
        job, cells = (
            ablation_step.job,
            [", ".join(ablation_step.added_overrides) or number_format.MISSING],
        )
        for key, text in ((STEP, number_format.format_milliseconds), (PEAK, unit.text)):
            is_predicted = any(each.job.predicted(key) is not None for each in steps)
            cells += [
                text(job.measured(key)),
                *([text(job.predicted(key))] if is_predicted else []),
                _change_text(ablation_step, before, key),
                _change_text(ablation_step, first, key),
            ]
        if is_priced:
            cells.append(number_format.format_price(job.measured(PRICE)))
        rows.append((job.name, (*cells, number_format.format_loss(job.measured(LOSS)))))
    return NumbersTable("", tuple(heads), tuple(rows))
