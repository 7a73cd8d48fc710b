"""``scalewise plan`` in a virtual environment without torch."""

from __future__ import annotations

import sys
import venv
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest
from fixtures.cli_runner import CliResult, CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import scalewise as package
from scalewise.config import paths


def torch_requiring_distributions() -> set[str]:
    """Installed distributions that require torch, directly or indirectly."""
    requirements = {
        canonicalize_name(distribution.name): {
            canonicalize_name(expected.name)
            for expected in map(Requirement, distribution.requires or ())
            if expected.marker is None or expected.marker.evaluate({"extra": ""})
        }
        for distribution in distributions()
    }
    torch_dependents = {"torch"}
    while (
        more := {name for name, expected in requirements.items() if expected & torch_dependents}
        - torch_dependents
    ):
        torch_dependents |= more
    return torch_dependents


@pytest.fixture(scope="module")
def python_without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with all installed distributions that do not require torch."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    excluded = torch_requiring_distributions()
    for distribution in distributions():
        if canonicalize_name(distribution.name) in excluded:
            continue
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    (site / "scalewise.pth").write_text(str(Path(package.__file__).parents[1]), "utf-8")
    return folder / "bin" / "python"


Plan = Callable[..., CliResult]

LLAMA_8B = ("model=llama3_8b", "parallelism=fsdp", "parallelism.shards=8", "hardware=h100")


@pytest.fixture
def plan(python_without_torch: Path, run_cli: CliRunner) -> Plan:
    """Function that plans overrides in that environment."""
    return lambda *arguments: run_cli.start_process(
        [str(python_without_torch), "-m", "scalewise", "plan", *arguments]
    ).wait()


def test_environment_has_no_torch(python_without_torch: Path, run_cli: CliRunner) -> None:
    result = run_cli.start_process([str(python_without_torch), "-c", "import hydra, torch"]).wait()
    assert "No module named 'torch'" in result.err


TRANSFORMERS_EXPERIMENT = "finetune/captioning_tiny"
"""Its memory requires a trace of the model, and thus torch."""
OTHER_EXPERIMENTS = [
    name for name in paths.option_names("experiment") if name != TRANSFORMERS_EXPERIMENT
]


def test_plan_of_a_transformers_model_requires_torch(plan: Plan) -> None:
    plan(f"experiment={TRANSFORMERS_EXPERIMENT}").assert_rejected(
        "model=hf", "torch", "pip install torch"
    )


@pytest.mark.parametrize("experiment", OTHER_EXPERIMENTS)
def test_experiments_are_planned_without_torch(experiment: str, plan: Plan) -> None:
    output = plan(f"experiment={experiment}").assert_ok().out
    assert "memory breakdown" in output
    assert "block activations" in output
    assert "Fits: " in output


@pytest.mark.parametrize("experiment", OTHER_EXPERIMENTS)
def test_experiments_that_do_not_fit_get_a_fix_without_torch(experiment: str, plan: Plan) -> None:
    small_device = (
        "hardware.memory_gib=0.5",
        "trainer.micro_batch=4096",
        "trainer.global_batch=8192",
    )
    result = plan(f"experiment={experiment}", *small_device)
    assert result.code == 3, result.failure_report
    assert "Out of memory: " in result.out
    assert "scalewise train " in result.out


@pytest.mark.timed
def test_plan_without_torch_takes_less_than_a_second(plan: Plan, run_cli: CliRunner) -> None:
    """On a slow machine, less than three quarters of the time of importing torch."""
    actual = torch_s = float("inf")
    for _ in range(8):  # load on the machine only increases them
        actual = min(actual, plan(*LLAMA_8B).assert_ok().seconds)
        torch = run_cli.start_process([sys.executable, "-c", "import torch"]).wait().assert_ok()
        torch_s = min(torch_s, torch.seconds)
        if actual < max(1.0, 0.75 * torch_s):
            break
    print(f"{actual:.2f} s, import torch {torch_s:.2f} s")
    assert actual < max(1.0, 0.75 * torch_s)
