"""``scalewise train --cfg``: print the composed config without importing what trains it."""

from __future__ import annotations

from collections.abc import Sequence

from scalewise.config.app import run_command
from scalewise.config.command import Command
from scalewise.config.launchers import REMOTE_LAUNCHERS


class ShowConfigCommand(Command):
    """Command that is given Hydra's ``--cfg`` or ``--info``, so no job reaches it."""

    remote_launchers = REMOTE_LAUNCHERS


def main(arguments: Sequence[str]) -> int:
    """Run ``scalewise train ARGUMENTS`` with ``--cfg`` or ``--info`` and return its exit code."""
    return run_command(ShowConfigCommand(), arguments)
