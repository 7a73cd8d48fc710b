"""A package of the current folder trained from the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fixtures import user_module
from fixtures.cli_runner import CliRunner

USER_MODULE = (
    "objective=module",
    "objective.target=mypkg.MyModule",
    "+objective.arguments.width=64",
    "data=module",
    "data.target=mypkg.MyData",
    "+data.arguments.batch_size=4",
    "trusted_packages=[mypkg]",
    "trainer.max_steps=8",
    "trainer.validate_every=4",
    "trainer.log_every=2",
    "hardware=cpu",
)


@pytest.fixture
def cli_with_package(run_cli: CliRunner) -> CliRunner:
    (run_cli.cwd / "mypkg").mkdir()
    shutil.copy(Path(user_module.__file__), run_cli.cwd / "mypkg" / "__init__.py")
    return run_cli


def test_user_module_of_the_current_folder_trains(cli_with_package: CliRunner) -> None:
    result = cli_with_package(*USER_MODULE, "parallelism=ddp", "parallelism.replicas=2").assert_ok()
    run = result.folder
    assert run.status["status"] == "ok"
    assert run.path.parent.name == "MyModule-ddp-fp32"
    assert run.steps == list(range(1, 9))
    assert run.column("train/tokens")[0] == 8  # rows of both ranks
    assert min(run.column("throughput/tokens_per_s")) > 0
    assert run.summary["parameters"] == 13122
    metrics = run.summary["metrics"]
    assert metrics["memory/parameters_bytes"] == 13122 * 4
    assert metrics["val_loss"] == metrics["val/loss"]
    assert run.checkpoints == [4, 8]
    report = (run.path / "report.html").read_text("utf-8")
    assert "MyModule-ddp-fp32" in report
    assert "loss" in report
    assert (run.path / "logged" / "metrics.csv").read_text().startswith("epoch,own/loss")
    assert list((run.path / "wandb").glob("offline-run-*"))


def test_user_module_imports_in_dataloader_workers(cli_with_package: CliRunner) -> None:
    stream_overrides = ("+data.arguments.stream=true", "+data.arguments.workers=2")
    result = cli_with_package(
        *USER_MODULE, *stream_overrides, "parallelism=ddp", "tracking=none"
    ).assert_ok()
    assert result.folder.steps == list(range(1, 9))
    assert "Traceback" not in result.transcript


@pytest.mark.parametrize(
    ("more", "messages"),
    [
        (("trusted_packages=[]",), ("objective.target=mypkg.MyModule", "trusted_packages=[mypkg]")),
        pytest.param(
            ("objective.target=mypkg.Nothing",),
            ("objective.target=mypkg.Nothing", "imported"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("+objective.arguments.no=1",),
            ("objective.arguments=", "unexpected keyword"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_user_module_with_unknown_target_prints_one_line(
    more: tuple[str, ...], messages: tuple[str, ...], cli_with_package: CliRunner
) -> None:
    replaced = {override.partition("=")[0] for override in more}
    base_overrides = [
        override for override in USER_MODULE if override.partition("=")[0] not in replaced
    ]
    cli_with_package(*base_overrides, *more).assert_rejected(*messages)
    assert not (cli_with_package.cwd / "runs").exists()


def test_user_module_imports_only_trusted_modules(cli_with_package: CliRunner) -> None:
    package = cli_with_package.cwd / "mypkg" / "__init__.py"
    package.write_text(package.read_text("utf-8") + "\nimport my_helpers\n", "utf-8")
    (cli_with_package.cwd / "my_helpers.py").write_text("")
    trusted = "trusted_packages=[mypkg,my_helpers]"
    cli_with_package(*USER_MODULE, "trainer.max_steps=2").assert_rejected(
        "No module named 'my_helpers'", f"'{trusted}'"
    )
