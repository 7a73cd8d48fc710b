"""Tables on a rich console that prints text without interpreting markup."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.text import Text

from scalewise.console import printable

WIDTH = 150
"""Columns of a table if stdout is not a terminal."""


class PlainConsole(Console):
    """Console that prints every ``str``, also in table cells, as one line of plain text.

    Styles come from ``style=`` arguments and :func:`styled_text` only, because the text may
    contain paths, overrides or replies of a server.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a text without markup, emoji codes, control characters and line breaks."""
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})


def styled_text(*parts: str | tuple[str, str]) -> Text:
    """One line of plain text parts, each with an optional style."""
    line = Text()
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        line.append(printable(text), style)
    return line


def get_console() -> PlainConsole:
    """Console for tables: as wide as the terminal, or ``WIDTH`` columns without one."""
    return PlainConsole(width=None if os.isatty(1) else WIDTH)
