"""Sentences of the report header: job counts by status, and the summary.

A sentence is chosen by thresholds and states only what the numbers show; if no threshold is
reached, it states the range. Sentences are HTML-safe: text from files is escaped.
"""

from collections import Counter
from collections.abc import Sequence

from markupsafe import Markup

from scalewise.reports import number_format
from scalewise.reports.compare import (
    LOSS,
    PEAK,
    SPEED,
    STEP,
    ReportComparison,
    ReportJob,
)
from scalewise.reports.number_format import MemoryUnit

STATUS = {
    "ok": "ok",
    "pruned": "pruned",
    "failed": "failed",
    "out_of_memory": "out of memory",
    "timeout": "timed out",
    "interrupted": "interrupted",
    "refused": "refused",
    "running": "running",
    "not_run": "not run",
}

_BOLD = Markup("<b>{}</b>")


def status_word(status: str) -> str:
    """Display text of ``status``."""
    return STATUS.get(status, status.replace("_", " "))


def outcome_counts(comparison: ReportComparison) -> str:
    """Number of jobs by status: ``3 ok (1 on retry), 1 out of memory``."""
    jobs = comparison.jobs
    counts = Counter(job.run.status for job in jobs)
    if counts["ok"] == len(jobs) > 1:
        return f"All {len(jobs)} jobs finished"
    num_retried = sum(job.run.ok and job.run.attempts > 1 for job in jobs)
    order = [*STATUS, *sorted(set(counts) - set(STATUS))]
    texts = [f"{counts[status]} {status_word(status)}" for status in order if counts[status]]
    if num_retried:
        texts[0] += f" ({num_retried} on retry)"
    return ", ".join(texts)


def join_words(words: Sequence[str]) -> Markup:
    """Join words as ``a, b and c``, escaped."""
    if len(words) < 2:
        return Markup(", ").join(words)
    return Markup("{} and {}").format(Markup(", ").join(words[:-1]), words[-1])


def summary_text(comparison: ReportComparison, unit: MemoryUnit) -> Markup:
    """Summary in up to three sentences: throughput, memory, loss."""
    if not comparison.varying and len(comparison.jobs) == 1:
        return _run_summary(comparison.jobs[0], unit)
    if not comparison.finished:
        return Markup("No job finished: {}.").format(outcome_counts(comparison))
    sentences = [
        _speed_sentence(comparison),
        _memory_sentence(comparison, unit),
        _loss_sentence(comparison),
    ]
    known = [sentence for sentence in sentences if sentence]
    return Markup(" ").join(known or [Markup("{}.").format(outcome_counts(comparison))])


def _run_summary(job: ReportJob, unit: MemoryUnit) -> Markup:
    run = job.run
    steps_done = run.summary.steps if run.summary else None
    if run.status == "running":
        return Markup("The run is in progress.")
    if not run.ok:
        after_text = f" after {number_format.pluralize(steps_done, 'step')}" if steps_done else ""
        return Markup("Status: {}{}.").format(_BOLD.format(status_word(run.status)), after_text)
    first, last = job.measured("train/loss_first"), job.measured(LOSS)
    sentences = []
    if first is not None and last is not None:
        verb = "fell" if last < first else "rose" if last > first else "stayed"
        start = f"from {number_format.format_loss(first)} to" if last != first else "at"
        steps_text = f" in {number_format.pluralize(steps_done, 'step')}" if steps_done else ""
        sentences.append(
            Markup("Train loss {} {} {}{}.").format(
                verb, start, _BOLD.format(number_format.format_loss(last)), steps_text
            )
        )
    speed, step, peak = (job.measured(key) for key in (SPEED, STEP, PEAK))
    if speed is not None:
        step_text = (
            f", {number_format.format_milliseconds(step)} ms per step" if step is not None else ""
        )
        sentences.append(
            Markup("Throughput was {}{}.").format(
                _BOLD.format(f"{number_format.format_whole(speed)} tok/s"), step_text
            )
        )
    if peak is not None:
        sentences.append(Markup("Peak memory was {}.").format(_BOLD.format(unit.full(peak))))
    return Markup(" ").join(sentences or [Markup("The run finished.")])


def _speedup_text(faster: float, slower: float) -> str:
    """Speedup as a ratio, or below 1.1 as a percentage: ``3% faster than``."""
    if faster / slower >= 1.1:
        return f"{number_format.format_ratio(faster / slower)} as fast as"
    return f"{number_format.format_percent(faster / slower - 1)} faster than"


def _speed_sentence(comparison: ReportComparison) -> Markup | None:
    order = comparison.rank_jobs(SPEED, True)
    if not order:
        return None
    top, speed = order[0], order[0].measured(SPEED) or 0
    text = Markup("{} is fastest at {}").format(
        _BOLD.format(top.name), _BOLD.format(f"{number_format.format_whole(speed)} tok/s")
    )
    if len(order) == 1:
        return Markup("{}, the only job with a measured throughput.").format(text)
    reference = comparison.reference if comparison.reference in order else order[-1]
    other = order[1] if reference is top else reference
    other_speed = (other.measured(SPEED) or 0) if other else 0
    if not other or other_speed <= 0:
        return Markup("{}.").format(text)
    if number_format.format_whole(speed) == number_format.format_whole(other_speed):
        return Markup("{}, the same as {}.").format(text, other.name)
    return Markup("{}, {} {}.").format(text, _speedup_text(speed, other_speed), other.name)


def _memory_sentence(comparison: ReportComparison, unit: MemoryUnit) -> Markup | None:
    order = comparison.rank_jobs(PEAK, False)
    fastest = comparison.rank_jobs(SPEED, True)
    if len(order) < 2 or not fastest:
        return None
    top, peak = order[0], order[0].measured(PEAK) or 0
    if top is fastest[0]:
        return Markup("It also uses the least memory, {}.").format(_BOLD.format(unit.full(peak)))
    fastest_peak = fastest[0].measured(PEAK)
    if fastest_peak is None or unit.text(fastest_peak) == unit.text(peak):
        return None
    text = Markup("{} uses the least memory, {}").format(
        _BOLD.format(top.name), _BOLD.format(unit.full(peak))
    )
    own_speed, top_speed = top.measured(SPEED), fastest[0].measured(SPEED)
    savings_text = Markup(", {} less than {}").format(
        number_format.format_percent(1 - peak / fastest_peak), fastest[0].name
    )
    cost_text = (
        f" at {number_format.format_percent(own_speed / top_speed)} of its throughput"
        if own_speed and top_speed
        else ""
    )
    return Markup("{}{}{}.").format(text, savings_text, cost_text)


def _loss_sentence(comparison: ReportComparison) -> Markup | None:
    order = comparison.rank_jobs(LOSS, False)
    if len(order) < 2:
        return None
    low, high = order[0].measured(LOSS) or 0, order[-1].measured(LOSS) or 0
    if low == high:
        return Markup("Final losses are equal.")
    if high - low < 0.01:
        return Markup("Final losses differ by at most {}.").format(
            number_format.format_power(high - low)
        )
    return Markup("{} has the lowest final loss, {}; the highest is {}.").format(
        _BOLD.format(order[0].name),
        _BOLD.format(number_format.format_loss(low)),
        number_format.format_loss(high),
    )
