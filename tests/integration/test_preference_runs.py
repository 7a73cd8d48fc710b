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
SHORT = (
    TINY,
    "tracking=none",
    "trainer.max_steps=4",
    "trainer.validate_every=2",
    "trainer.validation_rows=7",
    "trainer.micro_batch=3",
    "schedule.warmup_steps=1",
    "data.sequence=64",
)
LONG = pytest.mark.exhaustive
CASES = {
    "plain": (),
    "lora": ("adapter=lora", "adapter.targets=[.*]"),
    "pissa": ("adapter=pissa",),
}


def evaluated(run: RunDir, step: str = "last") -> dict[str, float]:
    assert cli.main(["evaluate", str(run.path), f"step={step}"]) == 0
    record = json.loads((run.path / "evaluation.json").read_text("utf-8"))
    return dict(record[step if step != "last" else max(record, key=int)])


@pytest.mark.parametrize(
    "case", ["plain", *(pytest.param(case, marks=LONG) for case in ("lora", "pissa"))]
)
def test_dpo_evaluation_equals_last_validation(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = scalewise.train(scalewise.compose([*SHORT, *CASES[case]]), tmp_path / "run")
    assert result.status == "ok", result.reason
    run = RunDir(result.folder)
    found = evaluated(run)
    for key in ("loss", "reward_margin", "reward_accuracy"):
        last = float(run.metrics[-1][f"val/{key}"])
        assert found[key] == pytest.approx(last, rel=1e-4, abs=1e-5), key
    assert "7 held-out pairs" in capsys.readouterr().out
    first = evaluated(run, "0")
    assert (first["reward_margin"], first["reward_accuracy"]) == (0, 0.5)


@LONG
def test_dpo_experiment_beats_untrained_model(run_cli: CliRunner) -> None:
    run = run_cli(TINY, "tracking=none").assert_ok().folder
    trained, untrained = evaluated(run), evaluated(run, "0")
    print(f"untrained {untrained}, trained {trained}")
    assert trained["reward_accuracy"] > 0.9 > untrained["reward_accuracy"] == 0.5
    assert trained["likelier"] > 0.8 > untrained["likelier"]
    page = (run.path / "report.html").read_text("utf-8")
    said = re.search(r"Preference accuracy is ([\d.]+)", page)
    last = float(run.metrics[-1]["val/reward_accuracy"])
    assert said is not None
    assert float(said[1]) / 100 == pytest.approx(last, abs=5e-3)
    assert "more than untrained" in page
    assert "nats per pair" in page
    assert run.column("train/reward_margin")[-1] > 1
