"""``scalewise dashboard NAME``: create or update a saved W&B workspace."""

from __future__ import annotations

import os
from collections.abc import Sequence

from scalewise.config.compose import compose
from scalewise.console import print_lines
from scalewise.errors import ConfigError

USAGE = "scalewise dashboard NAME [tracking.project=NAME] [tracking.entity=NAME]"


def main(arguments: Sequence[str]) -> int:
    """Create or update the workspace and print its URL; exit code 0."""
    name, *overrides = arguments or [""]
    if not name.strip() or "=" in name or name.startswith("-"):
        raise ConfigError.for_key("", "", f"{name!r} is not a dashboard name", USAGE)
    tracking = compose(overrides, check_machine=False).tracking
    from scalewise.reports import workspace

    project = os.environ.get("WANDB_PROJECT") or tracking.project
    entity = os.environ.get("WANDB_ENTITY") or tracking.entity
    print_lines(workspace.save_workspace(name, entity=entity, project=project))
    return 0
