"""Writes ``report.html``: one file, no network, the same bytes for the same records."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scalewise.reports import findings, outline, overview, records
from scalewise.reports.outline import Outline
from scalewise.tracking.files import write_text

FILE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"


def write(folder: Path) -> Path:
    """Writes the page of the run or sweep in ``folder`` and returns its path.

    Raises :class:`scalewise.errors.ScalewiseError` where it holds neither.
    """
    return save(outline.of(records.read(folder)), folder)


def save(report: Outline, folder: Path) -> Path:
    """Writes ``report`` as a page into ``folder``, whole or not at all, and returns its path."""
    path = folder / FILE
    write_text(path, build(report))
    return path


def build(report: Outline) -> str:
    """Returns the HTML of ``report``."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(status_word=findings.status_word, glyph=overview.glyph)
    return str(environment.get_template("page.html.j2").render(report=report))
