"""Unexpected exceptions as one line: type, message and place."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from scalewise.atomic import disk_full_reason
from scalewise.console import print_lines
from scalewise.errors import Interrupted, ScalewiseError
from scalewise.redaction import redact

MAX_MESSAGE_LENGTH = 2000
"""Characters of a message that are kept."""


def describe_exception(error: BaseException) -> str:
    """Returns ``Type: message (file:line in function)``; the place is that of the user's code."""
    line = f"{type(error).__name__}: {exception_message(error)}"
    place = user_frame(error)
    return f"{line} ({place})" if place else line


def exception_message(error: BaseException) -> str:
    """Returns the message of an exception in one line, its type's name where it has none."""
    text = str(error)
    if (lacking := disk_full_reason(error)) is not None:
        text = "; ".join([text, *lacking])
    return redact(" ".join(text.split()))[:MAX_MESSAGE_LENGTH] or type(error).__name__


def user_frame(error: BaseException) -> str:
    """Returns the innermost place outside of installed packages; empty where there is none."""
    folders = _installed_folders()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in folders):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def _installed_folders() -> list[Path]:
    """Returns the folders of Python, of what is installed, and of scalewise itself."""
    own = Path(__file__).parent
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [
        *(Path(sysconfig.get_path(name)) for name in names),
        own,
        own.with_name("hydra_plugins"),
    ]


class report_errors:  # noqa: N801 (a context manager, as contextlib.suppress)
    """Prints an exception of the block as one line and goes on after it; ``consequence`` is
    missing.

    A signal is passed on.
    """

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, Interrupted):
            return False
        reason = str(error) if isinstance(error, ScalewiseError) else describe_exception(error)
        print_lines(f"{self._consequence}: {reason}", stderr=True)
        return True
