"""Hydra's command-line flags and launchers, and the overrides next to them."""

import io
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr

from hydra._internal.utils import get_args_parser

from scalewise.config.near import meant
from scalewise.errors import Complaint, ConfigError


def overrides_first(arguments: Sequence[str]) -> list[str]:
    """Returns the overrides, then Hydra's flags with their values.

    Hydra takes overrides in one piece alone: a flag between two of them makes the rest unknown.
    """
    words = [_Argument(argument) for argument in arguments]
    for place, word in enumerate(words):
        if word in ("--info", "-i") and words[place + 1 : place + 2] and "=" in words[place + 1]:
            words[place] = _Argument("--info=all")  # else Hydra reads an override as its value
    overrides = flags_of(words).overrides
    flags = [word for word in words if not any(word is override for override in overrides)]
    return [*map(str, overrides), *map(str, flags)]


class _Argument(str):
    """An argument that is told from an equal one by its identity."""

    __slots__ = ()


def flags_of(arguments: Sequence[str]) -> Namespace:
    """Returns Hydra's flags and the overrides, in any order.

    Raises ``ConfigError`` for a flag that Hydra lacks.
    """
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return get_args_parser().parse_intermixed_args(list(arguments))
    except SystemExit as error:
        reason = said.getvalue().strip().rpartition("error: ")[2]
        cure = "flags are -m, --cfg job, --info, -cd DIR, and Hydra's others (--hydra-help)"
        raise ConfigError.one("", "", reason, cure) from error


def launcher_complaints(launcher: str) -> Iterator[Complaint]:
    """Yields a launcher of others, whose jobs would be neither validated nor recorded."""
    from hydra_plugins.scalewise_launcher import LAUNCHERS

    if launcher not in LAUNCHERS:
        reason = (
            "is not the suite's: no check before the first job starts, no record of how they end"
        )
        cure = meant(launcher, LAUNCHERS, "hydra/launcher=")
        if not cure.startswith("did you mean"):
            cure = f"choose one of hydra/launcher={', '.join(LAUNCHERS)}"
        yield Complaint("hydra/launcher", launcher, reason, cure)
