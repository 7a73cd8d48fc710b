"""``scalewise wandb-sweep``: the axes of a line as a W&B sweep, for agents anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from scalewise.config.sweep_preview import preview_search
from scalewise.console import print_lines
from scalewise.launch import signals
from scalewise.tracking import wandb_sweeps
from scalewise.tracking.config import WandbMode
from scalewise.tracking.wandb_api import WandbServer, wandb_environment
from scalewise.tracking.wandb_session import choose_mode


def main(arguments: Sequence[str]) -> int:
    """Prints the configuration of a W&B sweep or, online, creates it; exit code 0.

    Takes the line that ``train`` takes. What W&B has no place for is said on stderr.
    """
    with signals.raise_on_signals("before there was a sweep"):
        asked = preview_search(arguments)
        search = wandb_sweeps.sweeper_search(asked.sweeper, asked.sweeper_name)
        question = asked.run.question
        config = wandb_sweeps.wandb_sweep_config(
            search, asked.space, asked.fixed_overrides, asked.name, question
        )
        for reason in wandb_sweeps.unsupported_settings(search):
            print_lines(f"left out: {reason}", stderr=True)
        tracking = asked.run.tracking
        if choose_mode(tracking) is not WandbMode.online:
            print_lines(*yaml.safe_dump(config, sort_keys=False).splitlines())
            return 0
        with wandb_environment():
            known = WandbServer().create_sweep(config, tracking.entity, tracking.project)
        print_lines(f"sweep {known}", f"wandb agent {known}")
        return 0
