"""Packed and padded conversations compared: the same loss in fewer sequences."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fixtures.cli_runner import RunDir

import scalewise
from scalewise import cli

SHORT_RUN = (
    "model=decoder_nano",
    "model.width=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.feedforward=64",
    "model.vocabulary=512",
    "data=chat",
    "data.vocabulary=512",
    "data.sequence=128",
    "data.validation_fraction=0.2",
    "trainer.max_steps=2",
    "trainer.micro_batch=3",
    "trainer.validate_every=2",
    "trainer.validate_first=true",
    "trainer.validation_rows=100",
    "schedule.warmup_steps=1",
    "tracking=none",
    "callbacks=[]",
)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """File of short conversations with various lengths."""
    path, rng = tmp_path / "a.jsonl", random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for index in range(100):
            answer = " ".join(str(index + step) for step in range(rng.randint(1, 12)))
            file.write(json.dumps({"instruction": f"Count from {index}.", "output": answer}) + "\n")
    return path


def evaluation_metrics(run: RunDir, step: str) -> dict[str, float]:
    """Metrics of step 0 or 2."""
    assert cli.main(["evaluate", str(run.path), f"step={step}"]) == 0
    return dict(json.loads((run.path / "evaluation.json").read_text("utf-8"))[step])


@pytest.mark.exhaustive
def test_packing_keeps_the_untrained_loss_in_fewer_sequences(
    conversations: Path, tmp_path: Path
) -> None:
    untrained = {}
    for packing in (False, True):
        overrides = (*SHORT_RUN, f"data.paths=[{conversations}]", f"data.packing={packing}")
        result = scalewise.train(scalewise.compose(overrides), tmp_path / str(packing))
        assert result.status == "ok", result.reason
        run = RunDir(result.folder)
        last = float(run.metrics[-1]["val/loss"])
        assert evaluation_metrics(run, "2")["loss"] == pytest.approx(last, rel=1e-5), packing
        untrained[packing] = evaluation_metrics(run, "0")
    assert untrained[True]["rows"] < untrained[False]["rows"] / 2
    assert untrained[True]["labels"] == untrained[False]["labels"]
    for key in ("loss", "accuracy"):
        assert untrained[True][key] == pytest.approx(untrained[False][key], rel=1e-5), key
