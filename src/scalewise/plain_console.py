"""A rich console on which text is never markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from scalewise.console import printable


class PlainConsole(Console):
    """Prints every ``str``, also in a table's cell or header, as plain text of one line.

    Styles come from ``style=`` arguments and from :func:`styled` alone: the text may hold paths,
    overrides or answers of a server.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns a text without markup, emoji codes, control characters and line breaks."""
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})


def styled_text(*parts: str | tuple[str, str]) -> Text:
    """Returns one line of plain texts, each with a style where one is given."""
    line = Text()
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        line.append(printable(text), style)
    return line
