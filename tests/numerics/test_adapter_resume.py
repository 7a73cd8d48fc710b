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
"""PEFT emits it."""

RANK_OVERRIDES = ("adapter.rank=4", "adapter.alpha=6")
LORA = ("adapter=lora", *RANK_OVERRIDES, "adapter.targets=[attention.query,feedforward.*]")
ADAPTERS = {"lora": LORA, "pissa": ("adapter=pissa", *RANK_OVERRIDES), "ia3": ("adapter=ia3",)}
ADAPTERS["trained_parameters"] = (*LORA, "adapter.trained=[.*norm,head]")
CI_CASES = [("lora", "fsdp")]
EXHAUSTIVE_CASES = [
    ("lora", "tensor"),
    ("lora", "deepspeed_zero3"),
    ("lora", "ddp"),
    ("lora", "pipeline_one_f_one_b"),
    ("lora", "pipeline_shard"),
]
EXHAUSTIVE_CASES += [
    (adapter, strategy)
    for adapter in ("pissa", "ia3", "trained_parameters")
    for strategy in ("fsdp", "tensor")
]
TOKENS_BT = torch.arange(64).reshape(2, 32)


@pytest.mark.parametrize(
    ("adapter", "strategy"),
    [pytest.param(*case) for case in CI_CASES]
    + [
        pytest.param(*case, marks=(*marks(case[1]), pytest.mark.exhaustive))
        for case in EXHAUSTIVE_CASES
    ],
)
def test_adapter_resumes_under_another_strategy(
    adapter: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    earlier_run = reference_run("accumulated", *ADAPTERS[adapter])
    overrides = (*ADAPTERS[adapter], f"adapter.resume={earlier_run.path}")
    run = train_strategy(
        STRATEGIES[strategy], "accumulated", JobRunner(tmp_path, shared_cache), *overrides
    )
    reference = reference_run("accumulated", *overrides)
    assert_same_training(run, reference)
    assert reference.column("train/loss")[0] < earlier_run.column("train/loss")[-1]
    assert load_trained(run.path).adapter.resume == str(
        earlier_run.path / "checkpoints/step-00000003"
    )


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_resume_starts_with_saved_weights(
    adapter: str, reference_run: ReferenceRun
) -> None:
    earlier_run = reference_run("accumulated", *ADAPTERS[adapter])
    overrides = [*TINY_DECODER, *LLAMA, *ADAPTERS[adapter]]
    saved_weights = {
        name.removeprefix("model."): tensor for name, tensor in earlier_run.weights().items()
    }
    for path in (earlier_run.path, earlier_run.path / "checkpoints" / "step-00000003"):
        module = build_run(compose([*overrides, f"adapter.resume={path}"]))
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, saved_weights[name.replace(".base_layer.", ".")]), name


def test_adapter_resume_uses_schedule_free_averages(tmp_path: Path, shared_cache: Path) -> None:
    schedule_free = ("optimizer=schedule_free", "schedule=constant", "trainer.max_steps=3")
    earlier_run = JobRunner(tmp_path, shared_cache).without_defaults(
        *TINY_DECODER, *LLAMA, *LORA, *schedule_free
    )
    module = build_run(
        compose([*TINY_DECODER, *LLAMA, *LORA, f"adapter.resume={earlier_run.path}"])
    )
    state = load_trained(earlier_run.path).read_state_dict()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, state[name.replace(".base_layer.", ".")]), name


def test_resumed_adapter_is_not_the_reference_with_adapter_disabled(
    reference_run: ReferenceRun,
) -> None:
    earlier_run = reference_run("accumulated", *LORA)
    overrides = (*LORA, f"adapter.resume={earlier_run.path}")
    untrained_weights = load_trained(
        reference_run("accumulated", *overrides).path, untrained=True
    ).read_merged_state_dict()
    for name, tensor in load_trained(earlier_run.path).read_merged_state_dict().items():
        assert torch.equal(untrained_weights[name], tensor), name
    pairs = ["objective=dpo", "data.pairs=true"]
    assert compose([*TINY_DECODER, *LLAMA, *LORA, *pairs]).runs_reference_forward
    assert not compose([*TINY_DECODER, *LLAMA, *overrides, *pairs]).runs_reference_forward


def build_run(run: Run) -> nn.Module:
    return SingleDevice(DeviceKind.cpu).build(run)


LLAMA_LAYERS = ["q_proj", "up_proj", "down_proj"]
NAMES = ("attention.query", "feedforward.up", "feedforward.down")
TARGETS = f"adapter.targets=[{','.join(NAMES)}]"
FUSED_TARGETS = "adapter.targets=[attention.query,attention.key,attention.value,feedforward.down]"
PEFT_CASES: dict[str, tuple[PeftConfig, tuple[str, ...]]] = {
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
    "trained_parameters": (
        LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=["q_proj"],
            modules_to_save=["lm_head", "input_layernorm", "model.norm"],
        ),
        ("lora", "adapter.targets=[attention.query]", "adapter.trained=[attention_norm,norm,head]"),
    ),
    "fused, trained_parameters": (
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
        ("lora", FUSED_TARGETS),
    ),
    "fused, dora": (
        LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=["c_attn", "mlp.c_proj"],
            fan_in_fan_out=True,
            use_dora=True,
        ),
        ("dora", FUSED_TARGETS),
    ),
}
"""GPT-2 has queries, keys and values in one matrix with a shared A."""

WriteAdapter = Callable[[str], tuple[list[str], Path, Tensor]]


