"""Experiment suite for training models at scale from composable Hydra configs.

``compose`` returns the ``Run`` of Hydra overrides; ``train`` trains it and returns a ``Result``.
"""

from __future__ import annotations

import os
import signal
import sys

if (
    os.path.basename(sys.argv[0] if sys.argv else "") == "scalewise"
    or (sys.argv[:1] == ["-m"] and "scalewise" in sys.orig_argv)
) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during imports ends the command without a traceback, until cli.main handles it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if sys.argv[:1] == ["-m"] and any("scalewise" in part for part in sys.orig_argv):
    # `python -m scalewise` puts the current folder first, where any module would shadow ours.
    try:
        if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
            del sys.path[0]
    except FileNotFoundError:  # the current folder was removed, so it is not on the path either
        pass

from typing import TYPE_CHECKING, Any

from scalewise.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from scalewise.api import Result, Run, compose, train

__all__ = ["CheckpointError", "ConfigError", "DataError", "Result", "Run", "compose", "train"]


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that ``import scalewise.planner`` does not import it."""
    if name in __all__:
        from scalewise import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
