"""Cost of light commands: no torch import, no folder for a rejected run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fixtures.cli_runner import TINY, CliRunner

LIGHT_COMMANDS = (
    ("--help",),
    ("train", "--help"),
    ("train", "--cfg", "job", "experiment=smoke"),
    ("train", "--info", "defaults"),
    ("doctor",),
)
HEAVY_PACKAGES = (
    *("torch", "lightning", "wandb", "altair", "transformers", "rich"),
    *("scalewise.planner", "scalewise.launch.job"),
)
LIST_IMPORTS = """
import json, sys
from scalewise.cli import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted(name for name in {heavy} if name in sys.modules)]), file=sys.stderr)
"""


@pytest.mark.parametrize("overrides", LIGHT_COMMANDS[:-1])
def test_light_commands_import_no_heavy_packages(
    overrides: tuple[str, ...], run_cli: CliRunner
) -> None:
    arguments = [sys.executable, "-c", LIST_IMPORTS.format(heavy=HEAVY_PACKAGES), *overrides]
    result = run_cli.start_process(arguments).wait()
    assert json.loads(result.err.splitlines()[-1]) == [0, []], result.failure_report
    assert result.folders == []


def test_doctor_imports_no_torch(run_cli: CliRunner) -> None:
    arguments = [sys.executable, "-c", LIST_IMPORTS.format(heavy=("torch", "lightning")), "doctor"]
    result = run_cli.start_process(arguments).wait()
    assert json.loads(result.err.splitlines()[-1]) == [0, []], result.failure_report


def processor_seconds(runner: CliRunner, *overrides: str) -> float:
    """Processor time of a command and its children, in seconds."""
    before = os.times()
    subprocess.run(
        [sys.executable, *overrides],
        cwd=runner.cwd,
        env=runner.environment,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    after = os.times()
    return after.children_user + after.children_system - before[2] - before[3]


def torch_time_ratio(runner: CliRunner, max_ratio: float, *overrides: str) -> float:
    """Minimum time of a command over that of importing torch, over several rounds.

    Rounds continue until the ratio is at most ``max_ratio``: machine load only increases it.
    """
    actual = torch_s = float("inf")
    for _ in range(8):
        actual = min(actual, processor_seconds(runner, "-m", "scalewise", *overrides))
        torch_s = min(torch_s, processor_seconds(runner, "-c", "import torch"))
        if actual <= max_ratio * torch_s:
            break
    command = " ".join(overrides)
    print(f"{command}: {actual:.2f} s, import torch {torch_s:.2f} s, {actual / torch_s:.2f}")
    return actual / torch_s


@pytest.mark.timed
@pytest.mark.parametrize("overrides", [("--help",), ("train", "--cfg", "job", "experiment=smoke")])
def test_light_commands_start_faster_than_importing_torch(
    overrides: tuple[str, ...], run_cli: CliRunner
) -> None:
    assert torch_time_ratio(run_cli, 0.4, *overrides) <= 0.4


REJECTED_COMMANDS = {
    ("modle=x",): ("modle", "model"),
    ("-m", "experiment=smoke", "optimizer.lr=1e-3,nan_lr,3e-3"): ("optimizer.lr", "nan_lr"),
    ("model.heads=7", "trainer.global_batch=0", "precision=fp16_mixed"): ("3 issues",),
}
"""Rejected overrides, and words of the reason."""


@pytest.mark.parametrize("overrides", REJECTED_COMMANDS)
def test_rejected_run_leaves_no_folder(overrides: tuple[str, ...], run_cli: CliRunner) -> None:
    result = run_cli(*overrides).assert_rejected(*REJECTED_COMMANDS[overrides])
    assert not (run_cli.cwd / "runs").exists()
    assert result.out == ""


@pytest.mark.timed
def test_rejected_run_ends_quickly(run_cli: CliRunner) -> None:
    _, slowest_command, _ = REJECTED_COMMANDS
    assert torch_time_ratio(run_cli, 1, "train", *slowest_command) <= 1


@pytest.mark.timed
def test_plan_is_faster_than_importing_torch(run_cli: CliRunner) -> None:
    overrides = ("model=llama3_8b", "parallelism=fsdp", "parallelism.shards=8", "hardware=h100")
    assert torch_time_ratio(run_cli, 1, "plan", *overrides) <= 1


def test_rejected_data_leaves_no_folder(run_cli: CliRunner) -> None:
    (run_cli.cwd / "empty.txt").write_text("")
    overrides = [override for override in TINY if "megabytes" not in override]
    result = run_cli(*overrides, "data=text", "data.paths=[empty.txt]").assert_rejected(
        "data.paths"
    )
    assert result.folders == []
