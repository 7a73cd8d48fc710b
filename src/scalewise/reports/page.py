"""HTML rendering of a report: ``report.html``, without network access and reproducible."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scalewise.reports import records, report_model, summary_sentences, summary_tables
from scalewise.reports.report_model import ReportModel
from scalewise.run_files import write_text

FILE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"


def write_page(folder: Path) -> Path:
    """Write ``report.html`` of the run or sweep in ``folder`` and return its path.

    Raises :class:`scalewise.errors.ScalewiseError` if ``folder`` holds neither.
    """
    return save_page(report_model.build_report(records.read_record(folder)), folder)


def save_page(report: ReportModel, folder: Path) -> Path:
    """Write ``report`` to ``report.html`` in ``folder`` atomically and return its path."""
    path = folder / FILE
    write_text(path, build_page(report))
    return path


def build_page(report: ReportModel) -> str:
    """Render ``report`` as HTML."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        status_word=summary_sentences.status_word, glyph=summary_tables.status_glyph
    )
    return str(environment.get_template("page.html.j2").render(report=report))
