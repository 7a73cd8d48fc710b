"""One small run on the command line, and the files that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.cli_runner import TINY, CliResult, CliRunner, RunDir

from scalewise import compose
from scalewise.metric_names import METRICS, STEP_PHASES
from scalewise.planner.host_memory import checkpoint_bytes

SINGLE_STEP_NOTE = "measured in one step"
FORWARD_BACKWARD_TIME = "time/forward_backward_s"
"""Metric of pipelines only, which lack its two parts."""
OTHER_METRICS = ("reward", "kl", "accuracy", "skipped_steps", "global_batch", "sequence")
"""Metrics of preferences, rewards, classes, ``trainer.skip_sigma`` and warm-ups."""
EXPERTS = "experts"
"""Group of the metrics of mixtures of experts."""
REASONS = {
    "val/loss": "at validations only",
    **{key: SINGLE_STEP_NOTE for key in METRICS if key.startswith("memory/")},
}
"""Why a metric is not in every row."""


@pytest.fixture(scope="module")
def run(cli_runner_in: Callable[[str], CliRunner]) -> CliResult:
    return cli_runner_in("smoke")(
        *TINY, "trainer.max_steps=20", "tracking.tags=[mine]", "tracking.group=ours"
    ).assert_ok()


@pytest.fixture(scope="module")
def folder(run: CliResult) -> RunDir:
    return run.folder


@pytest.fixture(scope="module")
def records(folder: RunDir) -> list[dict[str, Any]]:
    (file,) = folder.path.glob("wandb/offline-run-*/run-*.wandb")
    overrides = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    completed = subprocess.run(overrides, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return [json.loads(line) for line in completed.stdout.splitlines()]


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records if record["type"] == kind]


def test_run_folder_has_the_documented_files(folder: RunDir) -> None:
    assert {path.name for path in folder.path.iterdir()} == {
        "attempts.jsonl",
        "resolved.yaml",
        "overrides.txt",
        "inputs.json",
        "status.json",
        "plan.json",
        "metrics.csv",
        "summary.json",
        "checkpoints",
        "wandb",
        "report.html",
        "report_spec.json",
        "tokenizer.json",
    }
    assert folder.path.parent.name == "decoder_nano-single-fp32-adamw-lr3e-3"


def test_checkpoint_size_equals_prediction(folder: RunDir) -> None:
    run = compose(folder.status["overrides"])
    files = (folder.checkpoint(20) / "model", folder.checkpoint(20) / "optimizer")
    size = sum(
        path.stat().st_size
        for checkpoint_file in files
        for path in checkpoint_file.rglob("*.safetensors")
    )
    assert size == pytest.approx(checkpoint_bytes(run), rel=0.02)


def test_status_records_overrides_and_outcome(run: CliResult, folder: RunDir) -> None:
    status = folder.status
    assert (status["status"], status["exit_code"], status["reason"]) == ("ok", 0, "")
    assert status["command"].startswith("scalewise train experiment=smoke")
    assert status["overrides"] == (folder.path / "overrides.txt").read_text().splitlines()
    assert status["wandb"]["mode"] == "offline"
    assert (run.cwd / status["wandb"]["folder"]).is_dir()  # as `wandb sync` expects it


def test_metrics_have_one_row_per_window_and_every_key(folder: RunDir) -> None:
    assert folder.steps == list(range(1, 21))
    assert list(folder.metrics[0]) == list(METRICS)
    for key in METRICS:
        num_values = sum(1 for row in folder.metrics if row[key])
        group, _, name = key.partition("/")
        is_other = group == EXPERTS or name.startswith(OTHER_METRICS)
        if key == FORWARD_BACKWARD_TIME or is_other:
            assert not num_values, key
            continue
        assert num_values == 20 or (key in REASONS and num_values), (
            f"{key}: {num_values} of 20 rows"
        )


def test_smoke_loss_decreases(folder: RunDir) -> None:
    losses = folder.column("train/loss")
    assert losses[-1] < 0.95 * losses[0]


def test_step_phases_sum_to_the_step_time(folder: RunDir) -> None:
    for row in folder.metrics:
        phases_s = sum(float(row[f"time/{name}_s"] or 0) for name in STEP_PHASES)
        assert phases_s == pytest.approx(float(row["time/step_s"])), row


def test_summary_has_the_final_metrics(folder: RunDir) -> None:
    metrics, losses = folder.summary["metrics"], folder.column("train/loss")
    assert folder.summary["steps"] == 20
    assert metrics["train/loss_first"] == pytest.approx(losses[0])
    assert metrics["train/loss"] == pytest.approx(losses[-1])
    assert metrics["memory/peak_bytes"] > metrics["memory/parameters_bytes"]


def test_terminal_prints_each_window_and_the_report_path(run: CliResult) -> None:
    lines = [line for line in run.out.splitlines() if "tok/s" in line]
    assert [line.split()[1] for line in lines] == ["4/20", "8/20", "12/20", "16/20", "20/20"]
    assert "report runs/" in run.out.splitlines()[-1]
    (note,) = run.folder.summary["notes"]
    assert note.startswith("each validation: 1 sample padded to 4 (3 empty, 75.0%)")
    assert run.err.removeprefix("preparing corpus ...\n") == f"{note}\n"


def test_offline_wandb_run_has_history_config_and_labels(
    records: list[dict[str, Any]], folder: RunDir
) -> None:
    rows = [entry["item"] for entry in of_kind(records, "history")]
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20]
    assert [row["train/loss"] for row in rows][-1] == pytest.approx(
        sum(folder.column("train/loss")[-4:]) / 4
    )
    assert "val/loss" in rows[-1]
    (run_record,) = of_kind(records, "run")
    assert (run_record["run_group"], run_record["job_type"]) == ("ours", "train")
    assert {"mine", "decoder_nano", "single", "fp32", "adamw", "smoke"} <= set(run_record["tags"])
    assert run_record["display_name"] == folder.path.parent.name
    config = run_record["config"]["update"]
    assert config["optimizer"]["lr"] == pytest.approx(3e-3)
    assert config["choices"]["model"] == "decoder_nano"
    assert config["git_commit"] == folder.status["git_commit"]


def test_offline_wandb_run_defines_step_axes(records: list[dict[str, Any]]) -> None:
    axes = {
        entry.get("name") or entry["glob_name"]: entry.get("step_metric")
        for entry in of_kind(records, "metric")
    }
    keys = (*METRICS, "val/loss/*")
    assert axes == {key: None if key == "step" else "step" for key in keys}


def test_offline_wandb_run_records_the_exit_code(records: list[dict[str, Any]]) -> None:
    assert [entry.get("exit_code", 0) for entry in of_kind(records, "exit")] == [0]
