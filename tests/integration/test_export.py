"""A model trained here is a model there: checkpoint to Hugging Face folder and back."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import scalewise
from scalewise.checkpoints import store
from scalewise.models.decoder import weights

PREFIX = "model."


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[scalewise.Run, dict[str, torch.Tensor]]:
    """Returns a run of a few steps and its weights, by the model's own names."""
    run = scalewise.compose(["experiment=smoke", "tracking=none", "trainer.max_steps=8"])
    result = scalewise.train(run, tmp_path_factory.mktemp("trained") / "run")
    assert result.status == "ok", result.reason
    checkpoint = store.latest(result.folder / "checkpoints")
    assert checkpoint is not None
    held = store.whole(checkpoint)
    return run, {name.removeprefix(PREFIX): tensor for name, tensor in held.items()}


def test_the_export_gives_the_same_logits_in_transformers(
    trained: tuple[scalewise.Run, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    run, state = trained
    module = run.model.build(run.seed)
    module.load_state_dict(state)
    weights.export(state, run.model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens_BT = torch.randint(0, run.model.vocabulary, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(
            module(tokens_BT), theirs(tokens_BT).logits, rtol=1e-5, atol=1e-5
        )


def test_the_export_starts_a_new_run(
    trained: tuple[scalewise.Run, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    run, state = trained
    weights.export(state, run.model, tmp_path)
    line = ["experiment=smoke", "tracking=none", f"model.weights={tmp_path}"]
    started = scalewise.compose(line).model.build(run.seed)
    for name, tensor in started.state_dict().items():
        assert torch.equal(tensor, state[name]), name
