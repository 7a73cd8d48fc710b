"""Turns an Altair chart into an SVG to put inside a page: small, themed by the page, unambiguous.

The chart names CSS variables as colours, so one picture serves the light and the dark theme. Vega's
ids count up in a process and would cross between charts: they are prefixed. Its roles and fonts on
each mark are dropped (the page says both once); a mark's description becomes its ``data-tip``.
"""

import html
import re
from collections.abc import Mapping
from typing import Any

import altair as alt

from scalewise.reports import renderer

_VERSION = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
_HEAD = re.compile(r"^<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>")
_DROPPED = re.compile(
    r" (?:role|aria-roledescription|font-family|pointer-events|aria-hidden|stroke-miterlimit)"
    r"=\"[^\"]*\""
    r"| opacity=\"1\"| stroke-opacity=\"1\"| class=\"[^\"]*\""
)
_EMPTY = re.compile(r"<path(?=[^>]*? d=\"(?:M0,0h0v0h0Z)?\")[^>]*/>")
_FRAME = re.compile(r"<path class=\"background\"[^>]*/>")
_HOLLOW = re.compile(r"<g(?: transform=\"translate\(0,0\)\")?>\s*</g>|<g></g>")
_TIP = re.compile(r"(<(?:path|circle|rect|line)[^>]*?) aria-label=")
_LABEL = re.compile(r" aria-label=\"[^\"]*\"")
_LONG = re.compile(r"-?\d+\.\d{2,}(?:e-?\d+)?")
_GEOMETRY = re.compile(r" (?:d|transform|x|y|x2|y2|width|height|cx|cy|r)=\"[^\"]*\"")
_PAIRED = re.compile("[\ud800-\uf8ff\U00010000-\U0010ffff]")
_PRIVATE = range(0xE000, 0xF900)
_UNREADABLE = "\ufffd"
_ID = re.compile(r"(\bid=\"|url\(#|href=\"#)")


def render_svg(
    chart: alt.LayerChart, tables: Mapping[str, list[dict[str, Any]]], ident: str, sentence: str
) -> str:
    """Returns ``chart`` of the named ``tables`` as SVG text.

    ``ident`` is unique on the page; ``sentence`` says what the picture shows to who cannot see it.
    """
    spec: dict[str, Any] = chart.to_dict() | {"datasets": dict(tables)}
    spec, restored = _replace_surrogate_pairs(spec)
    raw = renderer.svg(spec, _VERSION).translate(restored)
    head = _HEAD.match(raw)
    if head is None:
        raise AssertionError("the renderer wrote no viewBox")
    body = _EMPTY.sub("", _FRAME.sub("", raw[head.end() :]))
    body = _DROPPED.sub("", body)
    body = _LABEL.sub("", _TIP.sub(r"\1 data-tip=", body))
    body = _GEOMETRY.sub(lambda found: _LONG.sub(_round_numbers, found[0]), body)
    body = _ID.sub(rf"\g<1>{ident}-", body)
    while (shorter := _HOLLOW.sub("", body)) != body:
        body = shorter
    width = head[1].split()[2]
    return (
        f'<svg style="max-width:{width}px" role="img" aria-label="{html.escape(sentence)}"'
        f' viewBox="{head[1]}">{body}'
    )


def _replace_surrogate_pairs(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
    """Returns a spec of one UTF-16 unit per character, and a table to translate its picture back.

    Vega cuts a long label between the two units of an emoji, and cannot read what is left.
    """
    stand_ins: dict[int, str] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {replaced(key): replaced(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [replaced(entry) for entry in value]
        return _PAIRED.sub(stand_in, value) if isinstance(value, str) else value

    def stand_in(found: re.Match[str]) -> str:
        character = ord(found[0])
        if character not in stand_ins and len(stand_ins) == len(_PRIVATE):
            return _UNREADABLE
        return stand_ins.setdefault(character, chr(_PRIVATE[len(stand_ins)]))

    content = replaced(spec)
    surrogates = range(0xD800, 0xE000)
    return content, {
        ord(unit): _UNREADABLE if character in surrogates else chr(character)
        for character, unit in stand_ins.items()
    }


def _round_numbers(match: re.Match[str]) -> str:
    text = f"{float(match[0]):.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
