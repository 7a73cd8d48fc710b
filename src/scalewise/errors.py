"""What can go wrong, said in one line: the key, the value and the cure. Stdlib only."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

EXIT_CODES = {
    "ok": 0,
    "failed": 1,
    "refused": 2,
    "out_of_memory": 3,
    "timeout": 4,
}
"""Process exit code of each ending; ``interrupted`` is 128 + the signal's number."""


@dataclass(frozen=True)
class Complaint:
    """One thing that is wrong with a configuration.

    ``key`` is the dotted override key, ``value`` what it holds, ``reason`` why that cannot be
    run and ``cure`` an override, or a short sentence, that mends it.
    """

    key: str
    value: object
    reason: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.key}={self.value}: {self.reason}" if self.key else self.reason
        return f"{line}; {self.cure}" if self.cure else line


class ScalewiseError(Exception):
    """Base of the errors that are meant for the user: printed as a message, never a traceback."""

    exit_code = EXIT_CODES["failed"]


class ConfigError(ScalewiseError):
    """A configuration that is refused, with every complaint about it."""

    exit_code = EXIT_CODES["refused"]

    def __init__(self, complaints: Iterable[Complaint]) -> None:
        self.complaints = tuple(complaints)
        lines = [f"  - {complaint}" for complaint in self.complaints]
        noun = "problem" if len(lines) == 1 else "problems"
        super().__init__("\n".join([f"refused, {len(lines)} {noun}:", *lines]))

    @classmethod
    def one(cls, key: str, value: object, reason: str, cure: str = "") -> Self:
        """Returns the error of a single complaint."""
        return cls([Complaint(key, value, reason, cure)])


class DataError(ConfigError):
    """Input data that cannot be trained on (missing, empty, truncated, out of vocabulary)."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be loaded (truncated, foreign, of another model)."""


class OutOfMemory(ScalewiseError):
    """The device or the host had no memory left."""

    exit_code = EXIT_CODES["out_of_memory"]


class Interrupted(ScalewiseError):
    """A signal ended the run; what had been trained is in a checkpoint."""

    def __init__(self, signal_number: int, message: str) -> None:
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
        super().__init__(message)
