"""``scalewise export accelerate``: the config of another library for a composed run."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from scalewise.config.app import run_command
from scalewise.config.command import Command
from scalewise.console import print_lines
from scalewise.errors import ConfigError
from scalewise.interop.accelerate_export import accelerate_config
from scalewise.run_config import RunConfig


class ExportConfigCommand(Command):
    """Print the config file of another library, and on stderr what it does not say."""

    checks_machine = False

    def __init__(self, library: str) -> None:
        self._library = library

    def run_single(self, run: RunConfig, folder: Path) -> int:
        """Print the config of the run: YAML for Accelerate, JSON for DeepSpeed; exit code 0."""
        if self._library == "accelerate":
            config = accelerate_config(run)
            text = yaml.safe_dump(config.values, sort_keys=False).rstrip("\n")
        else:
            from scalewise.interop.deepspeed_export import deepspeed_config  # imports torch

            config = deepspeed_config(run)
            text = json.dumps(config.values, indent=2)
        print_lines(*text.split("\n"))
        print_lines("without a counterpart:", *(f"  {note}" for note in config.notes), stderr=True)
        return 0

    def choose_sweep_folder(self, folder: Path) -> Path:
        """Reject a multirun."""
        reason = f"export {self._library} writes the config of one run"
        raise ConfigError.for_key("", "", reason, "leave out -m and sweep")


def export_config(library: str, overrides: list[str]) -> int:
    """Print the config of the run that ``overrides`` compose; return the exit code."""
    return run_command(ExportConfigCommand(library), overrides)
