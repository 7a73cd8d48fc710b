"""How much of what differs from job to job goes with each setting, alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from scalewise.reports import charts, numbers
from scalewise.reports.charts import Bar, Segment
from scalewise.reports.compare import LOSS, PEAK, STEP, Comparison, Job
from scalewise.reports.layout import twice
from scalewise.reports.live import Drawn, Importance, Summary
from scalewise.reports.sections import Numbers, Panel, Section

FEWEST = 4
"""Jobs below which nothing is said."""
LEADS = 0.3
"""Share from which a setting is said to lead."""
FLAT = 0.005
"""Spread of a number, as a share of it, below which it has nothing to tell apart."""


@dataclass(frozen=True)
class _Target:
    key: str
    label: str
    colour: str
    scale: Callable[[NDArray[np.float64]], NDArray[np.float64]]


TARGETS = (
    _Target(STEP, "step time", "--t-bwd", np.log),
    _Target(PEAK, "peak memory", "--m-params", np.log),
    _Target(LOSS, "train loss", "--m-act", np.asarray),
)


def importance(comparison: Comparison) -> Section | None:
    """Returns the share of each setting; ``None`` below two settings or :data:`FEWEST` jobs."""
    found = {
        target: shares
        for target in TARGETS
        if len(shares := of(comparison, target.key, target.scale)) > 1
    }
    if not found:
        return None
    most: dict[str, float] = {}
    for shares in found.values():
        for key, share in shares.items():
            most[key] = max(share, most.get(key, 0.0))
    keys = sorted(most, key=lambda key: -most[key])
    notes = []
    if not _whole_grid(comparison):
        notes.append("Not all combinations ran: settings that vary together share what is theirs.")
    count = min(len(_measuring(comparison, target.key)) for target in found)
    notes.append(
        f"From {numbers.plural(count, 'job')}; what is left of the whole goes with combinations "
        "of settings, and with chance."
    )
    return Section(
        "importance",
        "Importance",
        _finding({target.label: shares for target, shares in found.items()}),
        tuple(_panel(target, shares) for target, shares in found.items()),
        notes=tuple(notes),
        numbers=Numbers(
            "setting",
            tuple(target.label for target in found),
            tuple(
                (key, tuple(numbers.percent(shares.get(key)) for shares in found.values()))
                for key in keys
            ),
        ),
        reading=(
            "Share of the variance that goes with one setting alone, less what as many values "
            "would take by chance; of time and memory that of their logarithms.",
        ),
        live=tuple(Drawn(f"What tells of {t.label}", Importance(Summary(t.key))) for t in found),
    )


def of(
    comparison: Comparison,
    key: str,
    scale: Callable[[NDArray[np.float64]], NDArray[np.float64]] = np.asarray,
) -> dict[str, float]:
    """Returns the share of the variance of ``key`` that goes with each varying setting, 0 to 1.

    That of values which several jobs share is the analysis of variance's epsilon squared
    (T. L. Kelley, 1935): the variance between the values, less what chance makes of it. Numbers
    that hardly any two jobs share are ranked (Spearman), and the squared correlation is adjusted
    alike. A setting of which neither can be told is left out, as is a flat ``key``.
    """
    jobs = _measuring(comparison, key)
    y = scale(np.array([job.measured(key) for job in jobs], float))
    middle = abs(float(np.mean(y))) if scale is np.asarray and len(y) else 1.0
    if len(jobs) < FEWEST or np.ptp(y) < FLAT * middle:
        return {}
    found = {}
    for setting in comparison.varying:
        values = [numbers.value(job.run.varied.get(setting)) for job in jobs]
        if (share := _share(values, y)) is not None:
            found[setting] = share
    return found


def _measuring(comparison: Comparison, key: str) -> list[Job]:
    jobs = comparison.ranked(key, False)
    return [job for job in jobs if (job.measured(key) or 0) > 0]


def _share(values: Sequence[str], y: NDArray[np.float64]) -> float | None:
    count, kinds = len(values), sorted(set(values))
    if len(kinds) < 2:
        return None
    total = float(((y - y.mean()) ** 2).sum())
    if 2 * len(kinds) <= count:
        groups = [y[[v == kind for v in values]] for kind in kinds]
        within = float(sum(((g - g.mean()) ** 2).sum() for g in groups))
        between = total - within
        chance = within / (count - len(kinds)) * (len(kinds) - 1)
        return max(0.0, (between - chance) / total)
    try:
        x = _ranks(np.array([float(value) for value in values]))
    except ValueError:
        return None
    r = float(np.corrcoef(x, _ranks(y))[0, 1])
    return max(0.0, 1 - (1 - r**2) * (count - 1) / (count - 2))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns ranks from 0; those of equal values are their mean."""
    _, place, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    ranks: NDArray[np.float64] = (ends - (sizes + 1) / 2)[place]
    return ranks


def _whole_grid(comparison: Comparison) -> bool:
    keys = list(comparison.varying)
    ran = {
        tuple(numbers.value(job.run.varied.get(key)) for key in keys) for job in comparison.finished
    }
    return len(ran) == len(list(product(*(comparison.varying[key] for key in keys))))


def _finding(found: dict[str, dict[str, float]]) -> str:
    leads: dict[str, list[str]] = {}
    for label, shares in found.items():
        key = max(shares, key=lambda k: shares[k])
        if shares[key] >= LEADS:
            leads.setdefault(key, []).append(f"{numbers.percent(shares[key])} of {label}")
    if not leads:
        return f"No one setting accounts for {numbers.percent(LEADS)} of {' or of '.join(found)}"
    return "; ".join(f"{key} accounts for {' and '.join(of)}" for key, of in leads.items())


def _panel(target: _Target, shares: dict[str, float]) -> Panel:
    bars = [
        Bar(key, (Segment(target.colour, 100 * shares[key], f"{key}: {text} of {target.label}"),),
            text)
        for key in sorted(shares, key=lambda key: -shares[key])
        if (text := numbers.percent(shares[key]))
    ]  # fmt: skip
    picture = twice(
        lambda width: charts.stacks(bars, width, span=100),
        f"importance-{target.key.split('/')[0]}",
        f"Bars: share of the spread of {target.label} that goes with each setting.",
    )
    return Panel(numbers.sentence(target.label), "% of its spread, by setting", picture)
