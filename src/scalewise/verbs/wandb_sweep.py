"""``scalewise wandb-sweep``: the axes of a line as a W&B sweep, for agents anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from scalewise.config.searched import searched
from scalewise.launch import signals
from scalewise.output import print_lines
from scalewise.tracking import sweeps
from scalewise.tracking.server import Server, own_environment
from scalewise.tracking.session import decide_mode
from scalewise.tracking.spec import Mode


def main(arguments: Sequence[str]) -> int:
    """Prints the configuration of a W&B sweep or, online, creates it; exit code 0.

    Takes the line that ``train`` takes. What W&B has no place for is said on stderr.
    """
    with signals.raised("before there was a sweep"):
        asked = searched(arguments)
        search = sweeps.search_of(asked.sweeper, asked.option)
        question = asked.run.question
        config = sweeps.configured(search, asked.space, asked.fixed, asked.name, question)
        for reason in sweeps.left_out(search):
            print_lines(f"left out: {reason}", stderr=True)
        tracking = asked.run.tracking
        if decide_mode(tracking) is not Mode.online:
            print_lines(*yaml.safe_dump(config, sort_keys=False).splitlines())
            return 0
        with own_environment():
            known = Server().sweep(config, tracking.entity, tracking.project)
        print_lines(f"sweep {known}", f"wandb agent {known}")
        return 0
