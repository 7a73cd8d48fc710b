"""The fine-tuning experiments: loss and predicted memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fixtures.cli_runner import CliRunner, RunDir


@pytest.mark.exhaustive
def test_finetuning_a_quantized_model_lowers_the_loss(run_cli: CliRunner) -> None:
    result = run_cli("experiment=finetune/qlora_tiny", "tracking=none").assert_ok()
    assert result.seconds < 120
    metrics = result.folder.summary["metrics"]
    assert metrics["val/loss"] < metrics["val/loss_first"] - 0.3
    page = (result.folder.path / "report.html").read_text("utf-8")
    initial_loss, final_loss = (f"{metrics[key]:.4f}" for key in ("val/loss_first", "val/loss"))
    assert f"validation loss goes from {initial_loss} to {final_loss}" in page


@pytest.mark.exhaustive
def test_finetune_ablation_memory_equals_prediction(run_cli: CliRunner) -> None:
    small_model = (
        "model.layers=4",
        "model.vocabulary=4096",
        "trainer.max_steps=3",
        "tracking=none",
    )
    overrides = ("experiment=memory_ladder", "sweep=memory_ladder", *small_model)
    result = run_cli(*overrides, timeout=600).assert_ok()  # ten jobs, of which most compile
    jobs = [RunDir(folder) for folder in sorted(result.folder.path.glob("[0-9]"))]
    metrics = [job.summary["metrics"] for job in jobs]
    peaks = [step_metrics["memory/peak_bytes"] for step_metrics in metrics]
    assert len(peaks) == 10
    assert peaks[0] < peaks[1] < 1.05 * peaks[0], "a mask for each row"
    assert all(final_loss < before for before, final_loss in pairwise(peaks[1:]))
    assert [step_metrics["plan/peak_bytes"] for step_metrics in metrics] == pytest.approx(
        peaks, rel=0.05
    )
    # From packing until fewer bits or weights are trained, only memory and time change.
    losses = [step_metrics["train/loss"] for step_metrics in metrics[1:7]]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-5)
    page = (result.folder.path / "report.html").read_text("utf-8")
    assert "Nine techniques together reduced peak memory by" in page
    assert "+ in_backward" in page
