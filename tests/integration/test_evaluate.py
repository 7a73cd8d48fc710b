"""``scalewise evaluate``: the loss of the last validation, generation as in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir
from transformers import AutoModelForCausalLM, AutoTokenizer

import scalewise
from scalewise import cli
from scalewise.checkpoints.trained_run import load_model
from scalewise.commands import evaluate
from scalewise.commands.run_arguments import load_trained
from scalewise.errors import CheckpointError, ConfigError
from scalewise.evaluation import generation, validation_metrics
from scalewise.models.base_module import ModelModule

SMOKE_RUN = (
    "experiment=smoke",
    "tracking=none",
    "trainer.max_steps=6",
    "trainer.validate_every=3",
    "trainer.validate_first=true",
    "trainer.validation_rows=6",
    "schedule.warmup_steps=1",
    "optimizer.lr=0.01",
)
EXHAUSTIVE = pytest.mark.exhaustive
CASES = {
    "plain": (),
    "smoothed": ("objective.label_smoothing=0.3",),
    "lora": ("adapter=lora", "adapter.targets=[.*]"),
    "dora": ("adapter=dora", "adapter.targets=[.*]"),
    "ia3": ("adapter=ia3",),
    "schedule_free": ("optimizer=schedule_free", "optimizer.lr=0.01", "schedule=constant"),
    "bf16": ("precision=bf16_mixed",),
    "bf16_true": ("precision=bf16_true",),
    "fsdp": ("parallelism=fsdp", "parallelism.shards=2"),
    "pipeline": ("parallelism=pipeline",),
}
EXHAUSTIVE_CASES = ("dora", "ia3", "bf16", "bf16_true", "fsdp", "pipeline")
CPU = torch.device("cpu")


def train_run(folder: Path, *overrides: str) -> RunDir:
    result = scalewise.train(scalewise.compose([*SMOKE_RUN, *overrides]), folder)
    assert result.status == "ok", result.reason
    return RunDir(result.folder)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train_run(tmp_path_factory.mktemp("trained") / "run")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=EXHAUSTIVE if case in EXHAUSTIVE_CASES else ()) for case in CASES],
)
def test_evaluate_loss_equals_last_validation(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_run(tmp_path / "run", *CASES[case])
    assert cli.main(["evaluate", str(run.path)]) == 0
    stdout = capsys.readouterr().out
    assert f"step 6 of {run.path}: " in stdout
    assert "6 held-out samples" in stdout
    record = json.loads((run.path / "evaluation.json").read_text("utf-8"))["6"]
    tolerance = 1e-3 if "bf16" in case else 1e-5
    assert record["loss"] == pytest.approx(float(run.metrics[-1]["val/loss"]), rel=tolerance)
    assert record["rows"] == 6
    assert cli.main(["evaluate", str(run.path), "step=0"]) == 0
    initial_loss = json.loads((run.path / "evaluation.json").read_text("utf-8"))["0"]["loss"]
    assert run.summary["metrics"]["val/loss_first"] == pytest.approx(initial_loss, rel=tolerance)


def test_evaluate_keeps_results_of_several_checkpoints(
    plain_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["step=0"], ["step=best"], ["rows=2"]):
        assert cli.main(["evaluate", str(plain_run.path), *arguments]) == 0, arguments
    capsys.readouterr()
    record = json.loads((plain_run.path / "evaluation.json").read_text("utf-8"))
    assert record.keys() == {"0", "6"}
    assert record["6"]["rows"] == 2
    assert record["0"]["loss"] > record["6"]["loss"] + 0.5
    assert record["0"]["accuracy"] < 0.05
    assert record["0"]["perplexity"] == pytest.approx(2.718281828 ** record["0"]["loss"], rel=1e-6)


def test_evaluate_equals_transformers_loss_and_generation(
    plain_run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(plain_run.path), f"to={tmp_path}/there"]) == 0
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    train_run = load_trained(plain_run.path)
    dataset = train_run.load_splits().validation
    assert dataset is not None
    module = load_model(train_run, CPU)
    actual = validation_metrics.measure_loss(module, dataset, 3, micro_batch=2)
    tokens_BS = torch.from_numpy(dataset.gather([0, 1, 2])).long()
    with torch.no_grad():
        logits_BTV = reference(tokens_BS[:, :-1]).logits
    accuracy = (logits_BTV.argmax(-1) == tokens_BS[:, 1:]).float().mean()
    loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BS[:, 1:].flatten())
    assert actual.loss == pytest.approx(float(loss), rel=1e-5)
    assert actual.accuracy == pytest.approx(float(accuracy), abs=1e-6)
    assert actual.labels == tokens_BS[:, 1:].numel()

    prompt = "The function returns"
    inputs = AutoTokenizer.from_pretrained(tmp_path / "there")(prompt, return_tensors="pt")
    generated_ids = reference.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    generated_text = AutoTokenizer.from_pretrained(tmp_path / "there").decode(generated_ids)
    capsys.readouterr()
    assert cli.main(["evaluate", str(plain_run.path), f"prompt={prompt}", "tokens=12"]) == 0
    assert generated_text in capsys.readouterr().out


class ConstantModel(ModelModule):
    """Model whose logits do not depend on the previous tokens."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits_V = torch.nn.Parameter(torch.tensor(logits))
        self.longest = 0

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, tokens_BT.shape[1])
        return self.logits_V.expand(*tokens_BT.shape, -1)

    def layers(self) -> list[torch.nn.Module]:
        raise NotImplementedError

    def replace_attention(self, make: object) -> None:
        raise NotImplementedError

    def set_position_ids(self, positions_T: torch.Tensor) -> None:
        raise NotImplementedError


