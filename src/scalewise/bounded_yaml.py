"""YAML of untrusted files: aliases and nesting are bounded before the document is loaded.

Nine lists of nine aliases each take a few hundred bytes and expand to a billion entries. Some ten
thousand nested brackets crash the parser in C.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_ENTRIES = 200_000
"""Maximum number of scalars and containers, with each use of an alias counted in full."""
MAX_DEPTH = 100
"""Maximum number of nested containers."""


class YamlLimitError(yaml.YAMLError):
    """A document that exceeds the limits, or an alias that cannot be resolved."""


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document of plain values; raises ``yaml.YAMLError``."""
    check_bounds(text)
    return yaml.load(text, Loader=_SAFE_LOADER)  # noqa: S506 (a safe loader)


def check_bounds(text: str) -> None:
    """Raise ``YamlLimitError`` for a document with too many entries or too deep nesting."""
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
                raise YamlLimitError(
                    f"has an alias *{anchor} to itself, or to an anchor that does not exist"
                )
            size = sizes[anchor]
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        if size:
            if anchor is not None:
                sizes[anchor] = size
            parent_anchor, parent_size = open_containers[-1]
            open_containers[-1] = parent_anchor, parent_size + size
            if parent_size + size > MAX_ENTRIES:
                raise YamlLimitError(f"has more than {MAX_ENTRIES:,} entries, with its aliases")


_SAFE_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
