"""Rejected commands end before the first job and leave no files."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.recording_command import FailIfRun, RecordingCommand

from scalewise import cli, console
from scalewise.config.app import Command, JobOutcome, prepare, run_command
from scalewise.config.diagnostics import diagnose_overrides
from scalewise.errors import ConfigError
from scalewise.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("cpu_machine")


class Warns(RecordingCommand):
    """Logs a warning as a module of scalewise does."""

    logger = logging.getLogger("scalewise.data.text_files")

    def run_single(self, run: RunConfig, folder: Path) -> int:
        self.logger.warning("one line was skipped")
        return super().run_single(run, folder)

    def run_sweep(self, *args: Any) -> list[JobOutcome]:
        self.logger.warning("one line was skipped")
        return super().run_sweep(*args)


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("option", ["none", "disabled"])
@pytest.mark.parametrize(
    ("group", "arguments"),
    [("job_logging", []), ("hydra_logging", []), ("hydra_logging", ["-m", "seed=1,2"])],
)
def test_warnings_reach_stderr_if_hydra_disables_loggers(
    group: str,
    option: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with console.print_log_messages():
        assert run_command(Warns(), [*arguments, f"hydra/{group}={option}"]) == 0
    assert capsys.readouterr().err == "one line was skipped\n"


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["modle=x"], ["modle"]),
        (["optimizer.lr=-1", "seed=-1"], ["optimizer.lr", "seed"]),
        (["-m", "optimizer.lr=1e-3,nan_lr,3e-3"], ["optimizer.lr"]),
        (["-m", "optimizer.lr=1e-3,-1", "trainer.micro_batch=0,1"],
         ["optimizer.lr", "trainer.micro_batch"]),
        (["-m", "precision=fp32,fp4"], ["precision"]),
        (["sweep=learning_rate", "model.widht=1"], ["model.widht"]),
        (["optimizer.lr=1,2"], ["optimizer.lr"]),
        (["~seed"], ["seed"]),
        (["~question", "seed=-1"], ["question"]),
        (["-m", "callbacks.guard.factor=2,-1"], ["callbacks.guard.factor"]),
        (["optimizer.lr=${nowhere}"], ["optimizer.lr"]),
        (["question=${nowhere}"], ["question"]),
        (["optimizer.lr=${optimizer.lr}"], ["optimizer.lr"]),
        (["name=${nowhere}"], ["name"]),
        (["-m", "optimizer.lr=${nowhere},1e-3"], ["optimizer.lr"]),
        (["-m", "seed=1,2", "question=${nowhere}"], ["question"]),
    ],
)  # fmt: skip
def test_rejected_command_runs_no_job_and_leaves_nothing(
    arguments: list[str], keys: list[str], compose: Callable[..., RunConfig], tmp_path: object
) -> None:
    with pytest.raises(ConfigError) as excinfo:
        run_command(FailIfRun(), arguments)
    assert sorted({issue.key for issue in excinfo.value.issues}) == keys
    assert list(tmp_path.iterdir()) == []


def test_fix_default_is_not_a_sweep_value() -> None:
    prepare()
    (issue,) = diagnose_overrides(["optimizer.lr=1e-3,fast"])
    assert issue.fix == "the default is optimizer.lr=0.0003"


def test_error_of_a_command_is_not_wrapped(compose: Callable[..., RunConfig]) -> None:
    class Broken(Command):
        def run_single(self, *args: object) -> int:
            raise ZeroDivisionError("a bug")

        run_sweep = run_single

    for arguments in ([], ["-m", "seed=1,2"]):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            run_command(Broken(), arguments)


@pytest.mark.parametrize("overrides", [[], ["-m", "seed=1,2"]])
def test_signal_while_composing_leaves_nothing(
    overrides: list[str], compose: Callable[..., RunConfig], tmp_path: Path
) -> None:
    class Signalled(BaseException):
        pass

    class Stops(Command):
        def run_single(self, *args: object) -> int:
            raise Signalled

        run_sweep = run_single

    with pytest.raises(Signalled):
        run_command(Stops(), overrides)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["train", "name=../../x"],
        ["train", "-m", "name=../../x", "seed=1,2"],
        ["train", "optimizer.lr=-1"],
        ["train", "-m", "optimizer.lr=-1,-2"],
        ["train", "hydra.run.dir=/proc/x"],
        ["train", "hydra.run.dir=a.txt/b"],
        ["train", "-m", "seed=1,2", "hydra.sweep.dir=/proc/x"],
        ["train", "hydra.run.dir=there", "seed=-1"],
        ["train", "hydra.run.dir=there/new", "seed=-1"],
        ["train", "callbacks=[ema]", "callbacks.ema.decay=2"],
        ["plan", "-m", "name=../../x", "seed=1,2"],
        ["bench", "planner", "data=/etc/passwd"],
        ["wandb-sweep", "-m", "seed=a,b"],
        ["wandb-sweep", "-m", "trainer.max_steps=-1,5"],
        ["wandb-sweep", "-m", "optimizer.lr=interval(-1,1)", "seed=x"],
    ],
    ids=" ".join,
)
def test_rejected_command_leaves_folders_unchanged(
    overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work_folder = tmp_path / "a" / "work"
    for empty in ("there", "runs", "../x", "../../x"):
        (work_folder / empty).mkdir(parents=True)
    (work_folder / "a.txt").write_text("text")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(work_folder)
    assert (
        cli.main(
            [overrides[0], "experiment=smoke", *overrides[1:]]
            if overrides[0] != "bench"
            else overrides
        )
        == 2
    )
    assert "scalewise: config rejected" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    for empty in ("there", "runs"):
        (work_folder / empty).rmdir()
    assert (
        cli.main(
            [overrides[0], "experiment=smoke", *overrides[1:]]
            if overrides[0] != "bench"
            else overrides
        )
        == 2
    )
    assert sorted(path.name for path in work_folder.iterdir()) == ["a.txt"]


@pytest.mark.parametrize(
    "name", ["../../x", "../../new", "..", ".", "/", "a/b", "x" * 300, "/tmp/x"]
)
@pytest.mark.parametrize(
    "overrides",
    [
        ["train"],
        ["plan"],
        ["plan", "-m", "seed=1,2"],
        ["train", "hydra.run.dir=../../x"],
        ["train", "-m", "hydra.sweep.dir=out", "seed=1,2"],
        ["train", "-m", "hydra.sweep.dir=../../x", "seed=1,2"],
    ],
    ids=" ".join,
)
def test_rejected_name_creates_no_folder(
    name: str,
    overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work_folder = tmp_path / "a" / "work"
    for empty in ("../x", "../../x"):
        (work_folder / empty).mkdir(parents=True)
    monkeypatch.chdir(work_folder)
    created_folders: list[str] = []
    mkdir = os.mkdir
    monkeypatch.setattr(
        os,
        "mkdir",
        lambda path, *arguments: (created_folders.append(path), mkdir(path, *arguments)),
    )
    before = sorted(tmp_path.rglob("*"))
    assert cli.main([*overrides, "experiment=smoke", f"name={name}"]) == 2
    assert "1 to 128 printable" in capsys.readouterr().err
    assert created_folders == []
    assert sorted(tmp_path.rglob("*")) == before


def test_deleted_current_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for arguments in ([], ["experiment=smoke"], ["-m", "seed=1,2"]):
        with pytest.raises(ConfigError, match=r"the current folder has been deleted; cd to"):
            run_command(FailIfRun(), arguments)


def test_existing_parent_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    command = FailIfRun()
    monkeypatch.setattr(command, "run_single", lambda *_: 0)
    assert run_command(command, ["hydra.run.dir=new/../there"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("subdir", ["../..", "..", ".", "a/../..", "/tmp/elsewhere", "a/.."])
def test_job_folders_stay_in_the_sweep_folder(subdir: str, tmp_path: Path) -> None:
    overrides = ["-m", "seed=1,2", f"hydra.sweep.subdir={subdir}"]
    with pytest.raises(ConfigError, match=r"is outside of the sweep folder.*job\.num") as excinfo:
        run_command(FailIfRun(), overrides)
    (issue,) = excinfo.value.issues
    assert (issue.key, issue.value) == ("hydra.sweep.subdir", subdir)
    assert list(tmp_path.iterdir()) == []


def test_job_folders_may_be_nested() -> None:
    command = RecordingCommand()
    assert (
        run_command(command, ["-m", "seed=1,2", "hydra.sweep.subdir=a/../b/${hydra.job.num}"]) == 0
    )
    assert [job.folder.name for job in command.jobs] == ["0", "1"]


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${oc.env:PLANTED_TOKEN}", "writes a secret of the environment"),
        ("${oc.env:ABSENT_OF_ALL}", "Environment variable 'ABSENT_OF_ALL' not found"),
        ("${nowhere}", "'nowhere' not found"),
    ],
)
def test_hydra_interpolation_is_named_by_its_key(
    key: str,
    value: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "Zx8Kq2Lm5Vb9Tn4Rw7Yc")
    flags = ["-m"] * (key != "hydra.run.dir")
    with pytest.raises(ConfigError) as excinfo:
        run_command(FailIfRun(), [*flags, "seed=1", f"{key}={value}"])
    (issue,) = excinfo.value.issues
    assert (issue.key, issue.value) == (key, value)
    assert reason in issue.reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [[], ["sweep=learning_rate"], ["objective=module"]])
def test_resolved_config_has_its_name(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The printed config omits the node with the chosen options."""
    assert run_command(RecordingCommand(), ["--cfg", "job", "--resolve", *more]) == 0
    name = "module-single-fp32" if "objective=module" in more else "decoder_nano-single-fp32-"
    assert f"name: {name}" in capsys.readouterr().out
