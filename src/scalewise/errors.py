"""Exceptions and config issues: one line each with key, value, reason and fix; similar names."""

import difflib
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
"""Process exit code of each outcome; ``interrupted`` is 128 + the signal's number."""
DIFFERENT = 5
"""Process exit code of ``scalewise verify`` for a strategy that does not train like one device."""


MAX_VALUE_LENGTH = 120
"""Number of characters of a value that a config issue shows."""
EXPECTED_OPTIONS = {
    ("objective", "sft"): "objective=causal_lm data=chat",
    ("objective", "ppo"): "objective=grpo",
    ("optimizer", "deepspeed_cpu"): "parallelism=deepspeed_zero2_offload",
    ("optimizer", "paged"): "optimizer=adamw_paged",
    ("hydra/launcher", "joblib"): "hydra/launcher=packed",
}
"""Override to suggest for an option name of other libraries, by group and option."""
MAX_LISTED = 12
"""Maximum number of names to list if none is similar."""


@dataclass(frozen=True)
class ConfigIssue:
    """One config issue: a key whose value is rejected."""

    key: str
    """Dotted override key; empty for an issue of no single key."""
    value: object
    """Value of the key."""
    reason: str
    """Reason for the rejection, in the present tense."""
    fix: str = ""
    """Suggested fix: an override or an imperative."""

    def __str__(self) -> str:
        name = format_value(self.key)
        line = f"{name}={format_value(self.value)}: {self.reason}" if name else self.reason
        return printable(f"{line}; {self.fix}" if self.fix else line)


def format_value(value: object) -> str:
    """Format a value as in an override: ``null``, ``true``, ``[a,b]``; long values truncated."""
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
    """Base class of user errors: the CLI prints the message without a traceback."""

    exit_code = EXIT_CODES["failed"]


class ConfigError(ScalewiseError):
    """Rejected configuration, with all of its issues."""

    exit_code = EXIT_CODES["refused"]

    def __init__(self, issues: Iterable[ConfigIssue]) -> None:
        self.issues = tuple(issues)
        lines = [f"  - {issue}" for issue in self.issues]
        noun = "issue" if len(lines) == 1 else "issues"
        super().__init__("\n".join([f"config rejected, {len(lines)} {noun}:", *lines]))

    @classmethod
    def for_key(cls, key: str, value: object, reason: str, fix: str = "") -> Self:
        """Build the error of a single config issue."""
        return cls([ConfigIssue(key, value, reason, fix)])


class DataError(ConfigError):
    """Input data that training cannot use: missing, empty, truncated or out of vocabulary."""


class CheckpointError(ConfigError):
    """Checkpoint that cannot be loaded: truncated, of another program or of another model."""


class Interrupted(ScalewiseError):  # noqa: N818 (an outcome, not an error)
    """A signal ended the run; its training state is in a checkpoint."""

    def __init__(self, signal_number: int, message: str) -> None:
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
        super().__init__(message)


class Pruned(ScalewiseError):  # noqa: N818 (an outcome, named as in Optuna)
    """The pruner of the hyperparameter search ended this trial; its measurements are kept."""


def suggested_option(group: str, option: str, options: Iterable[str], prefix: str = "") -> str:
    """Suggest a replacement of an unknown option of a group."""
    expected = EXPECTED_OPTIONS.get((group, option))
    return f"set {expected} instead" if expected else did_you_mean(option, options, prefix)


def did_you_mean(text: str, options: Iterable[str], prefix: str = "") -> str:
    """Return ``did you mean PREFIXoption?``, or a list of the options if none is similar."""
    names = sorted(options)
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    listed = ", ".join(f"{prefix}{name}" for name in names[:MAX_LISTED])
    remaining = len(names) - MAX_LISTED
    more = f" and {remaining} more" if remaining > 0 else ""
    return f"available: {listed}{more}" if names else ""