@pytest.fixture
def write_adapter(tmp_path: Path) -> WriteAdapter:
    """Function that writes a PEFT adapter and its base model, and returns the logits."""

    def write(case: str) -> tuple[list[str], Path, Tensor]:
        config, (kind, *extra_overrides) = PEFT_CASES[case]
        shape = [*TINY_DECODER, *(GPT2 if case.startswith("fused") else LLAMA)]
        run, base, folder = compose(shape), tmp_path / "base", tmp_path / "adapter"
        state_dict_adapter.export_folder(build_model(run.model, 1).state_dict(), run.model, base)
        peft_config = deepcopy(config)  # PEFT stores the base model there
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft_config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder)
        fresh_model = AutoModelForCausalLM.from_pretrained(base)
        with torch.no_grad():
            logits_BTV = PeftModel.from_pretrained(fresh_model, folder).eval()(TOKENS_BT).logits
        adapter_overrides = [
            f"adapter={kind}",
            *(RANK_OVERRIDES if kind != "ia3" else ()),
            *extra_overrides,
        ]
        return [*shape, f"model.weights={base}", *adapter_overrides], folder, logits_BTV

    return write


@pytest.mark.parametrize("case", PEFT_CASES)
def test_peft_adapter_import_equals_peft_outputs(case: str, write_adapter: WriteAdapter) -> None:
    base_overrides, folder, logits_BTV = write_adapter(case)
    module = build_run(compose([*base_overrides, f"adapter.resume={folder}"]))
    with torch.no_grad():
        torch.testing.assert_close(module(TOKENS_BT), logits_BTV, rtol=1e-4, atol=1e-4)
        assert (build_run(compose(base_overrides))(TOKENS_BT) - logits_BTV).abs().max() > 0.01


def rejection_message(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as excinfo:
        compose(overrides)
    return [str(issue) for issue in excinfo.value.issues]


def test_adapter_resume_reports_all_differences_at_once(reference_run: ReferenceRun) -> None:
    earlier_run: RunDir = reference_run("accumulated", *LORA)
    overrides = [*TINY_DECODER, *LLAMA, f"adapter.resume={earlier_run.path}"]
    message = rejection_message(
        [*overrides, "adapter=dora", "adapter.rank=2", "model.width=64", "seed=3"]
    )
    fixes = ("model.width=32", "seed=1", "adapter=lora", "adapter.rank=4", "adapter.alpha=6.0")
    fixes += ("'adapter.targets=[attention.query,feedforward.*]'",)
    assert len(message) == len(fixes)
    for issue, fix in zip(message, fixes, strict=True):
        assert issue.endswith(f"set {fix}, or adapter.resume=null"), issue
    run_without_adapter = reference_run("accumulated")
    (issue,) = rejection_message(
        [*TINY_DECODER, *LLAMA, "adapter=lora", f"adapter.resume={run_without_adapter.path}"]
    )
    assert "belongs to a run without adapter" in issue


def test_peft_folder_import_rejects_unsupported_settings(write_adapter: WriteAdapter) -> None:
    base_overrides, folder, _ = write_adapter("lora")
    base_overrides += [f"adapter.resume={folder}"]
    (issue,) = rejection_message([*base_overrides, "adapter=rslora"])
    assert issue.endswith("set adapter=lora, or adapter.resume=null")
    message = rejection_message(
        [*base_overrides, "adapter.rank=8", "adapter.targets=[attention.query]"]
    )
    fixes = ("adapter.rank=4", f"'adapter.targets=[{','.join(NAMES)}]'")
    for issue, fix in zip(message, fixes, strict=True):
        assert issue.endswith(f"set {fix}, or adapter.resume=null"), issue
    (issue,) = rejection_message([*base_overrides, "adapter.trained=[norm]"])
    assert issue.endswith("set 'adapter.trained=[]', or adapter.resume=null")
    for extra_overrides, reason in (
        (["model.layers=5", "model.weights=null"], "lacks layers.4."),
        (["model.layers=3", "model.weights=null"], "holds layers.3."),
        (["model.width=64", "model.weights=null"], "the model has (4, 64)"),
        (["model.bias=true", "model.weights=null"], "is not supported by Hugging Face's Llama"),
    ):
        (issue,) = rejection_message([*base_overrides, *extra_overrides])
        assert reason in issue, extra_overrides
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, reason in (
        ({"peft_type": "PROMPT_TUNING"}, "is of a kind that is not supported"),
        ({"init_lora_weights": "olora"}, "is of a kind that is not supported"),
        ({"alpha_pattern": {"q_proj": 5}}, "differs from the other layers in rank or alpha"),
        ({"alpha_pattern": [5]}, "has an invalid r, lora_alpha or alpha_pattern"),
        ({"r": None}, "has an invalid r, lora_alpha or alpha_pattern"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        (issue,) = rejection_message(base_overrides)
        assert reason in issue, change
    (folder / "adapter_config.json").write_text(json.dumps(config)[:-9])
    (issue,) = rejection_message(base_overrides)
    assert "adapter_config.json is truncated" in issue
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights_file = folder / "adapter_model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-9])
    (issue,) = rejection_message(base_overrides)
    assert "adapter_model.safetensors cannot be read as safetensors: it is truncated" in issue
    assert "copy the folder again" in issue
    weights_file.rename(folder / "adapter_model.bin")
    (issue,) = rejection_message(base_overrides)
    assert "pickles are not read" in issue


def test_peft_fused_layer_requires_targets_of_all_its_parts(write_adapter: WriteAdapter) -> None:
    base_overrides, folder, _ = write_adapter("fused")
    targets = "adapter.targets=[attention.query,feedforward.down]"
    (issue,) = rejection_message([*base_overrides, targets, f"adapter.resume={folder}"])
    assert "changes layers that adapter.targets does not match" in issue
