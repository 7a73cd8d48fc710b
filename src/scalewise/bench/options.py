"""What a benchmark lets one choose: ``key=value`` beside the overrides of the run it measures."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.run_config import RunConfig

_BOOLEANS = {"true": True, "false": False}
_WANTED = {int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class BenchOptions:
    """What every benchmark lets one choose."""

    record: bool = False
    """Whether the result is written into ``experiments/records`` as well."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields what cannot be measured: every number must be positive."""
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            counts = isinstance(value, int | float) and not isinstance(value, bool)
            if counts and not value > 0:
                yield ConfigIssue(entry.name, value, "must be positive")


class Benchmark(Protocol):
    """A module of this package that ``scalewise bench`` runs."""

    OPTIONS: type[BenchOptions]
    RUNS: Mapping[str, tuple[str, ...]]
    """The runs that are measured, as overrides, by a name for each.

    A module may have ``WORLDS`` as well: runs that no machine here must have the devices for.
    """

    def measure(
        self, runs: Mapping[str, RunConfig], options: Any, folder: Path
    ) -> dict[str, object]:
        """Measures into ``folder``, prints what it finds and returns it."""


def split_options(
    arguments: Sequence[str], options_type: type[BenchOptions]
) -> tuple[BenchOptions, list[str]]:
    """Returns the options among the words, and the other words: the overrides of a run.

    Raises ``ConfigError`` with every complaint about an option.
    """
    hints = typing.get_type_hints(options_type)
    types = {key: (typing.get_args(hint) or (hint,))[0] for key, hint in hints.items()}
    values: dict[str, Any] = {}
    rest: list[str] = []
    wrong: list[ConfigIssue] = []
    for word in arguments:
        key, _, text = word.partition("=")
        if key not in types:
            close = difflib.get_close_matches(key, types, n=1, cutoff=0.7)
            if close and "." not in key:
                wrong.append(ConfigIssue(key, text, "no such key", f"did you mean {close[0]}?"))
            rest.append(word)
            continue
        try:
            values[key] = _BOOLEANS[text] if types[key] is bool else types[key](text)
        except (KeyError, ValueError):
            wrong.append(ConfigIssue(key, text, f"is not {_WANTED[types[key]]}"))
    options = options_type(**values)
    if wrong := [*wrong, *options.validate()]:
        raise ConfigError(wrong)
    return options, rest
