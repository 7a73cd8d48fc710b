"""Parameter importance: share of the variance of a result explained by each setting alone."""

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

MIN_JOBS = 4
"""Minimum number of jobs."""
MIN_LEADING_SHARE = 0.3
"""Share from which the heading names a setting."""
MIN_SPREAD = 0.005
"""Relative range of a result below which no share is computed."""


@dataclass(frozen=True)
class _ImportanceTarget:
    key: str
    label: str
    color: str
    scale: Callable[[NDArray[np.float64]], NDArray[np.float64]]


TARGETS = (
    _ImportanceTarget(STEP, "step time", "--t-bwd", np.log),
    _ImportanceTarget(PEAK, "peak memory", "--m-params", np.log),
    _ImportanceTarget(LOSS, "train loss", "--m-act", np.asarray),
)


def importance_section(comparison: ReportComparison) -> ReportSection | None:
    """Importance section; ``None`` below two settings or :data:`MIN_JOBS` jobs."""
    shares_by_target = {
        target: shares
        for target in TARGETS
        if len(shares := variance_shares(comparison, target.key, target.scale)) > 1
    }
    if not shares_by_target:
        return None
    largest: dict[str, float] = {}
    for shares in shares_by_target.values():
        for key, share in shares.items():
            largest[key] = max(share, largest.get(key, 0.0))
    keys = sorted(largest, key=lambda key: -largest[key])
    notes = []
    if not _is_full_grid(comparison):
        notes.append("Not all combinations ran: settings that vary together share their variance.")
    count = min(len(_measured_jobs(comparison, target.key)) for target in shares_by_target)
    notes.append(
        f"From {number_format.pluralize(count, 'job')}; the rest of the variance is due to "
        "interactions and noise."
    )
    return ReportSection(
        "importance",
        "Parameter importance",
        _finding_text({target.label: shares for target, shares in shares_by_target.items()}),
        tuple(_importance_panel(target, shares) for target, shares in shares_by_target.items()),
        notes=tuple(notes),
        numbers=NumbersTable(
            "setting",
            tuple(target.label for target in shares_by_target),
            tuple(
                (
                    key,
                    tuple(
                        number_format.format_percent(shares.get(key))
                        for shares in shares_by_target.values()
                    ),
                )
                for key in keys
            ),
        ),
        explanation=(
            "Share of the variance explained by one setting alone, adjusted for chance (epsilon "
            "squared); of the logarithm for time and memory.",
        ),
        wandb_panels=tuple(
            TitledPanel(
                f"Parameter importance for {t.label}", ImportancePanel(SummaryNumber(t.key))
            )
            for t in shares_by_target
        ),
    )


def variance_shares(
    comparison: ReportComparison,
    key: str,
    scale: Callable[[NDArray[np.float64]], NDArray[np.float64]] = np.asarray,
) -> dict[str, float]:
    """Share of the variance of ``key`` explained by each varied setting, 0 to 1.

    For a setting whose values are shared by several jobs, the share is epsilon squared of the
    analysis of variance (T. L. Kelley, 1935): the variance between groups, less its expectation by
    chance. For a numeric setting with mostly distinct values, it is the squared Spearman rank
    correlation with the same adjustment. A setting for which neither applies is omitted. The
    result is empty if ``key`` hardly varies.
    """
    jobs = _measured_jobs(comparison, key)
    y = scale(np.array([job.measured(key) for job in jobs], float))
    scale_of_y = abs(float(np.mean(y))) if scale is np.asarray and len(y) else 1.0
    if len(jobs) < MIN_JOBS or np.ptp(y) < MIN_SPREAD * scale_of_y:
        return {}
    shares = {}
    for setting in comparison.varying:
        values = [number_format.format_value(job.run.varied_settings.get(setting)) for job in jobs]
        if (share := _variance_share(values, y)) is not None:
            shares[setting] = share
    return shares


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
    """Ranks from 0; equal values share their mean rank."""
    _, inverse, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    ranks: NDArray[np.float64] = (ends - (sizes + 1) / 2)[inverse]
    return ranks


def _is_full_grid(comparison: ReportComparison) -> bool:
    keys = list(comparison.varying)
    combinations = {
        tuple(number_format.format_value(job.run.varied_settings.get(key)) for key in keys)
        for job in comparison.finished
    }
    return len(combinations) == len(list(product(*(comparison.varying[key] for key in keys))))


def _finding_text(shares_by_target: dict[str, dict[str, float]]) -> str:
    leading: dict[str, list[str]] = {}
    for label, shares in shares_by_target.items():
        key = max(shares, key=lambda k: shares[k])
        if shares[key] >= MIN_LEADING_SHARE:
            leading.setdefault(key, []).append(
                f"{number_format.format_percent(shares[key])} of {label}"
            )
    if not leading:
        share = number_format.format_percent(MIN_LEADING_SHARE)
        return f"No single setting explains {share} of {' or of '.join(shares_by_target)}"
    return "; ".join(f"{key} explains {' and '.join(of)}" for key, of in leading.items())


def _importance_panel(target: _ImportanceTarget, shares: dict[str, float]) -> ChartPanel:
    bars = [
        StackedBar(
            key,
            (BarSegment(target.color, 100 * shares[key], f"{key}: {text} of {target.label}"),),
            text,
        )
        for key in sorted(shares, key=lambda key: -shares[key])
        if (text := number_format.format_percent(shares[key]))
    ]
    picture = draw_both_widths(
        lambda width: charts.draw_stacks(bars, width, span=100),
        f"importance-{target.key.split('/')[0]}",
        f"Bars: share of the variance of {target.label} explained by each setting.",
    )
    return ChartPanel(
        number_format.capitalize_first(target.label), "% of variance, by setting", picture
    )
