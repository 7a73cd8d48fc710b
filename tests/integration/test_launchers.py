"""Launchers as a user names them, where what they need is there and where it is not."""

from __future__ import annotations

import sys

import pytest
from fixtures.doors import UNTRACKED, Doors

WITHOUT_THE_EXTRA = """
import sys
for name in ("submitit", "hydra_plugins.hydra_submitit_launcher"):
    sys.modules[name] = None
from scalewise.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_slurm_without_its_extra(scalewise: Doors) -> None:
    """Whatever is said of its options, which are not known then."""
    line = ("train", "-m", *UNTRACKED, "hydra/launcher=slurm", "hydra.launcher.partition=big")
    door = scalewise.command([sys.executable, "-c", WITHOUT_THE_EXTRA, *line, "seed=1,2"])
    door.wait().refused("hydra/launcher=slurm", "pip install 'scalewise[slurm]'")
    assert list(scalewise.cwd.iterdir()) == []


def test_without_its_extra_everything_else_works(scalewise: Doors) -> None:
    line = ("train", *UNTRACKED, "--cfg", "job")
    scalewise.command([sys.executable, "-c", WITHOUT_THE_EXTRA, *line]).wait().ok()


def test_ray(scalewise: Doors) -> None:
    ended = scalewise("-m", *UNTRACKED, "hydra/launcher=ray", "seed=1,2")
    ended.refused("hydra/launcher=ray", "choose one of hydra/launcher=scalewise")
    assert list(scalewise.cwd.iterdir()) == []


@pytest.mark.parametrize("launcher", ["scalewise", "packed"])
def test_ranks_with_an_adapter_are_born_with_what_it_imports(
    scalewise: Doors, launcher: str
) -> None:
    tells = "+callbacks.born._target_=fixtures.accidents.TellImports"
    line = ("-m", *UNTRACKED, f"hydra/launcher={launcher}", "trusted_packages=[fixtures]", tells)
    ended = scalewise(*line, "adapter=none,lora").ok()
    assert [(job.path / "born-0").read_text("utf-8") for job in ended.folder.jobs] == ["True"] * 2
