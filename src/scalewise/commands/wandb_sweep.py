"""``scalewise wandb-sweep``: convert the axes of a sweep to a W&B sweep."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from scalewise.config.sweep_preview import preview_search
from scalewise.console import print_lines
from scalewise.launch import signals
from scalewise.tracking import wandb_sweeps
from scalewise.tracking.wandb_api import WandbServer, wandb_environment
from scalewise.tracking.wandb_session import choose_mode
from scalewise.tracking_config import WandbMode


def main(arguments: Sequence[str]) -> int:
    """Print the configuration of a W&B sweep or, if online, create the sweep; exit code 0.

    The arguments are those of ``train``. Settings that W&B does not support are listed on stderr.
    """
    with signals.raise_on_signals("before there was a sweep"):
        preview = preview_search(arguments)
        search = wandb_sweeps.sweeper_search(preview.sweeper, preview.sweeper_name)
        question = preview.run.question
        config = wandb_sweeps.wandb_sweep_config(
            search, preview.space, preview.fixed_overrides, preview.name, question
        )
        for reason in wandb_sweeps.unsupported_settings(search):
            print_lines(f"omitted: {reason}", stderr=True)
        tracking = preview.run.tracking
        if choose_mode(tracking) is not WandbMode.online:
            print_lines(*yaml.safe_dump(config, sort_keys=False).splitlines())
            return 0
        with wandb_environment():
            sweep_id = WandbServer().create_sweep(config, tracking.entity, tracking.project)
        print_lines(f"sweep {sweep_id}", f"wandb agent {sweep_id}")
        return 0
