"""What a config of another library becomes, what a run becomes there, and what is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from scalewise.errors import ConfigError, ConfigIssue, format_value
from scalewise.typed_override import command_line, override, shell_word

LIBRARIES = ("accelerate", "deepspeed")
"""Libraries whose configs are translated in both directions."""
AUTO = "auto"
"""Value of keys that Hugging Face's trainer fills in."""


@dataclass
class Translation:
    """Command line that an external config becomes."""

    overrides: dict[str, object] = field(default_factory=dict)
    """Value by config key, in the order of the command line."""
    torchrun: tuple[str, ...] = ()
    """Options of torchrun, which starts ranks on several nodes; empty: scalewise starts them."""
    notes: list[str] = field(default_factory=list)
    """Keys without a counterpart, each with its value and a reason."""
    issues: list[ConfigIssue] = field(default_factory=list)
    """Values that cannot be translated."""

    def note(self, key: str, value: object, reason: str) -> None:
        """Add a key without a counterpart."""
        self.notes.append(f"{key}={format_value(value)}: {reason}")

    def command(self) -> str:
        """Command line of a shell. Raises ``ConfigError`` if there are issues."""
        if self.issues:
            raise ConfigError(self.issues)
        words = [override(key, value) for key, value in self.overrides.items()]
        line = command_line("train", words)
        if not self.torchrun:
            return line
        return f"torchrun {' '.join(map(shell_word, self.torchrun))} -m {line}"


@dataclass
class ExternalConfig:
    """Config file of another library, and what it does not say."""

    values: dict[str, object] = field(default_factory=dict)
    """Content of the file."""
    notes: list[str] = field(default_factory=list)
    """Settings of the run without a counterpart in the file."""


class KeyReader:
    """Keys of an external config, each taken once; the remaining keys have no counterpart."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self._values, self._prefix = dict(values), prefix
        self._chosen_by_script: list[str] = []

    def take(self, key: str, default: object = None) -> object:
        """Take the value of a key; ``default`` for null, ``auto`` and a missing key."""
        value = self._values.pop(key, None)
        if value == AUTO:
            self._chosen_by_script.append(self._prefix + key)
        return default if value is None or value == AUTO else value

    def is_auto(self, key: str) -> bool:
        """Whether the training script chooses the value, as with Hugging Face's ``auto``."""
        return self._values.get(key) == AUTO

    def take_flag(self, key: str, *, default: bool = False) -> bool:
        """Take a boolean, which such configs also write as text."""
        value = self.take(key, default)
        if isinstance(value, str):
            return value.strip().lower() in ("true", "yes", "1")
        return bool(value)

    def take_number(self, key: str, default: float | None = None) -> float | None:
        """Take a number, which such configs also write as text.

        Raises ``ConfigError`` for any other value.
        """
        value = self.take(key, default)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        try:
            number = float(str(value))
        except ValueError:
            raise ConfigError.for_key(self._prefix + key, value, "is not a number") from None
        return int(number) if number.is_integer() else number

    def take_count(self, key: str, default: int = 1) -> int:
        """Take a positive integer. Raises ``ConfigError`` for any other value."""
        number = self.take_number(key, default)
        if number is None or number < 1 or number != int(number):
            raise ConfigError.for_key(self._prefix + key, number, "must be a positive integer")
        return int(number)

    def take_section(self, key: str) -> Self:
        """Take a nested mapping; an empty one if the key is missing.

        Raises ``ConfigError`` for a value that is no mapping.
        """
        value = self._values.pop(key, None)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise ConfigError.for_key(self._prefix + key, value, "must be a mapping")
        return type(self)(value, f"{self._prefix}{key}.")

    def remaining(self) -> Iterator[tuple[str, object]]:
        """Keys that nothing has taken, with their values; null values are left out."""
        for key, value in self._values.items():
            if value is not None:
                yield f"{self._prefix}{key}", value

    def note_remaining(
        self, translation: Translation, reasons: Mapping[str, str], ignored: Iterable[str] = ()
    ) -> None:
        """Note the keys that nothing has taken, with the reasons of known keys."""
        for key in self._chosen_by_script:
            translation.note(key, AUTO, "is the choice of the training script")
        for key, value in self.remaining():
            name = key.rsplit(".", 1)[-1]
            if name not in ignored:
                translation.note(key, value, reasons.get(name, "has no counterpart"))
