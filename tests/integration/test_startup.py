"""What the light doors cost: nothing heavy is imported before it is needed."""

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "lightning", "wandb", "hydra", "omegaconf"}


def loaded_after(code: str) -> set[str]:
    """Returns which heavy packages a fresh interpreter holds after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return HEAVY & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import scalewise", set()),
        ("import scalewise.run", set()),
        ("import scalewise.cli", set()),
        ("import scalewise.config.registry as r; r.discover()", set()),
        ("from scalewise.config.compose import compose; compose()", {"hydra", "omegaconf"}),
        ("from scalewise.cli import main; main(['--help'])", set()),
        (
            "from scalewise.cli import main; main(['train', '--cfg', 'job'])",
            {"hydra", "omegaconf"},
        ),
        (
            "from scalewise.cli import main; assert main(['train', 'modle=x']) == 2",
            {"hydra", "omegaconf"},
        ),
        ("from scalewise.cli import main; assert main(['tarin']) == 2", set()),
    ],
)
def test_imports_nothing_heavier_than(code: str, allowed: set[str]) -> None:
    assert loaded_after(code) <= allowed
