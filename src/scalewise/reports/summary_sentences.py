"""The sentences of the header, written from the numbers: the verdict and how the jobs ended.

A sentence is chosen by thresholds and says nothing that the numbers do not carry; where none
holds, it states the range. Sentences are HTML-safe: what came from a file is escaped.
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
    """Returns how a page says ``status``."""
    return STATUS.get(status, status.replace("_", " "))


def outcome_counts(comparison: ReportComparison) -> str:
    """Returns how the jobs ended: ``3 ok (1 on retry), 1 out of memory``."""
    jobs = comparison.jobs
    ended = Counter(job.run.status for job in jobs)
    if ended["ok"] == len(jobs) > 1:
        return f"All {len(jobs)} jobs finished"
    retried = sum(job.run.ok and job.run.attempts > 1 for job in jobs)
    order = [*STATUS, *sorted(set(ended) - set(STATUS))]
    said = [f"{ended[status]} {status_word(status)}" for status in order if ended[status]]
    if retried:
        said[0] += f" ({retried} on retry)"
    return ", ".join(said)


def join_words(words: Sequence[str]) -> Markup:
    """Returns ``a, b and c``, escaped."""
    if len(words) < 2:
        return Markup(", ").join(words)
    return Markup("{} and {}").format(Markup(", ").join(words[:-1]), words[-1])


def summary_text(comparison: ReportComparison, unit: MemoryUnit) -> Markup:
    """Returns the answer in up to three sentences: speed, memory, loss."""
    if not comparison.varying and len(comparison.jobs) == 1:
        return _run_summary(comparison.jobs[0], unit)
    if not comparison.finished:
        return Markup("No job finished: {}.").format(outcome_counts(comparison))
    said = [
        _speed_sentence(comparison),
        _memory_sentence(comparison, unit),
        _loss_sentence(comparison),
    ]
    found = [one for one in said if one]
    return Markup(" ").join(found or [Markup("{}.").format(outcome_counts(comparison))])


def _run_summary(job: ReportJob, unit: MemoryUnit) -> Markup:
    run = job.run
    done = run.summary.steps if run.summary else None
    if run.status == "running":
        return Markup("The run has not ended yet.")
    if not run.ok:
        after = f" after {number_format.pluralize(done, 'step')}" if done else ""
        return Markup("The run ended {}{}.").format(_BOLD.format(status_word(run.status)), after)
    first, last = job.measured("train/loss_first"), job.measured(LOSS)
    said = []
    if first is not None and last is not None:
        moved = "fell" if last < first else "rose" if last > first else "stayed"
        span = f"from {number_format.format_loss(first)} to" if last != first else "at"
        steps = f" in {number_format.pluralize(done, 'step')}" if done else ""
        said.append(
            Markup("Train loss {} {} {}{}.").format(
                moved, span, _BOLD.format(number_format.format_loss(last)), steps
            )
        )
    speed, step, peak = (job.measured(key) for key in (SPEED, STEP, PEAK))
    if speed is not None:
        took = f", {number_format.format_milliseconds(step)} ms a step" if step is not None else ""
        said.append(
            Markup("It trained at {}{}.").format(
                _BOLD.format(f"{number_format.format_whole(speed)} tok/s"), took
            )
        )
    if peak is not None:
        said.append(Markup("Memory peaked at {}.").format(_BOLD.format(unit.full(peak))))
    return Markup(" ").join(said or [Markup("The run finished.")])


def _speedup_text(faster: float, slower: float) -> str:
    """Returns 2.8 times or, for less than 1.1 times, ``3% more than``."""
    if faster / slower >= 1.1:
        return number_format.format_ratio(faster / slower)
    return f"{number_format.format_percent(faster / slower - 1)} more than"


def _speed_sentence(comparison: ReportComparison) -> Markup | None:
    order = comparison.rank_jobs(SPEED, True)
    if not order:
        return None
    top, speed = order[0], order[0].measured(SPEED) or 0
    said = Markup("{} is fastest at {}").format(
        _BOLD.format(top.name), _BOLD.format(f"{number_format.format_whole(speed)} tok/s")
    )
    if len(order) == 1:
        return Markup("{}, the only job with a measured speed.").format(said)
    reference = comparison.reference if comparison.reference in order else order[-1]
    other = order[1] if reference is top else reference
    behind = (other.measured(SPEED) or 0) if other else 0
    if not other or behind <= 0:
        return Markup("{}.").format(said)
    if number_format.format_whole(speed) == number_format.format_whole(behind):
        return Markup("{}, level with {}.").format(said, other.name)
    return Markup("{}, {} {}.").format(said, _speedup_text(speed, behind), other.name)


def _memory_sentence(comparison: ReportComparison, unit: MemoryUnit) -> Markup | None:
    order = comparison.rank_jobs(PEAK, False)
    fastest = comparison.rank_jobs(SPEED, True)
    if len(order) < 2 or not fastest:
        return None
    top, peak = order[0], order[0].measured(PEAK) or 0
    if top is fastest[0]:
        return Markup("It also needs the least memory, {}.").format(_BOLD.format(unit.full(peak)))
    theirs = fastest[0].measured(PEAK)
    if theirs is None or unit.text(theirs) == unit.text(peak):
        return None
    said = Markup("{} needs the least memory, {}").format(
        _BOLD.format(top.name), _BOLD.format(unit.full(peak))
    )
    ours, lead = top.measured(SPEED), fastest[0].measured(SPEED)
    less = Markup(", {} less than {}").format(
        number_format.format_percent(1 - peak / theirs), fastest[0].name
    )
    cost = f" at {number_format.format_percent(ours / lead)} of its speed" if ours and lead else ""
    return Markup("{}{}{}.").format(said, less, cost)


def _loss_sentence(comparison: ReportComparison) -> Markup | None:
    order = comparison.rank_jobs(LOSS, False)
    if len(order) < 2:
        return None
    low, high = order[0].measured(LOSS) or 0, order[-1].measured(LOSS) or 0
    if low == high:
        return Markup("All final losses are equal.")
    if high - low < 0.01:
        return Markup("Final losses lie within {} of each other.").format(
            number_format.format_power(high - low)
        )
    return Markup("{} ends at the lowest loss, {}; the highest is {}.").format(
        _BOLD.format(order[0].name),
        _BOLD.format(number_format.format_loss(low)),
        number_format.format_loss(high),
    )
