"""Captioning runs: training, evaluation and export of an image model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.cli_runner import CliRunner, RunDir
from fixtures.compatibility_matrix import TWO_STEPS
from transformers import AutoModelForImageTextToText, AutoTokenizer

import scalewise
from scalewise import cli
from scalewise.data.prepare import prepare_splits
from scalewise.data.synthetic import WORDS, SyntheticShapes

TINY = "experiment=finetune/captioning_tiny"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Folder of image files of shapes, with captions and their tokenizer."""
    splits = prepare_splits(SyntheticShapes(image_size=48), len(WORDS), 1)
    assert splits.tokenizer is not None
    (tmp_path / "tokenizer.json").write_bytes(splits.tokenizer.read_bytes())
    records = []
    for index in range(24):
        pixels_HWC = splits.train.gather_pixels([index])[0].transpose(1, 2, 0)  # type: ignore[attr-defined]
        np.save(tmp_path / f"{index}.npy", pixels_HWC)
        ids = splits.train.gather([index])[0]
        caption = " ".join(WORDS[token] for token in ids[ids > 0])
        records.append(json.dumps({"image": f"{index}.npy", "caption": caption + " "}))
    (tmp_path / "captions.jsonl").write_text("\n".join(records), "utf-8")
    return tmp_path


def test_captioning_run_trains_evaluates_and_exports_user_images(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (
        *(TINY, "data=captions", f"data.paths=[{pictures}/captions.jsonl]", "data.image_size=32"),
        *(f"data.tokenizer={pictures}/tokenizer.json", "data.validation_fraction=0.25"),
        *(*TWO_STEPS, "tracking=none", "trainer.validate_every=2", "schedule.warmup_steps=1"),
    )
    result = scalewise.train(scalewise.compose(overrides), pictures / "run")
    assert result.status == "ok", result.reason
    run = RunDir(result.folder)
    capsys.readouterr()
    photo = pictures / "0.npy"
    assert cli.main(["evaluate", str(run.path), f"prompt={photo}", "tokens=5"]) == 0
    assert "generated" in capsys.readouterr().out
    (evaluation,) = json.loads((run.path / "evaluation.json").read_text("utf-8")).values()
    assert evaluation["loss"] == pytest.approx(run.column("val/loss")[-1], rel=1e-5)
    assert evaluation["rows"] == 6
    assert 0 <= evaluation["exact"] <= 1
    assert cli.main(["evaluate", str(run.path), "prompt=it"]) == 2
    assert "set prompt=FILE to an image file" in capsys.readouterr().err
    assert cli.main(["export", str(run.path), f"to={pictures}/out"]) == 0
    model = AutoModelForImageTextToText.from_pretrained(pictures / "out")
    assert AutoTokenizer.from_pretrained(pictures / "out").eos_token == WORDS[0]
    preprocessor = json.loads((pictures / "out" / "preprocessor_config.json").read_text("utf-8"))
    assert preprocessor["size"] == {"height": 32, "width": 32}
    with torch.no_grad():
        model.generate(torch.zeros((1, 3, 32, 32)), max_new_tokens=2)


@pytest.mark.exhaustive
def test_captioning_run_captions_held_out_images(run_cli: CliRunner) -> None:
    result = run_cli(TINY, "tracking=none").assert_ok()
    assert result.seconds < 120
    metrics = result.folder.summary["metrics"]
    assert metrics["val/loss_first"] > 3  # nats per token
    assert metrics["val/loss"] < 0.25
    assert cli.main(["evaluate", str(result.folder.path)]) == 0
    (evaluation,) = json.loads((result.folder.path / "evaluation.json").read_text("utf-8")).values()
    assert evaluation["exact"] > 0.5
