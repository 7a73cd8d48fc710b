"""Goodput of a run with several attempts: useful time, and lost time by cause."""

from scalewise.goodput import CAUSES
from scalewise.reports import number_format
from scalewise.reports.compare import ReportJob
from scalewise.reports.sections import NumbersTable, ReportSection
from scalewise.units import format_seconds


def goodput_section(job: ReportJob) -> ReportSection | None:
    """Goodput section of a run; None for a single attempt."""
    goodput = job.run.goodput
    if goodput is None or goodput.attempts < 2:
        return None

    def cells(seconds: float) -> tuple[str, ...]:
        return format_seconds(seconds), f"{seconds / goodput.wall_s:.1%}"

    causes = sorted(goodput.lost_s.items(), key=lambda item: -item[1])
    rows = [("Training", cells(goodput.useful_s))]
    rows += [(CAUSES[cause], cells(seconds)) for cause, seconds in causes if seconds > 0]
    rows.append(("Wall time", cells(goodput.wall_s)))
    attempts = number_format.pluralize(goodput.attempts, "attempt")
    finding = f"{goodput.fraction:.0%} of {format_seconds(goodput.wall_s)} in {attempts}"
    return ReportSection(
        "goodput",
        "Goodput",
        finding,
        (),
        numbers=NumbersTable("time of", ("time", "share"), tuple(rows)),
        explanation=(
            "Goodput is the time of the steps that no later attempt trained again, over the wall "
            "time since the first attempt started. A killed attempt is known up to its last log "
            "interval.",
        ),
    )
