"""DPO runs: training, evaluation and reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fixtures.cli_runner import CliRunner, RunDir

import scalewise
from scalewise import cli

TINY = "experiment=finetune/dpo_tiny"
SHORT_RUN = (
    TINY,
    "tracking=none",
    "trainer.max_steps=4",
    "trainer.validate_every=2",
    "trainer.validation_rows=7",
    "trainer.micro_batch=3",
    "schedule.warmup_steps=1",
    "data.sequence=64",
)
EXHAUSTIVE = pytest.mark.exhaustive
CASES = {
    "plain": (),
    "lora": ("adapter=lora", "adapter.targets=[.*]"),
    "pissa": ("adapter=pissa",),
}


def evaluation_metrics(run: RunDir, step: str = "last") -> dict[str, float]:
    assert cli.main(["evaluate", str(run.path), f"step={step}"]) == 0
    record = json.loads((run.path / "evaluation.json").read_text("utf-8"))
    return dict(record[step if step != "last" else max(record, key=int)])


@pytest.mark.parametrize(
    "case", ["plain", *(pytest.param(case, marks=EXHAUSTIVE) for case in ("lora", "pissa"))]
)
def test_dpo_evaluation_equals_last_validation(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = scalewise.train(scalewise.compose([*SHORT_RUN, *CASES[case]]), tmp_path / "run")
    assert result.status == "ok", result.reason
    run = RunDir(result.folder)
    evaluation = evaluation_metrics(run)
    for key in ("loss", "reward_margin", "reward_accuracy"):
        last = float(run.metrics[-1][f"val/{key}"])
        assert evaluation[key] == pytest.approx(last, rel=1e-4, abs=1e-5), key
    assert "7 held-out pairs" in capsys.readouterr().out
    first = evaluation_metrics(run, "0")
    assert (first["reward_margin"], first["reward_accuracy"]) == (0, 0.5)


@EXHAUSTIVE
def test_dpo_experiment_beats_untrained_model(run_cli: CliRunner) -> None:
    run = run_cli(TINY, "tracking=none").assert_ok().folder
    trained_metrics, untrained_metrics = evaluation_metrics(run), evaluation_metrics(run, "0")
    print(f"untrained {untrained_metrics}, trained {trained_metrics}")
    assert trained_metrics["reward_accuracy"] > 0.9 > untrained_metrics["reward_accuracy"] == 0.5
    assert trained_metrics["likelier"] > 0.8 > untrained_metrics["likelier"]
    page = (run.path / "report.html").read_text("utf-8")
    accuracy_match = re.search(r"Preference accuracy is ([\d.]+)", page)
    last = float(run.metrics[-1]["val/reward_accuracy"])
    assert accuracy_match is not None
    assert float(accuracy_match[1]) / 100 == pytest.approx(last, abs=5e-3)
    assert "above the untrained model" in page
    assert "nats per pair" in page
    assert run.column("train/reward_margin")[-1] > 1
