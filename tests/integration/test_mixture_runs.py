"""Runs on a mixture of sources: loss by source, resume, evaluation and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scalewise
from scalewise import cli
from scalewise.run_files import read_metrics

SHORT_RUN = (
    *("experiment=smoke", "data=mixture", "data.sequence=32", "tracking=none"),
    *("+data@data.sources.even.data=synthetic", "data.sources.even.weight=3"),
    *("+data@data.sources.rare.data=synthetic", "data.sources.rare.weight=1"),
    *("data.sources.rare.data.vocabulary=2", "+data.stages.end.start=0.5"),
    *("+data.stages.end.weights.rare=9", "trainer.max_steps=4", "trainer.validate_every=2"),
    *("trainer.validation_rows=5", "trainer.micro_batch=2", "trainer.global_batch=4"),
    *("schedule.warmup_steps=1", "checkpoint.every=2", "checkpoint.keep=9", "model.layers=1"),
)
SOURCES = ("val/loss/even", "val/loss/rare")


def train(folder: Path, *overrides: str) -> list[dict[str, float | int | None]]:
    result = scalewise.train(scalewise.compose([*SHORT_RUN, *overrides]), folder)
    assert result.status == "ok", result.reason
    return read_metrics(folder / "metrics.csv")


def test_mixture_resumes_and_reports_the_loss_of_each_source(tmp_path: Path) -> None:
    rows = train(tmp_path / "run")
    assert [rows[0][key] for key in SOURCES] == [None, None]
    for row in rows[1::2]:
        losses = [float(row[key] or "nan") for key in SOURCES]
        assert row["val/loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
        assert losses[0] != pytest.approx(losses[1], abs=0.01)
    resumed = train(tmp_path / "resumed", f"resume={tmp_path}/run/checkpoints/step-00000002")
    for key in ("train/loss", "val/loss", *SOURCES):
        assert [row[key] for row in resumed] == [row[key] for row in rows], key
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 0
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())["4"]
    assert evaluation["loss"] == pytest.approx(rows[-1]["val/loss"], rel=1e-4)
    for key in SOURCES:
        name = key.rpartition("/")[2]
        assert evaluation["sources"][name] == pytest.approx(rows[-1][key], rel=1e-4), key
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Validation loss by source" in report


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_mixture_is_the_same_under_each_strategy(tmp_path: Path, strategy: str) -> None:
    expected = train(tmp_path / "single")
    rows = train(tmp_path / strategy, f"parallelism={strategy}")
    for key in ("train/loss", "val/loss", *SOURCES):
        for row, expected_row in zip(rows, expected, strict=True):
            if expected_row[key] is not None:
                assert row[key] == pytest.approx(expected_row[key], rel=1e-4), (key, row["step"])


@pytest.mark.exhaustive
def test_mixture_experiment_learns_both_sources(tmp_path: Path) -> None:
    run = scalewise.compose(["experiment=pretrain/mixture_tiny", "tracking=none"])
    assert scalewise.train(run, tmp_path / "run").status == "ok"
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.csv") if row["val/loss"]]
    for key in ("val/loss/email", "val/loss/tables"):
        assert (rows[-1][key] or 0) < (rows[0][key] or 0) - 0.5, key
