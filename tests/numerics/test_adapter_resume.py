"""Runs that start from a trained adapter of scalewise or PEFT, under every strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import ReferenceRun, assert_same_training, train_strategy
from fixtures.strategies import GPT2, LLAMA, STRATEGIES, TINY_DECODER, marks
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from scalewise import ConfigError, Run, compose
from scalewise.commands.run_arguments import load_trained
from scalewise.hardware import DeviceKind
from scalewise.models.build import build_model
from scalewise.models.decoder import state_dict_adapter
from scalewise.strategies.single import SingleDevice

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")
"""PEFT asks for it."""

RANK = ("adapter.rank=4", "adapter.alpha=6")
LORA = ("adapter=lora", *RANK, "adapter.targets=[attention.query,feedforward.*]")
ADAPTERS = {"lora": LORA, "pissa": ("adapter=pissa", *RANK), "ia3": ("adapter=ia3",)}
ADAPTERS["whole"] = (*LORA, "adapter.trained=[.*norm,head]")
USUAL = [("lora", "fsdp")]
FURTHER = [
    ("lora", "tensor"),
    ("lora", "deepspeed_zero3"),
    ("lora", "ddp"),
    ("lora", "pipeline_one_f_one_b"),
    ("lora", "pipeline_shard"),
]
FURTHER += [
    (adapter, strategy) for adapter in ("pissa", "ia3", "whole") for strategy in ("fsdp", "tensor")
]
TOKENS_BT = torch.arange(64).reshape(2, 32)


@pytest.mark.parametrize(
    ("adapter", "strategy"),
    [pytest.param(*case) for case in USUAL]
    + [pytest.param(*case, marks=(*marks(case[1]), pytest.mark.exhaustive)) for case in FURTHER],
)
def test_adapter_resumes_under_another_strategy(
    adapter: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    earlier = reference_run("accumulated", *ADAPTERS[adapter])
    overrides = (*ADAPTERS[adapter], f"adapter.resume={earlier.path}")
    run = train_strategy(
        STRATEGIES[strategy], "accumulated", JobRunner(tmp_path, shared_cache), *overrides
    )
    reference = reference_run("accumulated", *overrides)
    assert_same_training(run, reference)
    assert reference.column("train/loss")[0] < earlier.column("train/loss")[-1]
    assert load_trained(run.path).adapter.resume == str(earlier.path / "checkpoints/step-00000003")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_resume_starts_with_saved_weights(
    adapter: str, reference_run: ReferenceRun
) -> None:
    earlier = reference_run("accumulated", *ADAPTERS[adapter])
    overrides = [*TINY_DECODER, *LLAMA, *ADAPTERS[adapter]]
    held = {name.removeprefix("model."): each for name, each in earlier.weights().items()}
    for path in (earlier.path, earlier.path / "checkpoints" / "step-00000003"):
        module = built(compose([*overrides, f"adapter.resume={path}"]))
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, held[name.replace(".base_layer.", ".")]), name


def test_adapter_resume_uses_schedule_free_averages(tmp_path: Path, shared_cache: Path) -> None:
    free = ("optimizer=schedule_free", "schedule=constant", "trainer.max_steps=3")
    earlier = JobRunner(tmp_path, shared_cache).without_defaults(
        *TINY_DECODER, *LLAMA, *LORA, *free
    )
    module = built(compose([*TINY_DECODER, *LLAMA, *LORA, f"adapter.resume={earlier.path}"]))
    state = load_trained(earlier.path).read_state_dict()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, state[name.replace(".base_layer.", ".")]), name


def test_resumed_adapter_is_not_the_reference_with_adapter_disabled(
    reference_run: ReferenceRun,
) -> None:
    earlier = reference_run("accumulated", *LORA)
    overrides = (*LORA, f"adapter.resume={earlier.path}")
    began = load_trained(
        reference_run("accumulated", *overrides).path, untrained=True
    ).read_merged_state_dict()
    for name, tensor in load_trained(earlier.path).read_merged_state_dict().items():
        assert torch.equal(began[name], tensor), name
    pairs = ["objective=dpo", "data.pairs=true"]
    assert compose([*TINY_DECODER, *LLAMA, *LORA, *pairs]).runs_reference_forward
    assert not compose([*TINY_DECODER, *LLAMA, *overrides, *pairs]).runs_reference_forward


def built(run: Run) -> nn.Module:
    return SingleDevice(DeviceKind.cpu).build(run)


LLAMA_LAYERS = ["q_proj", "up_proj", "down_proj"]
NAMES = ("attention.query", "feedforward.up", "feedforward.down")
TARGETS = f"adapter.targets=[{','.join(NAMES)}]"
FUSED = "adapter.targets=[attention.query,attention.key,attention.value,feedforward.down]"
WRITTEN: dict[str, tuple[PeftConfig, tuple[str, ...]]] = {
    "lora": (LoraConfig(r=4, lora_alpha=6, target_modules=LLAMA_LAYERS), ("lora", TARGETS)),
    "rslora": (
        LoraConfig(r=4, lora_alpha=6, target_modules=LLAMA_LAYERS, use_rslora=True),
        ("rslora", TARGETS),
    ),
    "dora": (
        LoraConfig(r=4, lora_alpha=6, target_modules=LLAMA_LAYERS, use_dora=True),
        ("dora", TARGETS),
    ),
    "pissa": (
        LoraConfig(r=4, lora_alpha=6, target_modules=LLAMA_LAYERS, init_lora_weights="pissa"),
        ("pissa", TARGETS),
    ),
    "whole": (
        LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=["q_proj"],
            modules_to_save=["lm_head", "input_layernorm", "model.norm"],
        ),
        ("lora", "adapter.targets=[attention.query]", "adapter.trained=[attention_norm,norm,head]"),
    ),
    "fused, whole": (
        LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=["mlp.c_proj"],
            modules_to_save=["c_attn", "ln_f"],
            fan_in_fan_out=True,
        ),
        (
            "lora",
            "adapter.targets=[feedforward.down]",
            "adapter.trained=[attention.query,attention.key,attention.value,norm]",
        ),
    ),
    "ia3": (
        IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        ("ia3",),
    ),
    "fused": (
        LoraConfig(r=4, lora_alpha=6, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True),
        ("lora", FUSED),
    ),
    "fused, dora": (
        LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=["c_attn", "mlp.c_proj"],
            fan_in_fan_out=True,
            use_dora=True,
        ),
        ("dora", FUSED),
    ),
}
"""GPT-2 has queries, keys and values in one matrix, which share an A."""

Written = Callable[[str], tuple[list[str], Path, Tensor]]


@pytest.fixture
def write_adapter(tmp_path: Path) -> Written:
    """Function that writes an adapter by PEFT, next to the model that it is for, and its logits."""

    def write(case: str) -> tuple[list[str], Path, Tensor]:
        config, (kind, *further) = WRITTEN[case]
        shape = [*TINY_DECODER, *(GPT2 if case.startswith("fused") else LLAMA)]
        run, base, folder = compose(shape), tmp_path / "base", tmp_path / "adapter"
        state_dict_adapter.export_folder(build_model(run.model, 1).state_dict(), run.model, base)
        own = deepcopy(config)  # PEFT writes the base into it
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), own)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder)
        fresh = AutoModelForCausalLM.from_pretrained(base)
        with torch.no_grad():
            logits_BTV = PeftModel.from_pretrained(fresh, folder).eval()(TOKENS_BT).logits
        kind_line = [f"adapter={kind}", *(RANK if kind != "ia3" else ()), *further]
        return [*shape, f"model.weights={base}", *kind_line], folder, logits_BTV

    return write


@pytest.mark.parametrize("case", WRITTEN)
def test_peft_adapter_import_equals_peft_outputs(case: str, write_adapter: Written) -> None:
    line, folder, logits_BTV = write_adapter(case)
    module = built(compose([*line, f"adapter.resume={folder}"]))
    with torch.no_grad():
        torch.testing.assert_close(module(TOKENS_BT), logits_BTV, rtol=1e-4, atol=1e-4)
        assert (built(compose(line))(TOKENS_BT) - logits_BTV).abs().max() > 0.01


def said(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    return [str(issue) for issue in refused.value.issues]


def test_adapter_resume_reports_all_differences_at_once(reference_run: ReferenceRun) -> None:
    earlier: RunDir = reference_run("accumulated", *LORA)
    overrides = [*TINY_DECODER, *LLAMA, f"adapter.resume={earlier.path}"]
    found = said([*overrides, "adapter=dora", "adapter.rank=2", "model.width=64", "seed=3"])
    fixes = ("model.width=32", "seed=1", "adapter=lora", "adapter.rank=4", "adapter.alpha=6.0")
    fixes += ("'adapter.targets=[attention.query,feedforward.*]'",)
    assert len(found) == len(fixes)
    for issue, fix in zip(found, fixes, strict=True):
        assert issue.endswith(f"set {fix}, or adapter.resume=null"), issue
    plain = reference_run("accumulated")
    (issue,) = said([*TINY_DECODER, *LLAMA, "adapter=lora", f"adapter.resume={plain.path}"])
    assert "belongs to a run without adapter" in issue


def test_peft_folder_import_rejects_unsupported_settings(write_adapter: Written) -> None:
    line, folder, _ = write_adapter("lora")
    line += [f"adapter.resume={folder}"]
    (issue,) = said([*line, "adapter=rslora"])
    assert issue.endswith("set adapter=lora, or adapter.resume=null")
    found = said([*line, "adapter.rank=8", "adapter.targets=[attention.query]"])
    fixes = ("adapter.rank=4", f"'adapter.targets=[{','.join(NAMES)}]'")
    for issue, fix in zip(found, fixes, strict=True):
        assert issue.endswith(f"set {fix}, or adapter.resume=null"), issue
    (issue,) = said([*line, "adapter.trained=[norm]"])
    assert issue.endswith("set 'adapter.trained=[]', or adapter.resume=null")
    for further, reason in (
        (["model.layers=5", "model.weights=null"], "lacks layers.4."),
        (["model.layers=3", "model.weights=null"], "holds layers.3."),
        (["model.width=64", "model.weights=null"], "the model has (4, 64)"),
        (["model.bias=true", "model.weights=null"], "is not supported by Hugging Face's Llama"),
    ):
        (issue,) = said([*line, *further])
        assert reason in issue, further
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, reason in (
        ({"peft_type": "PROMPT_TUNING"}, "is of a kind that is not supported"),
        ({"init_lora_weights": "olora"}, "is of a kind that is not supported"),
        ({"alpha_pattern": {"q_proj": 5}}, "differs from the other layers in rank or alpha"),
        ({"alpha_pattern": [5]}, "has an invalid r, lora_alpha or alpha_pattern"),
        ({"r": None}, "has an invalid r, lora_alpha or alpha_pattern"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        (issue,) = said(line)
        assert reason in issue, change
    (folder / "adapter_config.json").write_text(json.dumps(config)[:-9])
    (issue,) = said(line)
    assert "adapter_config.json is truncated" in issue
    (folder / "adapter_config.json").write_text(json.dumps(config))
    held = folder / "adapter_model.safetensors"
    held.write_bytes(held.read_bytes()[:-9])
    (issue,) = said(line)
    assert "adapter_model.safetensors cannot be read as safetensors: it is truncated" in issue
    assert "copy the folder again" in issue
    held.rename(folder / "adapter_model.bin")
    (issue,) = said(line)
    assert "pickles are not read" in issue


def test_peft_fused_layer_requires_targets_of_all_its_parts(write_adapter: Written) -> None:
    line, folder, _ = write_adapter("fused")
    targets = "adapter.targets=[attention.query,feedforward.down]"
    (issue,) = said([*line, targets, f"adapter.resume={folder}"])
    assert "changes layers that adapter.targets does not match" in issue
