"""Launchers with and without their extras."""

from __future__ import annotations

import sys

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner

WITHOUT_SUBMITIT = """
import sys
for name in ("submitit", "hydra_plugins.hydra_submitit_launcher"):
    sys.modules[name] = None
from scalewise.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_slurm_launcher_without_its_extra_is_rejected(run_cli: CliRunner) -> None:
    """For any launcher options, which are unknown without the extra."""
    overrides = ("train", "-m", *UNTRACKED, "hydra/launcher=slurm", "hydra.launcher.partition=big")
    process = run_cli.start_process(
        [sys.executable, "-c", WITHOUT_SUBMITIT, *overrides, "seed=1,2"]
    )
    process.wait().assert_rejected("hydra/launcher=slurm", "pip install 'scalewise[slurm]'")
    assert list(run_cli.cwd.iterdir()) == []


def test_missing_launcher_extra_does_not_affect_other_launchers(run_cli: CliRunner) -> None:
    overrides = ("train", *UNTRACKED, "--cfg", "job")
    run_cli.start_process([sys.executable, "-c", WITHOUT_SUBMITIT, *overrides]).wait().assert_ok()


def test_ray_launcher_is_rejected(run_cli: CliRunner) -> None:
    result = run_cli("-m", *UNTRACKED, "hydra/launcher=ray", "seed=1,2")
    result.assert_rejected("hydra/launcher=ray", "choose one of hydra/launcher=scalewise")
    assert list(run_cli.cwd.iterdir()) == []


@pytest.mark.parametrize(
    "launcher", [pytest.param("scalewise", marks=pytest.mark.exhaustive), "packed"]
)
def test_forkserver_preloads_peft_for_adapter_runs(run_cli: CliRunner, launcher: str) -> None:
    record_imports = "+callbacks.born._target_=fixtures.faults.RecordImports"
    overrides = (
        "-m",
        *UNTRACKED,
        f"hydra/launcher={launcher}",
        "trusted_packages=[fixtures]",
        record_imports,
    )
    result = run_cli(*overrides, "adapter=none,lora").assert_ok()
    assert [(job.path / "born-0").read_text("utf-8") for job in result.folder.jobs] == ["True"] * 2
