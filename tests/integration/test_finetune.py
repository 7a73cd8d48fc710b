"""What the experiments of fine-tuning promise."""

from __future__ import annotations

import pytest
from fixtures.doors import Doors


@pytest.mark.exhaustive
def test_a_packed_model_ends_better_than_it_began(scalewise: Doors) -> None:
    ended = scalewise("experiment=finetune/qlora_tiny", "tracking=none").ok()
    assert ended.seconds < 120
    metrics = ended.folder.summary["metrics"]
    assert metrics["val/loss"] < metrics["val/loss_first"] - 0.3
    page = (ended.folder.path / "report.html").read_text("utf-8")
    began, after = (f"{metrics[key]:.4f}" for key in ("val/loss_first", "val/loss"))
    assert f"validation goes from {began} to {after}" in page