def sampled_ids(module: ConstantModel, temperature: float, count: int, seed: int = 1) -> list[int]:
    generated = generation.generate(module, [0], 8, temperature, seed)
    return [next(generated) for _ in range(count)]


def test_evaluate_temperature_divides_logits() -> None:
    module = ConstantModel(1.0, 2.0, 0.0)
    assert sampled_ids(module, 0, 3) == [1, 1, 1]
    assert (
        sampled_ids(module, 0.7, 50)
        == sampled_ids(module, 0.7, 50)
        != sampled_ids(module, 0.7, 50, seed=2)
    )
    counts = torch.bincount(torch.tensor(sampled_ids(module, 0.5, 4000)), minlength=3) / 4000
    expected = (torch.tensor([1.0, 2.0, 0.0]) / 0.5).softmax(-1)
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.03)
    assert module.longest == 8
    assert sampled_ids(module, 1e-40, 3) == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rows=0"], "must be an integer of 1 or more; set rows=all"),
        (["tokens=x", "temperature=-1"], "2 issues"),
        (["step=4"], "choose one of step="),
        (["temprature=1"], "did you mean temperature?"),
    ],
)
def test_evaluate_rejects_invalid_arguments(
    arguments: list[str], message: str, plain_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(plain_run.path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_evaluate_rejects_prompts_for_token_id_data(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", "data=synthetic", "data.sequence=32")
    with pytest.raises(ConfigError, match="were token ids, not text; leave out prompt"):
        evaluate.main([str(run.path), "prompt=The"])


def test_evaluate_rejects_changed_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    other_text = "one and the other go to the sea and see the ships there"
    text.write_text(f"{other_text}\n" * 400, "utf-8")
    overrides = ("data=text", f"data.paths=[{text}]", "data.vocabulary=300", "data.sequence=32")
    run = train_run(tmp_path / "run", *overrides)
    tokenizer_file = run.path / "tokenizer.json"
    earlier_bytes = tokenizer_file.read_bytes()

    text.write_text("quite another text than that, of other words\n" * 400, "utf-8")
    assert cli.main(["evaluate", str(run.path)]) == 2
    assert f"has another tokenizer than {tokenizer_file}" in capsys.readouterr().err
    more = (*overrides, f"resume={run.path}", "trainer.max_steps=8")
    reason_text = f"have changed since the checkpoint under {run.path} was trained"
    with pytest.raises(CheckpointError, match=reason_text):
        scalewise.train(scalewise.compose([*SMOKE_RUN, *more]), tmp_path / "again")

    text.unlink()  # the run can be used without its training data
    assert cli.main(["export", str(run.path), f"to={tmp_path}/there"]) == 0
    assert (tmp_path / "there" / "tokenizer.json").read_bytes() == earlier_bytes


def test_evaluate_reports_a_fallback_to_an_older_checkpoint(
    plain_run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = RunDir(shutil.copytree(plain_run.path, tmp_path / "copy"))
    shutil.copytree(copy.checkpoint(6), copy.checkpoint(7))
    (weights,) = (copy.checkpoint(7) / "model").iterdir()
    weights.unlink()
    assert cli.main(["evaluate", str(copy.path), "rows=1"]) == 0
    fallback_note = f"step 7 is damaged (model/{weights.name}: is missing); using step 6 instead"
    assert fallback_note in capsys.readouterr().out
    assert cli.main(["evaluate", str(copy.path), "step=5"]) == 2
    assert "choose one of step=3, 6, 7, last, best" in capsys.readouterr().err
