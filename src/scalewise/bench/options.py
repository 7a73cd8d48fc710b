"""Options of a benchmark, as ``KEY=VALUE`` next to the overrides of the runs that it measures."""

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
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class BenchOptions:
    """Options of every benchmark."""

    record: bool = False
    """Whether the result is also written to ``experiments/records``."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of numbers that are not positive."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not value > 0:
                yield ConfigIssue(field.name, value, "must be positive")


class Benchmark(Protocol):
    """Interface of a benchmark module, which ``scalewise bench`` runs."""

    OPTIONS: type[BenchOptions]
    """Class of the options."""
    RUNS: Mapping[str, tuple[str, ...]]
    """Overrides of the measured runs, by name.

    A module may also define ``WORLDS``: runs that do not need the devices they are configured for.
    """

    def measure(
        self, runs: Mapping[str, RunConfig], options: Any, folder: Path
    ) -> dict[str, object]:
        """Measure in ``folder``, print the results and return the record."""


def split_options(
    arguments: Sequence[str], options_type: type[BenchOptions]
) -> tuple[BenchOptions, list[str]]:
    """Split command-line arguments into benchmark options and overrides of the runs.

    Raises:
        ConfigError: with all issues of the options.
    """
    hints = typing.get_type_hints(options_type)
    types = {key: (typing.get_args(hint) or (hint,))[0] for key, hint in hints.items()}
    values: dict[str, Any] = {}
    overrides: list[str] = []
    issues: list[ConfigIssue] = []
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in types:
            close = difflib.get_close_matches(key, types, n=1, cutoff=0.7)
            if close and "." not in key:
                issues.append(ConfigIssue(key, text, "no such key", f"did you mean {close[0]}?"))
            overrides.append(argument)
            continue
        try:
            values[key] = _BOOLEANS[text] if types[key] is bool else types[key](text)
        except (KeyError, ValueError):
            issues.append(ConfigIssue(key, text, f"is not {_TYPE_NAMES[types[key]]}"))
    options = options_type(**values)
    if issues := [*issues, *options.validate()]:
        raise ConfigError(issues)
    return options, overrides
