"""One-line descriptions of unexpected exceptions: type, message and source line."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from scalewise.atomic import disk_full_reason
from scalewise.errors import Interrupted, ScalewiseError
from scalewise.redaction import redact

logger = logging.getLogger(__name__)

MAX_MESSAGE_LENGTH = 2000
"""Maximum length of an exception message, in characters."""


def describe_exception(error: BaseException) -> str:
    """Description ``Type: message (file:line in function)``, at the innermost line of user code."""
    line = f"{type(error).__name__}: {exception_message(error)}"
    location = user_frame(error)
    return f"{line} ({location})" if location else line


def exception_message(error: BaseException) -> str:
    """Message of an exception in one line; its type name if it has no message."""
    text = str(error)
    if (reason_and_fix := disk_full_reason(error)) is not None:
        text = "; ".join([text, *reason_and_fix])
    return redact(" ".join(text.split()))[:MAX_MESSAGE_LENGTH] or type(error).__name__


def user_frame(error: BaseException) -> str:
    """Innermost frame outside installed packages, as ``file:line in function``, or empty."""
    folders = _installed_folders()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in folders):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def _installed_folders() -> list[Path]:
    """Folders of the standard library, of installed packages and of scalewise."""
    package = Path(__file__).parent
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [
        *(Path(sysconfig.get_path(name)) for name in names),
        package,
        package.with_name("hydra_plugins"),
    ]


class report_errors:  # noqa: N801 (a context manager, as contextlib.suppress)
    """Context manager that logs an exception as ``consequence: reason`` and suppresses it.

    ``Interrupted`` and exceptions that are not ``Exception`` propagate.
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
        logger.warning(f"{self._consequence}: {reason}")
        return True
