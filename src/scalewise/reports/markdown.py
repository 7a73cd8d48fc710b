"""Writes the texts of an outline as Markdown, in which nothing that came from a file has power."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser

from markupsafe import Markup

_ACTIVE = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&^])")
_LEADING = re.compile(r"^(\s*\d*)([-=.])(?=\s|$)")


class _BoldParser(HTMLParser):
    """Keeps the text of HTML, and the bold of it."""

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
    """Returns a text of an outline as one line of Markdown."""
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
    """Returns a text of an outline without any form."""
    return text.striptags() if isinstance(text, Markup) else text


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True
) -> str:
    """Returns a table of Markdown; its cells are Markdown, all but the first column to the right.

    ``numbers``: whether columns but the first hold numbers.
    """
    side = "---:" if numbers else ":---"
    lines = [heads, [":---", *([side] * (len(heads) - 1))], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown_list(lines: Sequence[str | Markup]) -> str:
    """Returns texts of an outline as a list."""
    return "\n".join(f"- {to_markdown(line)}" for line in lines)


def fenced_block(code: str) -> str:
    """Returns what stands as it is: a command, lines of a log."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{code}\n{fence}"


def markdown_link(text: str, url: str) -> str:
    """Returns a link; ``url`` is a web address."""
    return f"[{to_markdown(text)}](<{url.replace('<', '%3C').replace('>', '%3E')}>)"
