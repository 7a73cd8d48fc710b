"""Command-line flags: those of Hydra are accepted or rejected with a fix."""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fixtures.recording_command import FailIfRun, RecordingCommand
from hydra._internal.utils import get_args_parser

from scalewise.config.app import run_command
from scalewise.config.flags import ACCEPTED, REJECTED
from scalewise.config.sweep_preview import preview_search
from scalewise.errors import ConfigError

pytestmark = pytest.mark.usefixtures("cpu_machine")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--foo"], "unrecognized arguments: --foo"), (["--cfg"], "--cfg/-c: expected one argument")],
)
def test_unknown_flag_is_rejected(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        run_command(FailIfRun(), arguments)
    (issue,) = excinfo.value.issues
    assert reason in issue.reason
    assert "--cfg job" in issue.fix


@pytest.mark.parametrize(
    "arguments",
    [
        ["--experimental-rerun", "config.pickle"],
        ["--experimental-rerun=config.pickle"],
        ["--experimental-rerun="],
        ["seed=1", "--exp", "config.pickle", "-m", "seed=1,2"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "command", [partial(run_command, FailIfRun()), preview_search], ids=["run", "sweep"]
)
def test_pickled_config_is_not_loaded(
    command: Callable[[list[str]], object],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, ("ran",)

    Path("config.pickle").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ConfigError) as excinfo:
        command(arguments)
    (issue,) = excinfo.value.issues
    assert issue.key == "--experimental-rerun"
    assert issue.fix
    assert [path.name for path in tmp_path.iterdir()] == ["config.pickle"]


def test_hydra_flags_are_all_accepted_or_rejected() -> None:
    hydra_flags = {action.dest for action in get_args_parser()._actions} - {"overrides"}
    assert hydra_flags == {*ACCEPTED} | {*REJECTED}
    assert not {*ACCEPTED} & {*REJECTED}


@pytest.mark.parametrize(
    ("arguments", "key", "fix"),
    [
        (["--config-path", "elsewhere"], "--config-path", "-cd DIR"),
        (["--vers"], "", "scalewise --version"),
        (["--package", "optimizer"], "--package", "--cfg job"),
        (["--package", "zzz", "--cfg", "job"], "--package", "--package model"),
        (["--package", "optimiser", "--cfg", "job"], "--package", "--package optimizer?"),
    ],
    ids=str,
)
def test_rejected_flag_is_named_with_a_fix(arguments: list[str], key: str, fix: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        run_command(FailIfRun(), arguments)
    (issue,) = excinfo.value.issues
    assert issue.key == key
    assert fix in issue.fix


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--info"], ["-cn", "other"], ["--resolve"]])
def test_wandb_sweep_rejects_ignored_flags(flags: list[str]) -> None:
    with pytest.raises(ConfigError) as excinfo:
        preview_search(["-m", "seed=1,2", *flags])
    (issue,) = excinfo.value.issues
    assert issue.key.startswith("--")
    assert issue.fix == "remove it"


def test_help_lists_accepted_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(FailIfRun(), ["--hydra-help"]) == 0
    output = capsys.readouterr().out
    assert "--multirun,-m" in output
    assert "--experimental-rerun" not in output
    assert "--config-path" not in output


SWEEP_OVERRIDES = ("experiment=smoke", "seed=1,2")


@pytest.mark.parametrize(
    "overrides",
    [
        ["-m", *SWEEP_OVERRIDES],
        [*SWEEP_OVERRIDES, "-m"],
        ["experiment=smoke", "-m", "seed=1,2"],
        ["experiment=smoke", "--multirun", "seed=1,2", "question=-m"],
        ["experiment=smoke", "-cd", "seed=1,2", "seed=1,2", "-m"],
        ["-m", "experiment=smoke", "--config-dir=own", "seed=1,2"],
    ],
    ids=" ".join,
)
def test_flags_are_accepted_among_overrides(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own", "seed=1,2"):
        (tmp_path / name).mkdir()
    command = RecordingCommand()
    assert run_command(command, overrides) == 0
    assert [run.seed for run in command.runs] == [1, 2]


@pytest.mark.parametrize(
    "overrides",
    [
        ["seed=7", "--cfg", "job", "trainer.max_steps=3"],
        ["--cfg=job", "seed=7", "trainer.max_steps=3"],
        ["seed=7", "-c", "job", "-p", "_global_", "trainer.max_steps=3"],
    ],
    ids=" ".join,
)
def test_flags_with_values_are_accepted_among_overrides(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(RecordingCommand(), overrides) == 0
    output = capsys.readouterr().out
    assert "seed: 7" in output
    assert "max_steps: 3" in output


def test_info_flag_before_an_override(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(RecordingCommand(), ["--info", "seed=7"]) == 0
    assert "seed: 7" in capsys.readouterr().out
