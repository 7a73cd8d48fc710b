"""Classification runs: training, evaluation and reports."""

from __future__ import annotations

import json

import pytest
from fixtures.cli_runner import CliRunner
from transformers import AutoModelForSequenceClassification

from scalewise import cli

TINY = "experiment=finetune/classification_tiny"
SHORT_RUN = (
    TINY,
    "tracking=none",
    "trainer.max_steps=4",
    "trainer.micro_batch=4",
    "trainer.validate_every=2",
    "trainer.validation_rows=7",
    "schedule.warmup_steps=1",
)
TRAINED_HEAD = ("adapter=lora", "adapter.trained=[head]")


@pytest.mark.parametrize(
    "mode", [(), pytest.param(TRAINED_HEAD, marks=pytest.mark.exhaustive)], ids=["plain", "lora"]
)
def test_classification_evaluation_equals_last_validation(
    mode: tuple[str, ...], run_cli: CliRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_cli(*SHORT_RUN, *mode).assert_ok().folder
    assert cli.main(["evaluate", str(run.path), "prompt=return self.name"]) == 0
    stdout = capsys.readouterr().out
    assert "7 labels of 7 held-out samples" in stdout
    assert "forwards " in stdout
    assert "backwards " in stdout
    record = json.loads((run.path / "evaluation.json").read_text("utf-8"))["4"]
    assert record.keys() == {"rows", "labels", "loss", "accuracy"}
    for key in ("loss", "accuracy"):
        assert record[key] == pytest.approx(run.column(f"val/{key}")[-1], rel=1e-4), key
    assert cli.main(["export", str(run.path)]) == 0
    peer = AutoModelForSequenceClassification.from_pretrained(run.path / "export")
    assert peer.config.id2label == {0: "backwards", 1: "forwards"}


@pytest.mark.exhaustive
def test_classification_experiment_beats_untrained_model(run_cli: CliRunner) -> None:
    result = run_cli(TINY, "tracking=none").assert_ok()
    assert result.seconds < 120
    metrics = result.folder.summary["metrics"]
    print({key: value for key, value in metrics.items() if "accuracy" in key})
    assert metrics["val/accuracy_first"] < 0.7
    assert metrics["val/accuracy"] > 0.8
    page = (result.folder.path / "report.html").read_text("utf-8")
    assert "Validation accuracy is" in page
    assert "nats per sample" in page
