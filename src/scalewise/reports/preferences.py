"""How often jobs prefer the better of two answers, beside the model before it was trained."""

from collections.abc import Callable, Mapping, Sequence

from scalewise.reports import charts, number_format
from scalewise.reports.chart_layout import ChartDrawing, draw_both_widths
from scalewise.reports.charts import CurveLine
from scalewise.reports.compare import CHANCE, PREFERRED, SHOWN, ReportJob, finite_series, lttb
from scalewise.reports.records import MetricSeries
from scalewise.reports.sections import ChartPanel, ReportSection
from scalewise.reports.wandb_panels import CurvesPanel, TitledPanel

UNTRAINED = (
    "Before training a model rewards no answer above another, being its own reference: it is right "
    "in half of the pairs."
)


def preference_section(jobs: Sequence[ReportJob]) -> ReportSection | None:
    """Returns the share of held-out pairs that are preferred rightly, over the steps."""
    curves = {job: finite_series(job.run.series.get(PREFERRED, MetricSeries())) for job in jobs}
    known = {job: curve for job, curve in curves.items() if curve.steps}
    if not known:
        return None
    last = max(curve.steps[-1] for curve in known.values())
    chance = CurveLine(
        ((0, CHANCE), (last, CHANCE)),
        f"untrained {number_format.format_percent(CHANCE)}",
        tip="untrained",
        faint=True,
    )
    lines = [chance, *outcome_labels(known, number_format.format_percent)]

    def draw(width: int) -> ChartDrawing:
        return charts.draw_curves(lines, width, side_note=max((it.label for it in lines), key=len))

    told = "Points: share of held-out pairs that are preferred rightly, over the steps."
    panel = ChartPanel(
        "Preference accuracy", "share of held-out pairs", draw_both_widths(draw, "preferred", told)
    )
    return ReportSection(
        "preferred",
        "Preferences",
        _finding_text(known),
        (panel,),
        notes=(UNTRAINED,),
        live=(TitledPanel("Preference accuracy", CurvesPanel((PREFERRED,))),),
    )


def outcome_labels(
    curves: Mapping[ReportJob, MetricSeries], format_label: Callable[[float], str]
) -> list[CurveLine]:
    """Returns the lines of jobs, with what is ``format_label`` of their ends beside them."""
    lines = []
    for job, curve in curves.items():
        kept = lttb(curve, 60)
        name = f"{job.name} " if len(curves) > 1 else ""
        label = f"{name}{format_label(curve.values[-1])}" if len(curves) <= SHOWN else ""
        points = tuple(zip(kept.steps, kept.values, strict=True))
        colours = (f"--c-{job.group}", f"--ct-{job.group}")
        lines.append(CurveLine(points, label, *colours, job.name, dots=True))
    return lines


def _finding_text(curves: dict[ReportJob, MetricSeries]) -> str:
    ends = sorted(curve.values[-1] for curve in curves.values())
    span = number_format.format_range(
        number_format.format_percent(ends[0]), number_format.format_percent(ends[-1])
    )
    way = "more" if ends[0] > CHANCE else "not more" if ends[-1] <= CHANCE else "not always more"
    return f"Held-out pairs are preferred rightly in {span}, {way} than untrained"
