"""What can go wrong, said in one line: the key, the value and the cure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from scalewise.console import printable
from scalewise.redaction import redact

EXIT_CODES = {
    "ok": 0,
    "pruned": 0,
    "failed": 1,
    "refused": 2,
    "out_of_memory": 3,
    "timeout": 4,
}
"""Process exit code of each ending; ``interrupted`` is 128 + the signal's number."""


MAX_VALUE_LENGTH = 120
"""Characters of a value that a complaint shows."""


@dataclass(frozen=True)
class ConfigIssue:
    """One thing that is wrong with a configuration.

    ``key`` is the dotted override key, ``value`` what it holds, ``reason`` why that cannot be
    run and ``fix`` an override, or a short sentence, that mends it.
    """

    key: str
    value: object
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        name = format_value(self.key)
        line = f"{name}={format_value(self.value)}: {self.reason}" if name else self.reason
        return printable(f"{line}; {self.fix}" if self.fix else line)


def format_value(value: object) -> str:
    """Returns a value as an override spells it: ``null``, ``true``, ``[a,b]``; long ones cut."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        text = f"[{','.join(format_value(entry) for entry in value)}]"
    elif isinstance(value, dict):
        text = "{" + ",".join(f"{key}:{format_value(entry)}" for key, entry in value.items()) + "}"
    else:
        text = str(value)
    text = printable(redact(text), spaces=False)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."


class ScalewiseError(Exception):
    """Base of the errors that are meant for the user: printed as a message, never a traceback."""

    exit_code = EXIT_CODES["failed"]


class ConfigError(ScalewiseError):
    """A configuration that is rejected, with every issue of it."""

    exit_code = EXIT_CODES["refused"]

    def __init__(self, issues: Iterable[ConfigIssue]) -> None:
        self.issues = tuple(issues)
        lines = [f"  - {issue}" for issue in self.issues]
        noun = "problem" if len(lines) == 1 else "problems"
        super().__init__("\n".join([f"refused, {len(lines)} {noun}:", *lines]))

    @classmethod
    def for_key(cls, key: str, value: object, reason: str, fix: str = "") -> Self:
        """Returns the error of a single config issue."""
        return cls([ConfigIssue(key, value, reason, fix)])


class DataError(ConfigError):
    """Input data that cannot be trained on (missing, empty, truncated, out of vocabulary)."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be loaded (truncated, of another program or of another model)."""


class Interrupted(ScalewiseError):  # noqa: N818 (what happened, not an error of anyone)
    """A signal ended the run; what had been trained is in a checkpoint."""

    def __init__(self, signal_number: int, message: str) -> None:
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
        super().__init__(message)


class Pruned(ScalewiseError):  # noqa: N818 (what happened, as Optuna names it)
    """The study had seen enough of this trial; what it measured is kept."""
