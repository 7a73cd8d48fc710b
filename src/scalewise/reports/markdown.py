"""Markdown rendering of report texts, with all Markdown syntax from files escaped."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser

from markupsafe import Markup

_ACTIVE = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&^])")
_LEADING = re.compile(r"^(\s*\d*)([-=.])(?=\s|$)")


class _BoldParser(HTMLParser):
    """Converts HTML to Markdown text with ``<b>`` as bold; other tags are dropped."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "b":
            self.text.append("**")

    def handle_endtag(self, tag: str) -> None:
        if tag == "b":
            self.text.append("**")

    def handle_data(self, data: str) -> None:
        self.text.append(_escape(data))


def to_markdown(text: str | Markup) -> str:
    """Convert a report text to one line of Markdown."""
    if not isinstance(text, Markup):
        return _escape(text)
    parser = _BoldParser()
    parser.feed(str(text))
    parser.close()
    return "".join(parser.text)


def _escape(raw: str) -> str:
    line = re.sub(r"\s*\n\s*", " ", raw)
    return _LEADING.sub(r"\1\\\2", _ACTIVE.sub(r"\\\1", line))


def to_plain_text(text: str | Markup) -> str:
    """Convert a report text to plain text."""
    return text.striptags() if isinstance(text, Markup) else text


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True
) -> str:
    """Build a Markdown table of cells in Markdown.

    With ``numbers``, all columns but the first are right-aligned.
    """
    alignment = "---:" if numbers else ":---"
    lines = [heads, [":---", *([alignment] * (len(heads) - 1))], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown_list(lines: Sequence[str | Markup]) -> str:
    """Build a Markdown list of report texts."""
    return "\n".join(f"- {to_markdown(line)}" for line in lines)


def fenced_block(code: str) -> str:
    """Wrap a command or log lines in a code fence."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{code}\n{fence}"


def markdown_link(text: str, url: str) -> str:
    """Build a Markdown link to an http(s) URL."""
    return f"[{to_markdown(text)}](<{url.replace('<', '%3C').replace('>', '%3E')}>)"
