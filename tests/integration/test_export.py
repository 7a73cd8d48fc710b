"""Export to a Hugging Face folder, and training from it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import scalewise
from scalewise import cli
from scalewise.checkpoints import manifest, store
from scalewise.commands.run_arguments import load_trained
from scalewise.export import AdapterExport, hf_export
from scalewise.hardware import DeviceKind
from scalewise.models.build import build_model
from scalewise.models.decoder import state_dict_adapter
from scalewise.strategies.single import SingleDevice

PREFIX = "model."


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[scalewise.Run, dict[str, torch.Tensor]]:
    """Run of a few steps, and its weights by model names."""
    run = scalewise.compose(["experiment=smoke", "tracking=none", "trainer.max_steps=8"])
    result = scalewise.train(run, tmp_path_factory.mktemp("trained") / "run")
    assert result.status == "ok", result.reason
    checkpoint = manifest.newest_checkpoint(result.folder / "checkpoints")
    assert checkpoint is not None
    tensors = store.full_tensors(checkpoint)
    return run, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def test_export_has_the_same_logits_in_transformers(
    trained: tuple[scalewise.Run, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    run, state = trained
    module = build_model(run.model, run.seed)
    module.load_state_dict(state)
    state_dict_adapter.export_folder(state, run.model, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens_BT = torch.randint(0, run.model.vocabulary, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(
            module(tokens_BT), reference(tokens_BT).logits, rtol=1e-5, atol=1e-5
        )


def test_export_initializes_a_new_run(
    trained: tuple[scalewise.Run, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    run, state = trained
    state_dict_adapter.export_folder(state, run.model, tmp_path)
    overrides = ["experiment=smoke", "data=synthetic", "tracking=none", f"model.weights={tmp_path}"]
    initial_model = build_model(scalewise.compose(overrides).model, run.seed)
    for name, tensor in initial_model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


SMOKE_RUN = (
    "experiment=smoke",
    "tracking=none",
    "trainer.max_steps=4",
    "schedule.warmup_steps=1",
    "optimizer.lr=0.03",
)
ALL_TARGETS = ("adapter.rank=4", "adapter.targets=[.*]")
GPT2 = (
    "model.norm=layernorm",
    "model.position=learned",
    "model.activation=gelu",
    "model.bias=true",
)
GPT_NEOX = (
    *("model.norm=layernorm", "model.activation=gelu_exact", "model.bias=true"),
    *("model.residual=parallel", "model.rotary_fraction=0.5", "model.tied=false"),
    "model.kv_heads=null",
)
CASES = {
    "lora": ("adapter=lora", *ALL_TARGETS),
    "rslora": ("adapter=rslora", *ALL_TARGETS),
    "pissa": ("adapter=pissa", *ALL_TARGETS),
    "dora": ("adapter=dora", *ALL_TARGETS),
    "ia3": ("adapter=ia3",),
    "trained_parameters": (
        "adapter=lora",
        "adapter.rank=4",
        "adapter.trained=[embedding,.*norm,.*up]",
    ),
    "ia3, head": ("adapter=ia3", "model.tied=false", "adapter.trained=[head,attention.output]"),
    "fused, trained_parameters": (
        "adapter=lora",
        "adapter.targets=[feedforward.up]",
        "adapter.trained=[attention.query,embedding,position,.*norm]",
        *GPT2,
    ),
    "fused": ("adapter=lora", "adapter.targets=[attention.query,attention.value]", *GPT2),
    "fused, rslora": ("adapter=rslora", *ALL_TARGETS, *GPT2),
    "fused, dora": ("adapter=dora", "adapter.targets=[attention.query,attention.value]", *GPT2),
    "fused, ia3": ("adapter=ia3", *GPT2),
    "interleaved": ("adapter=lora", "adapter.targets=[attention.query]", *GPT_NEOX),
    "interleaved, dora": ("adapter=dora", *ALL_TARGETS, *GPT_NEOX),
    "interleaved, ia3": ("adapter=ia3", *GPT_NEOX),
    "interleaved, trained_parameters": (
        *("adapter=lora", "adapter.targets=[feedforward.up]"),
        "adapter.trained=[attention.query,attention.key,attention.value,head]",
        *GPT_NEOX,
    ),
}
EXHAUSTIVE_CASES = (
    "rslora",
    "dora",
    "fused",
    "trained_parameters",
    "ia3, head",
    "fused, rslora",
    "fused, dora",
    "interleaved, dora",
    "interleaved, trained_parameters",
)
"""GPT-2 has queries, keys and values in one matrix, and transposed; GPT-NeoX head by head."""

TOKENS_BT = torch.arange(64).reshape(2, 32)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.exhaustive if case in EXHAUSTIVE_CASES else ())
        for case in CASES
    ],
)
def test_export_writes_adapters_merged_and_separate(case: str, tmp_path: Path) -> None:
    run = scalewise.compose([*SMOKE_RUN, *CASES[case]])
    result = scalewise.train(run, tmp_path / "run")
    assert result.status == "ok", result.reason
    trained_run = load_trained(result.folder)

    actual = SingleDevice(DeviceKind.cpu).build(run)
    with torch.no_grad():
        base_logits = actual(TOKENS_BT)
        state = trained_run.read_state_dict()
        for name, parameter in actual.named_parameters():
            parameter.copy_(state[name.replace(".base_layer.", ".")])
        trained_logits = actual(TOKENS_BT)
    assert (trained_logits - base_logits).abs().max() > 0.05

    merged_folder, adapter_folder = tmp_path / "merged", tmp_path / "alone"
    assert hf_export.write_export(trained_run, merged_folder, AdapterExport.merged) == []
    assert_close(AutoModelForCausalLM.from_pretrained(merged_folder), trained_logits)
    assert hf_export.write_export(trained_run, adapter_folder, AdapterExport.alone) == []
    base = AutoModelForCausalLM.from_pretrained(adapter_folder / "base")
    assert_close(PeftModel.from_pretrained(base, adapter_folder), trained_logits)

    if (
        case == "pissa"
    ):  # separately exported, it is LoRA of twice the rank on the original matrices
        second_adapter = (
            "adapter=lora",
            "adapter.rank=8",
            "adapter.alpha=32",
            "adapter.targets=[.*]",
        )
        resumed = scalewise.compose(
            [*SMOKE_RUN, *second_adapter, f"adapter.resume={adapter_folder}"]
        )
        with torch.no_grad():
            resumed_logits = SingleDevice(DeviceKind.cpu).build(resumed)(TOKENS_BT)
        torch.testing.assert_close(resumed_logits, trained_logits, rtol=1e-4, atol=1e-4)
        return
    resumed = scalewise.compose([*SMOKE_RUN, *CASES[case], f"adapter.resume={adapter_folder}"])
    for name, parameter in SingleDevice(DeviceKind.cpu).build(resumed).named_parameters():
        assert torch.equal(parameter, state[name.replace(".base_layer.", ".")]), name


def assert_close(expected: Any, logits_BTV: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(expected(TOKENS_BT).logits, logits_BTV, rtol=1e-4, atol=1e-4)


def test_export_command_writes_a_folder_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = scalewise.train(scalewise.compose(SMOKE_RUN), tmp_path / "run")
    assert cli.main(["export", str(result.folder)]) == 0
    export_folder = result.folder / "export"
    stdout = capsys.readouterr().out.splitlines()
    assert f"exported step 4 of {result.folder}" in stdout
    assert stdout[-1] == f"result {export_folder}"
    tokenizer = AutoTokenizer.from_pretrained(export_folder)
    tokens = tokenizer("Alice was beginning to get very tired")
    assert max(tokens["input_ids"]) < 4096
    config = AutoModelForCausalLM.from_pretrained(export_folder).generation_config
    assert config.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    card = (export_folder / "README.md").read_text("utf-8")
    assert "after 4 of 4 steps" in card
    assert "scalewise train experiment=smoke" in card
    (result.folder / "summary.json").unlink()  # as in a killed run
    assert cli.main(["export", str(result.folder), f"to={tmp_path}/killed"]) == 0
    capsys.readouterr()
    assert "a run that did not finish" in (tmp_path / "killed" / "README.md").read_text("utf-8")
    for arguments, stdout in (
        ([str(result.folder)], "already exists; set to=FOLDER"),
        ([str(result.folder), f"to={tmp_path}/new", "step=3"], "choose one of step=4, last"),
        ([str(result.folder), f"to={tmp_path}/new", "adapter=alone"], "has trained no adapter"),
        ([str(result.folder), "adapter=half", "two=2"], "choose one of adapter=merged, alone"),
        ([str(result.folder), "to=/proc/none"], "cannot be created: No such file"),
        ([str(tmp_path)], "is not a run folder"),
        ([], "no folder given"),
    ):
        assert cli.main(["export", *arguments]) == 2, arguments
        assert stdout in capsys.readouterr().err, arguments
    assert not (tmp_path / "new").exists()
    (weights,) = (result.folder / "checkpoints").glob("*/model/*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    assert cli.main(["export", str(result.folder), f"to={tmp_path}/new"]) == 2
    assert (
        f"are damaged: step 4 is damaged (model/{weights.name}: has 100 of"
        in capsys.readouterr().err
    )
