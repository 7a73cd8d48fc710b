"""Commands on run and sweep folders with damaged files.

A command either works with the remaining files or rejects the folder: exit code 2 and a line that
names the file and a fix. No command ends in a traceback.
"""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixtures.cli_runner import TINY
from fixtures.damage import damages_for
from fixtures.wandb_server import WandbServer
from fixtures.wandb_views import Views

from scalewise import cli

SMALL_RUN = (*TINY, "launch.isolation=none", "hardware=cpu", "checkpoint.every=4")
UNREAD_SUFFIXES = (".html", ".wandb", ".log")
KEY = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class TrainedFolders:
    """Folders of completed runs."""

    run: Path
    other: Path
    sweep: Path


@pytest.fixture(scope="module")
def trained_folders(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> TrainedFolders:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SCALEWISE_CACHE", str(shared_cache))
        patch.setenv("WANDB_MODE", "offline")
        for run_overrides in (
            (*SMALL_RUN, "name=run"),
            (*SMALL_RUN, "name=other", "tracking=none", "trainer.max_steps=4"),
            ("-m", *SMALL_RUN, "name=sweep", "tracking=none", "seed=1,2"),
        ):
            code, text = run_in_process("train", *run_overrides)
            assert code == 0, text
    folders = [next((folder / "runs" / name).iterdir()) for name in ("run", "other", "sweep")]
    return TrainedFolders(*folders)


def run_in_process(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a command that runs in this process, in a UTF-8 terminal."""
    output_stream = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with redirect_stdout(output_stream), redirect_stderr(output_stream):
        code = cli.main(list(arguments))
    raw = output_stream.buffer
    assert isinstance(raw, io.BytesIO)
    return code, raw.getvalue().decode()


def cases_of(folder: Path) -> list[tuple[str, str]]:
    """Damage cases of a folder: relative file path and name of the damage."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    read_files = [path for path in files if path.suffix not in UNREAD_SUFFIXES]
    read_files = [
        path for path in read_files if not path.is_relative_to(folder / "1")
    ]  # as is job 0
    return [
        (str(path.relative_to(folder)), name) for path in read_files for name in damages_for(path)
    ]


def line_of(command: str, folder: Path, trained_folders: TrainedFolders) -> Sequence[str]:
    train = ("train", *SMALL_RUN, "tracking=none")
    return {
        "status": ("status", str(folder)),
        "report": ("report", str(folder)),
        "explain": ("plan", "explain", str(folder), str(trained_folders.other)),
        "evaluate": ("evaluate", str(folder), "rows=4"),
        "export": ("export", str(folder)),
        "publish": ("publish", str(folder)),
        "resume": (*train, "name=run", f"resume={folder}", "trainer.max_steps=10"),
        "resume_sweep": (*train, "-m", "name=sweep", "seed=1,2", f"resume_sweep={folder}"),
    }[command]


def assert_handled(
    command: str, source: Path, case: tuple[str, str], trained_folders: TrainedFolders
) -> None:
    """Run a command on a copy of ``source`` with one file damaged."""
    file_name, name = case
    folder = Path.cwd() / "runs" / source.parent.name / source.name
    shutil.rmtree(Path.cwd() / "runs", ignore_errors=True)
    shutil.copytree(source, folder, symlinks=True)
    file = folder / file_name
    damages_for(file)[name](file)
    try:
        code, text = run_in_process(*line_of(command, folder, trained_folders))
    except BaseException as error:
        raise AssertionError(f"{command}: {file_name} {name} raised") from error
    case_text = f"{command}: {file_name} {name} gave {code}: {text}"
    assert "Traceback" not in text, case_text
    assert code in ((0, 1, 2) if command == "publish" else (0, 2)), case_text
    if code == 2:
        assert file.name in text or file.parent.name in text, case_text
        assert ";" in text, case_text


WEIGHTS = "checkpoints/step-00000008/model/shard-00001-model-00001-of-00001.safetensors"
FAILED_ONCE = {
    "status": [("metrics.csv", "long cell"), ("metrics.csv", "cells superscript")],
    "explain": [("status.json", "deep")],
    "report": [("metrics.csv", "long header")],
    "evaluate": [
        ("tokenizer.json", "deep"),
        ("tokenizer.json", "utf-16"),
        ("resolved.yaml", "bad utf-8"),
        ("resolved.yaml", "model.width number"),
        ("resolved.yaml", "model list"),
        ("resolved.yaml", "optimizer.lr_factors mapping"),
        (WEIGHTS, "no tensors"),
        (WEIGHTS, "other shapes"),
        (WEIGHTS, "huge header"),
        (WEIGHTS, "one tensor less"),
    ],
    "export": [("tokenizer.json", "truncated"), (WEIGHTS, "one tensor less")],
    "resume": [
        ("resolved.yaml", "trainer fraction"),
        ("resolved.yaml", "model.heads mapping"),
        ("resolved.yaml", "trainer.global_batch mapping"),
        ("tokenizer.json", "truncated"),
        ("checkpoints/step-00000008/training.pt", "entries of text"),
    ],
    "resume_sweep": [("sweep.json", "jobs text"), ("0/status.json", "bad utf-8")],
}
SAMPLES = {
    "status": (30, 8),
    "explain": (20, 8),
    "report": (1, 8),
    "evaluate": (4, 8),
    "export": (2, 4),
    "resume": (1, 8),
    "resume_sweep": (0, 8),
}
"""Sampled cases for ``make test``, and multiples of 25 for the exhaustive tests."""


@pytest.mark.parametrize("command", SAMPLES)
def test_commands_skip_or_name_a_damaged_file(
    command: str, trained_folders: TrainedFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = trained_folders.sweep if command == "resume_sweep" else trained_folders.run
    rng = random.Random(command).sample(cases_of(source), SAMPLES[command][0])
    for case in [*FAILED_ONCE[command], *rng]:
        assert_handled(command, source, case, trained_folders)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "index"),
    [(name, n) for name, (_, sample_parts) in SAMPLES.items() for n in range(sample_parts)],
)
def test_commands_survive_many_damaged_files(
    command: str,
    index: int,
    trained_folders: TrainedFolders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    is_sweep_case = command == "resume_sweep" or (index % 2 and command in ("status", "report"))
    source = trained_folders.sweep if is_sweep_case else trained_folders.run
    for case in random.Random(f"{command} {index}").sample(cases_of(source), 25):
        assert_handled(command, source, case, trained_folders)


@pytest.mark.parametrize(
    "case",
    [
        ("status.json", "wandb text"),
        *(
            pytest.param(case, marks=pytest.mark.exhaustive)
            for case in (
                ("plan.json", "collectives text"),
                ("summary.json", "metrics list"),
                ("metrics.csv", "cells text"),
                ("resolved.yaml", "tracking list"),
                ("status.json", "choices text"),
                ("checkpoints/best.json", "deep"),
            )
        ),
    ],
)
def test_publish_survives_a_damaged_file(
    case: tuple[str, str],
    trained_folders: TrainedFolders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with WandbServer(handlers=Views().handlers) as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.delenv("WANDB_MODE")
        assert_handled("publish", trained_folders.run, case, trained_folders)
