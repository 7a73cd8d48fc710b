"""SVG rendering of an Altair chart for inclusion in an HTML page.

Charts use CSS variables as colors, so that one SVG serves the light and the dark theme. Vega counts
its ids per process: they are prefixed to be unique on the page. Roles and fonts on each mark
are dropped, as the page sets both once; the description of a mark becomes its ``data-tip``.
"""

import html
import re
from collections.abc import Mapping
from typing import Any

import altair as alt

from scalewise.reports import renderer

_VERSION = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
_HEAD = re.compile(r"^<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>")
_DROPPED_ATTRIBUTES = re.compile(
    r" (?:role|aria-roledescription|font-family|pointer-events|aria-hidden|stroke-miterlimit)"
    r"=\"[^\"]*\""
    r"| opacity=\"1\"| stroke-opacity=\"1\"| class=\"[^\"]*\""
)
_EMPTY_PATH = re.compile(r"<path(?=[^>]*? d=\"(?:M0,0h0v0h0Z)?\")[^>]*/>")
_BACKGROUND = re.compile(r"<path class=\"background\"[^>]*/>")
_EMPTY_GROUP = re.compile(r"<g(?: transform=\"translate\(0,0\)\")?>\s*</g>|<g></g>")
_TIP_LABEL = re.compile(r"(<(?:path|circle|rect|line)[^>]*?) aria-label=")
_OTHER_LABEL = re.compile(r" aria-label=\"[^\"]*\"")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}(?:e-?\d+)?")
_GEOMETRY = re.compile(r" (?:d|transform|x|y|x2|y2|width|height|cx|cy|r)=\"[^\"]*\"")
_SURROGATE_PAIR = re.compile("[\ud800-\uf8ff\U00010000-\U0010ffff]")
_PRIVATE_USE_AREA = range(0xE000, 0xF900)
_REPLACEMENT = "\ufffd"
_ID = re.compile(r"(\bid=\"|url\(#|href=\"#)")


def render_svg(
    chart: alt.LayerChart, tables: Mapping[str, list[dict[str, Any]]], anchor: str, sentence: str
) -> str:
    """Render a chart as SVG text.

    Args:
        chart: The chart.
        tables: Its data tables by name.
        anchor: Prefix of the ids, unique on the page.
        sentence: Description for screen readers.
    """
    spec: dict[str, Any] = chart.to_dict() | {"datasets": dict(tables)}
    spec, restored = _replace_surrogate_pairs(spec)
    raw = renderer.svg(spec, _VERSION).translate(restored)
    head = _HEAD.match(raw)
    if head is None:
        raise AssertionError("the renderer's SVG has no viewBox")
    body = _EMPTY_PATH.sub("", _BACKGROUND.sub("", raw[head.end() :]))
    body = _DROPPED_ATTRIBUTES.sub("", body)
    body = _OTHER_LABEL.sub("", _TIP_LABEL.sub(r"\1 data-tip=", body))
    body = _GEOMETRY.sub(lambda match: _LONG_NUMBER.sub(_round_numbers, match[0]), body)
    body = _ID.sub(rf"\g<1>{anchor}-", body)
    while (shorter := _EMPTY_GROUP.sub("", body)) != body:
        body = shorter
    width = head[1].split()[2]
    return (
        f'<svg style="max-width:{width}px" role="img" aria-label="{html.escape(sentence)}"'
        f' viewBox="{head[1]}">{body}'
    )


def _replace_surrogate_pairs(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
    """Replace characters outside the basic plane, and return the table that restores them.

    Vega truncates a long label between the two UTF-16 units of an emoji and then fails to parse it.
    """
    replacements: dict[int, str] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {replaced(key): replaced(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [replaced(entry) for entry in value]
        return _SURROGATE_PAIR.sub(replacement, value) if isinstance(value, str) else value

    def replacement(match: re.Match[str]) -> str:
        character = ord(match[0])
        if character not in replacements and len(replacements) == len(_PRIVATE_USE_AREA):
            return _REPLACEMENT
        return replacements.setdefault(character, chr(_PRIVATE_USE_AREA[len(replacements)]))

    content = replaced(spec)
    surrogates = range(0xD800, 0xE000)
    return content, {
        ord(unit): _REPLACEMENT if character in surrogates else chr(character)
        for character, unit in replacements.items()
    }


def _round_numbers(match: re.Match[str]) -> str:
    text = f"{float(match[0]):.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
