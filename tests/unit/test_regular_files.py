"""Pipes, devices and folders in place of files are reported by name and never block."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from scalewise import atomic, cli, regular_files, run_files
from scalewise.checkpoints import initial_parameters, manifest
from scalewise.config.app import Command, run_command
from scalewise.data import input_files, text_files
from scalewise.launch import job_progress, locks
from scalewise.models.safetensors_files import SafetensorsFiles
from scalewise.regular_files import IrregularFileError
from scalewise.reports import records


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)  # socket paths are limited in length


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": _socket,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "read_file",
    [
        regular_files.read_bytes,
        regular_files.check_regular,
        run_files.read_json,
        run_files.load_yaml,
        run_files.read_metrics,
        text_files.read_text,
        lambda path: list(text_files.iter_json_lines(path)),
        lambda path: input_files.sampled_digests([path]),
        lambda path: atomic.copy_atomic(path, path.with_name("copy")),
        lambda path: SafetensorsFiles([path], "model.path", ""),
        manifest.fingerprint,
    ],
)
def test_special_files_are_named(
    kind: str,
    read_file: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    KINDS[kind](path)
    with pytest.raises(IrregularFileError, match=f"{path} is {kind}, not a regular file"):
        read_file(path)


@pytest.mark.parametrize("name", ["status.json", "plan.json", "summary.json", "metrics.csv"])
@pytest.mark.parametrize("kind", ["a FIFO", "a folder"])
@pytest.mark.parametrize("command", ["status", "report", "plan explain"])
def test_commands_name_special_files_in_a_run(
    command: str, kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (command, name) == ("status", "summary.json"):
        pytest.skip("status does not read it")
    for file in ("status.json", "plan.json", "summary.json"):
        (tmp_path / file).write_text('{"status": "ok"}')
    (tmp_path / name).unlink(missing_ok=True)
    KINDS[kind](tmp_path / name)
    overrides = [*command.split(), str(tmp_path), *[str(tmp_path)] * (command == "plan explain")]
    assert cli.main(overrides) == 2
    assert f"{tmp_path / name} is {kind}, not a regular file" in capsys.readouterr().err


def test_sweep_and_adapter_files_are_checked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "sweep.json")
    for read_file in (records.read_record, job_progress.read_progress):
        with pytest.raises(IrregularFileError, match=r"sweep\.json"):
            read_file(tmp_path)
    os.mkfifo(tmp_path / "resolved.yaml")
    with pytest.raises(IrregularFileError, match=r"resolved\.yaml"):
        initial_parameters.resolved_config(tmp_path / "checkpoints" / "step-1")


def test_experiment_pipe_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    os.mkfifo(tmp_path / "experiments" / "x.yaml")
    with pytest.raises(IrregularFileError, match=r"x\.yaml is a FIFO"):
        run_command(Command(), ["-cd", str(tmp_path), "experiment=x"])


def test_lock_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / locks.FILE)
    assert locks.lock_owner(tmp_path) is None


def test_absent_and_regular_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        regular_files.read_text(tmp_path / "file")
    regular_files.check_regular(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"a\r\nb\xff")
    (tmp_path / "link").symlink_to("file")
    assert regular_files.read_text(tmp_path / "link", errors="replace") == "a\nb\ufffd"


@pytest.mark.parametrize(
    "command",
    [["report"], ["status"], ["publish"], ["evaluate"], ["export"], ["import"], ["lab", "grade"]],
    ids=" ".join,
)
def test_folder_of_a_user_that_does_not_exist_is_not_found(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "~no_such_user/run"]) == 2
    assert "~no_such_user/run" in capsys.readouterr().err
    assert regular_files.expand_home("~no_such_user/run") == Path("~no_such_user/run")


def test_home_folders_are_expanded_in_one_place() -> None:
    source = Path(regular_files.__file__).parent
    # Path.expanduser raises RuntimeError for an unknown user.
    assert not [
        file for file in source.rglob("*.py") if ").expanduser()" in file.read_text("utf-8")
    ]
