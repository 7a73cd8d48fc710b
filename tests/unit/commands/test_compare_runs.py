"""Comparison of two runs: settings, predictions and measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalewise import cli
from scalewise.commands import compare_runs
from scalewise.reports import records
from scalewise.reports.records import RunRecord
from scalewise.units import GIB


def folder(path: Path, memory: str, peak: float, step: float, shards: int | None) -> str:
    """Write a run folder whose activations are half of its peak memory."""
    changed = [{"key": "memory", "default": "none", "value": memory}]
    if shards:
        changed.insert(0, {"key": "parallelism.shards", "default": 2, "value": shards})
    status = {"status": "ok", "name": path.name, "changed": changed, "command": "scalewise train"}
    breakdown = {"optimizer state": GIB, "activations of blocks": (peak / 2 - 1) * GIB}
    plan = {"ledger": breakdown, "step_parts": {"products": 0.1, "recompute": step - 0.1}}
    metrics = {
        "memory/peak_bytes": peak * GIB,
        "time/step_s": 2 * step,
        "plan/peak_bytes": peak * GIB / 2,
        "plan/step_s": step,
    }
    path.mkdir()
    for name, content in (("status", status), ("plan", plan), ("summary", {"metrics": metrics})):
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return (
        folder(tmp_path / "plain", "none", 8, 0.1, None),
        folder(tmp_path / "again", "checkpoint_full", 4, 0.15, 4),
    )


def read(path: str) -> RunRecord:
    run = records.read_run(Path(path))
    assert run is not None
    return run


def test_compare_shows_defaults_of_unset_settings(pair: tuple[str, str]) -> None:
    pairs = compare_runs.setting_pairs(read(pair[0]), read(pair[1]))
    assert [(it.name, it.first, it.second) for it in pairs] == [
        ("memory", "none", "checkpoint_full"),
        ("parallelism.shards", 2, 4),
    ]
    assert compare_runs.setting_pairs(read(pair[0]), read(pair[0])) == ()


def test_compare_sorts_by_difference(pair: tuple[str, str]) -> None:
    pairs = compare_runs.predicted_pairs(read(pair[0]), read(pair[1]))
    assert [it.name for it in pairs] == ["activations of blocks", "optimizer state"]
    assert pairs[0].ratio == pytest.approx(1 / 3)
    assert compare_runs.step_time_pairs(read(pair[0]), read(pair[1]))[0].name == "recompute"


def test_compare_command_shows_measured_and_predicted(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "explain", *pair]) == 0
    stdout = capsys.readouterr().out
    assert "Peak memory is 50% lower; predicted: 50% lower" in stdout
    assert "Step time is 50% higher; predicted: 50% higher" in stdout
    rows = {line.split("  ")[0]: line.split() for line in stdout.splitlines() if line}
    assert rows["memory"][-2:] == ["none", "checkpoint_full"]
    assert rows["block activations"][-1] == "-67%"
    assert "optimizer state" not in rows  # equal in both runs
    assert rows["time/step_s"] == ["time/step_s", "200", "ms", "300", "ms", "+50%"]


def test_compare_accepts_incomplete_runs(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan", "summary"):
        (Path(pair[1]) / f"{name}.json").unlink()
    assert cli.main(["plan", "explain", *pair]) == 0
    stdout = capsys.readouterr().out
    assert "; predicted: " not in stdout
    assert "time/step_s" in stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["requires two run folders, not 0"]),
        (["nowhere", "either"], ["2 issues", "nowhere is not a run folder", "either is"]),
    ],
)
def test_compare_rejects_other_folders(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "explain", *arguments]) == 2
    stderr = capsys.readouterr().err
    assert all(word in stderr for word in words)


def test_compare_distinguishes_names_with_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_run = folder(tmp_path / "one", "a\x1b[31mb", 8, 0.1, None)
    second_run = folder(tmp_path / "other", "ab\x07", 8, 0.1, None)
    assert cli.main(["plan", "explain", first_run, second_run]) == 0
    stdout = capsys.readouterr().out
    assert "\x1b" not in stdout
    row = next(line.split() for line in stdout.splitlines() if line.startswith("memory "))
    assert row[-2:] == ["a\\x1b[31mb", "ab\\x07"]
