"""YAML of files that anybody may have written: aliases and nesting are bounded before it is read.

Nine lists of nine aliases each are a few hundred bytes and a billion entries once something walks
through them. Nesting of some ten thousand brackets crashes the parser in C.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_ENTRIES = 200_000
"""Scalars and containers of a file, those behind an alias counted at each place."""
MAX_DEPTH = 100
"""Containers inside each other."""


class YamlLimitError(yaml.YAMLError):
    """A file that is larger than any config, or refers to itself."""


def load_yaml(text: str) -> Any:
    """Returns the content of a YAML document of plain values; raises ``yaml.YAMLError``."""
    check_bounds(text)
    return yaml.load(text, Loader=_SAFE_LOADER)  # noqa: S506 (a safe loader)


def check_bounds(text: str) -> None:
    """Raises ``UnboundedError`` for a document with too many entries, or nested too deep."""
    if (
        "&" not in text
        and text.count("[") + text.count("{") < MAX_DEPTH
        and len(text) < MAX_ENTRIES
    ):
        return
    sizes: dict[str, int] = {}
    open_containers: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=_SAFE_LOADER):
        anchor, size = getattr(event, "anchor", None), 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_containers.append((anchor, 1))
            if len(open_containers) > MAX_DEPTH:
                raise YamlLimitError(f"is nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_containers.pop()
        elif isinstance(event, yaml.AliasEvent):
            if anchor not in sizes:
                raise YamlLimitError(f"refers to itself, or to what is not there, by *{anchor}")
            size = sizes[anchor]
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        if size:
            if anchor is not None:
                sizes[anchor] = size
            outer, held = open_containers[-1]
            open_containers[-1] = outer, held + size
            if held + size > MAX_ENTRIES:
                raise YamlLimitError(f"has more than {MAX_ENTRIES:,} entries, with its aliases")


_SAFE_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
