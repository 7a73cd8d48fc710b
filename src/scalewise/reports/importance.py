"""How much of what differs from job to job goes with each setting, alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from scalewise.reports import charts, number_format
from scalewise.reports.chart_layout import draw_both_widths
from scalewise.reports.charts import BarSegment, StackedBar
from scalewise.reports.compare import LOSS, PEAK, STEP, ReportComparison, ReportJob
from scalewise.reports.sections import ChartPanel, NumbersTable, ReportSection
from scalewise.reports.wandb_panels import ImportancePanel, SummaryNumber, TitledPanel

FEWEST = 4
"""Jobs below which nothing is said."""
LEADS = 0.3
"""Share from which a setting is said to lead."""
FLAT = 0.005
"""Spread of a number, as a share of it, below which it has nothing to tell apart."""


@dataclass(frozen=True)
class _ImportanceTarget:
    key: str
    label: str
    colour: str
    scale: Callable[[NDArray[np.float64]], NDArray[np.float64]]


TARGETS = (
    _ImportanceTarget(STEP, "step time", "--t-bwd", np.log),
    _ImportanceTarget(PEAK, "peak memory", "--m-params", np.log),
    _ImportanceTarget(LOSS, "train loss", "--m-act", np.asarray),
)


def importance_section(comparison: ReportComparison) -> ReportSection | None:
    """Returns the share of each setting; ``None`` below two settings or :data:`FEWEST` jobs."""
    found = {
        target: shares
        for target in TARGETS
        if len(shares := variance_shares(comparison, target.key, target.scale)) > 1
    }
    if not found:
        return None
    most: dict[str, float] = {}
    for shares in found.values():
        for key, share in shares.items():
            most[key] = max(share, most.get(key, 0.0))
    keys = sorted(most, key=lambda key: -most[key])
    notes = []
    if not _is_full_grid(comparison):
        notes.append("Not all combinations ran: settings that vary together share what is theirs.")
    count = min(len(_measured_jobs(comparison, target.key)) for target in found)
    notes.append(
        f"From {number_format.pluralize(count, 'job')}; what is left of the whole goes with "
        "combinations of settings, and with chance."
    )
    return ReportSection(
        "importance",
        "Importance",
        _finding_text({target.label: shares for target, shares in found.items()}),
        tuple(_importance_panel(target, shares) for target, shares in found.items()),
        notes=tuple(notes),
        numbers=NumbersTable(
            "setting",
            tuple(target.label for target in found),
            tuple(
                (
                    key,
                    tuple(
                        number_format.format_percent(shares.get(key)) for shares in found.values()
                    ),
                )
                for key in keys
            ),
        ),
        reading=(
            "Share of the variance that goes with one setting alone, less what as many values "
            "would take by chance; of time and memory that of their logarithms.",
        ),
        live=tuple(
            TitledPanel(f"What tells of {t.label}", ImportancePanel(SummaryNumber(t.key)))
            for t in found
        ),
    )


def variance_shares(
    comparison: ReportComparison,
    key: str,
    scale: Callable[[NDArray[np.float64]], NDArray[np.float64]] = np.asarray,
) -> dict[str, float]:
    """Returns the share of the variance of ``key`` that goes with each varying setting, 0 to 1.

    That of values which several jobs share is the analysis of variance's epsilon squared
    (T. L. Kelley, 1935): the variance between the values, less what chance makes of it. Numbers
    that hardly any two jobs share are ranked (Spearman), and the squared correlation is adjusted
    alike. A setting of which neither can be told is left out, as is a flat ``key``.
    """
    jobs = _measured_jobs(comparison, key)
    y = scale(np.array([job.measured(key) for job in jobs], float))
    middle = abs(float(np.mean(y))) if scale is np.asarray and len(y) else 1.0
    if len(jobs) < FEWEST or np.ptp(y) < FLAT * middle:
        return {}
    found = {}
    for setting in comparison.varying:
        values = [number_format.format_value(job.run.varied_settings.get(setting)) for job in jobs]
        if (share := _variance_share(values, y)) is not None:
            found[setting] = share
    return found


def _measured_jobs(comparison: ReportComparison, key: str) -> list[ReportJob]:
    jobs = comparison.rank_jobs(key, False)
    return [job for job in jobs if (job.measured(key) or 0) > 0]


def _variance_share(values: Sequence[str], y: NDArray[np.float64]) -> float | None:
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
        x = _rank_values(np.array([float(value) for value in values]))
    except ValueError:
        return None
    r = float(np.corrcoef(x, _rank_values(y))[0, 1])
    return max(0.0, 1 - (1 - r**2) * (count - 1) / (count - 2))


def _rank_values(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns ranks from 0; those of equal values are their mean."""
    _, place, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    ranks: NDArray[np.float64] = (ends - (sizes + 1) / 2)[place]
    return ranks


def _is_full_grid(comparison: ReportComparison) -> bool:
    keys = list(comparison.varying)
    ran = {
        tuple(number_format.format_value(job.run.varied_settings.get(key)) for key in keys)
        for job in comparison.finished
    }
    return len(ran) == len(list(product(*(comparison.varying[key] for key in keys))))


def _finding_text(shares_by_target: dict[str, dict[str, float]]) -> str:
    leads: dict[str, list[str]] = {}
    for label, shares in shares_by_target.items():
        key = max(shares, key=lambda k: shares[k])
        if shares[key] >= LEADS:
            leads.setdefault(key, []).append(
                f"{number_format.format_percent(shares[key])} of {label}"
            )
    if not leads:
        share = number_format.format_percent(LEADS)
        return f"No one setting accounts for {share} of {' or of '.join(shares_by_target)}"
    return "; ".join(f"{key} accounts for {' and '.join(of)}" for key, of in leads.items())


def _importance_panel(target: _ImportanceTarget, shares: dict[str, float]) -> ChartPanel:
    bars = [
        StackedBar(
            key,
            (BarSegment(target.colour, 100 * shares[key], f"{key}: {text} of {target.label}"),),
            text,
        )
        for key in sorted(shares, key=lambda key: -shares[key])
        if (text := number_format.format_percent(shares[key]))
    ]
    picture = draw_both_widths(
        lambda width: charts.draw_stacks(bars, width, span=100),
        f"importance-{target.key.split('/')[0]}",
        f"Bars: share of the spread of {target.label} that goes with each setting.",
    )
    return ChartPanel(
        number_format.capitalize_first(target.label), "% of its spread, by setting", picture
    )
