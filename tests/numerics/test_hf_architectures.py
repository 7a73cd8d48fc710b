"""Architectures of transformers: loss, one step and export compared with transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.hf_architectures import (
    ARCHITECTURES,
    REJECTED,
    TRAINED,
    ArchitectureFolders,
    Kind,
)
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import BATCHES, SGD, assert_same_training
from fixtures.rejections import assert_rejected, rejection_issues
from fixtures.strategies import STRATEGIES, TINY_DECODER
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F

from scalewise import compose
from scalewise.commands.run_arguments import load_trained
from scalewise.export import AdapterExport, hf_export
from scalewise.hardware import DeviceKind
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.base import StageSlice
from scalewise.models.build import build_model, export_model
from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.models.op_graph import Recompute
from scalewise.objectives import IGNORED, CausalLM
from scalewise.planner import peak_memory
from scalewise.strategies.activation_checkpointing import apply_checkpointing
from scalewise.strategies.base import ScaledLoss
from scalewise.tracing.step_trace import trace_run

EXHAUSTIVE = pytest.mark.exhaustive
CI_TENSOR = ("qwen3", "sequence_parallel")
LEARNING_RATE = 0.1
SYNTHETIC = ("data=synthetic", "data.sequence=64", "trainer.micro_batch=8")
STRATEGY_FAMILIES = ("qwen3", "gemma3_text", "bloom", "mixtral", "deepseek_v2", "qwen2_5_vl")
"""One architecture of each kind: dense, tied with windows, tuples, experts, unequal blocks, and a
vision tower."""
OPTIONS: dict[str, tuple[str, ...]] = {
    "fsdp": STRATEGIES["fsdp"],
    "hsdp": STRATEGIES["hsdp"],
    "checkpoint_selective": ("memory=checkpoint_selective",),
    "loss_chunk": ("objective.loss_chunk=40",),
    "offload": ("memory=offload_activations",),
    "compile_block": ("compile=block", "compile.backend=aot_eager"),
}
FEW = ("qwen3", "mistral", "gpt2", "bloom", "mixtral", "deepseek_v3", "qwen2_5_vl")
"""Architectures of each kind that CI tests."""
EQUAL_BLOCKS_ONLY = {
    "offload": ("memory.offload", "memory=checkpoint_full"),
    "compile_block": ("compile", "compile=none"),
}
"""Options that models with several kinds of blocks reject: key and fix."""
CI_OPTIONS = (("mixtral", "fsdp"),)
TENSOR_FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "exaone4")
TENSOR_OPTIONS = {
    "sequence_parallel": STRATEGIES["tensor"],
    "no_sequence_parallel": (*STRATEGIES["tensor"], "parallelism.sequence_parallel=false"),
    "shards": STRATEGIES["shard_tensor"],
    "checkpoint_full": (*STRATEGIES["tensor"], "memory=checkpoint_full"),
    "loss_chunk": (*STRATEGIES["tensor"], "objective.loss_chunk=40"),
}
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("architectures"), shared_cache)


def ci_cases(*families: str) -> list[Any]:
    """All architectures that train, of which CI tests ``families``."""
    return [pytest.param(it, marks=() if it in families else EXHAUSTIVE) for it in TRAINED]


def training_overrides(folder: Path, *extra_overrides: str) -> tuple[str, ...]:
    """Overrides of a run without those of the decoder."""
    overrides = (*TINY_DECODER, *SGD, *BATCHES["combined"], *extra_overrides)
    others = (override for override in overrides if not override.startswith("model"))
    return ("model=hf", f"model.path={folder}", *others)


def random_tokens() -> Tensor:
    return torch.randint(2, 256, (2, 33), generator=torch.Generator().manual_seed(2))


def load_transformers(family: str, folder: Path) -> Any:
    return ARCHITECTURES[family].model_class.from_pretrained(folder)


@pytest.mark.parametrize("family", TRAINED)
def test_hf_architecture_trains_and_exports_as_in_transformers(
    family: str, hf_architecture: ArchitectureFolders, tmp_path: Path
) -> None:
    folder, tokens = hf_architecture(family), random_tokens()
    spec = HuggingFaceConfig(path=str(folder))
    assert [*spec.validate()] == []
    expected = load_transformers(family, folder).train()
    torch.manual_seed(5)  # routers of PhiMoE draw numbers
    no_images = {"token_type_ids": torch.zeros_like(tokens)} if family == "gemma3" else {}
    expected_loss = expected(input_ids=tokens, labels=tokens, use_cache=False, **no_images).loss
    expected_loss.backward()

    module = build_model(spec, 1).train()
    stage = StageSlice(range(spec.layers))
    apply_checkpointing(FixedCheckpointing(Recompute.full), module, stage, DeviceKind.cpu)
    assert len(module.layers()) == expected.config.get_text_config().num_hidden_layers
    batch = {"inputs": tokens, "labels": F.pad(tokens[:, 1:], (0, 1), value=IGNORED)}
    torch.manual_seed(5)
    loss = ScaledLoss(CausalLM()).compute(module, batch)
    loss.backward()
    targets = tokens[:, 1:].numel()
    torch.testing.assert_close(loss / targets, expected_loss, **CLOSE)

    for parameters, scale in ((module.parameters(), targets), (expected.parameters(), 1)):
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE / scale * parameter.grad
    export_model(spec, module.state_dict(), tmp_path)
    exported, weights = load_transformers(family, tmp_path), dict(expected.named_parameters())
    assert [name for name, _ in exported.named_parameters()] == [*weights]
    for name, weight in exported.named_parameters():
        torch.testing.assert_close(
            weight, weights[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )
    with torch.no_grad():
        logits, module_logits = exported.eval()(tokens).logits, module.eval()(tokens)
    torch.testing.assert_close(module_logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", REJECTED)
def test_hf_architecture_is_rejected_with_what_to_do(
    family: str, hf_architecture: ArchitectureFolders
) -> None:
    overrides = ["model=hf", f"model.path={hf_architecture(family)}", *SYNTHETIC]
    (issue,) = rejection_issues(overrides)
    assert issue.key == "model.path"
    assert ARCHITECTURES[family].rejection in issue.reason
    assert issue.fix.startswith("choose ")
    assert issue.fix.endswith(" model, such as Llama, GPT-2, OPT or Qwen2")


@pytest.mark.parametrize("family", ci_cases(*FEW))
def test_hf_architecture_packs_texts_or_rejects_packing(
    family: str, hf_architecture: ArchitectureFolders
) -> None:
    """Logits of two texts in one sequence equal those of each text."""
    overrides = ["model=hf", f"model.path={hf_architecture(family)}", *SYNTHETIC]
    if not ARCHITECTURES[family].packs_texts:
        reason = f"is not supported for {family}"
        overrides += ["data.packing=true"]
        assert_rejected(overrides, "data.packing", reason, "data.packing=false")
        return
    run = compose([*overrides, "data.packing=true"])
    module, tokens = build_model(run.model, 1).eval(), random_tokens()
    lengths = (20, 13)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    with torch.no_grad():
        packed, (first, second) = module(tokens, None, positions), tokens.split(lengths, dim=1)
        separate = torch.cat([module(first), module(second)], dim=1)
    torch.testing.assert_close(packed, separate, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ci_cases(*FEW))
def test_hf_architecture_has_a_tensor_parallel_plan_or_is_rejected(
    family: str, hf_architecture: ArchitectureFolders
) -> None:
    overrides = ["model=hf", f"model.path={hf_architecture(family)}", *SYNTHETIC]
    overrides += ["parallelism=tensor", "parallelism.tensor=2"]
    if ARCHITECTURES[family].has_tp_plan:
        assert compose(overrides).parallelism.sizes["tensor"] == 2
    else:
        issue = rejection_issues(overrides)[0]
        assert issue.key == "parallelism.tensor"
        assert issue.fix == "set parallelism=fsdp, hsdp, ddp or deepspeed_zero3"


@pytest.mark.parametrize("family", ci_cases("mixtral", "deepseek_v2"))
def test_hf_architecture_memory_equals_trace(
    family: str, hf_architecture: ArchitectureFolders
) -> None:
    """Masks of windows and of full attention are both counted for all layers."""
    run = compose(["model=hf", f"model.path={hf_architecture(family)}", *SYNTHETIC])
    predicted, traced = peak_memory.worst_rank_breakdown(run).peak, trace_run(run).peak
    tolerance = 0.05 if ARCHITECTURES[family].has_two_masks else 0.02
    assert predicted == pytest.approx(traced, rel=tolerance)


def test_hf_flops_count_the_experts_of_one_token(hf_architecture: ArchitectureFolders) -> None:
    """A token of Mixtral passes through 2 of 4 experts."""
    spec = HuggingFaceConfig(path=str(hf_architecture("mixtral")))
    width, hidden, layers, sequence = 32, 48, 3, 64
    attention = 2 * width * width + 2 * width * width // 2
    block = attention + 2 * 3 * width * hidden + 4 * width
    matmul_flops = 6 * (layers * block + 256 * width)
    attention_flops = 14 * layers * sequence * width
    assert spec.flops(sequence) == matmul_flops + attention_flops


@pytest.mark.parametrize(
    ("family", "option"),
    [
        pytest.param(family, option, marks=() if (family, option) in CI_OPTIONS else EXHAUSTIVE)
        for family in STRATEGY_FAMILIES
        for option in OPTIONS
        if ARCHITECTURES[family].kind is not Kind.unequal or option not in EQUAL_BLOCKS_ONLY
    ],
)
def test_hf_architecture_trains_equally_with_each_option(
    family: str, option: str, hf_architecture: ArchitectureFolders, run_job: JobRunner
) -> None:
    folder = hf_architecture(family)
    overrides = training_overrides(folder, *OPTIONS[option])
    micro_batch = 12 // compose(overrides).parallelism.data_parallel_size // 3
    assert_same_training(
        run_job.without_defaults(*overrides, f"trainer.micro_batch={micro_batch}"),
        run_job.without_defaults(*training_overrides(folder), "trainer.micro_batch=12"),
    )


@pytest.mark.parametrize(
    ("family", "option"),
    [
        pytest.param(family, option, marks=() if (family, option) == CI_TENSOR else EXHAUSTIVE)
        for family in TENSOR_FAMILIES
        for option in TENSOR_OPTIONS
    ],
)
def test_hf_tensor_parallel_architecture_equals_one_device(
    family: str, option: str, hf_architecture: ArchitectureFolders, run_job: JobRunner
) -> None:
    folder = hf_architecture(family)
    overrides = training_overrides(folder, *TENSOR_OPTIONS[option])
    micro_batch = 12 // compose(overrides).parallelism.data_parallel_size // 3
    assert_same_training(
        run_job.without_defaults(*overrides, f"trainer.micro_batch={micro_batch}"),
        run_job.without_defaults(*training_overrides(folder), "trainer.micro_batch=12"),
    )


@EXHAUSTIVE
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning",  # PEFT reads it
    "ignore:The following .*_pattern keys:RuntimeWarning",  # PEFT adds some for experts
)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "qwen2_5_vl"])
def test_hf_architecture_exports_an_adapter_that_peft_loads(
    family: str, hf_architecture: ArchitectureFolders, run_job: JobRunner
) -> None:
    """PEFT's logits equal those of the merged export, which differ from the base model's."""
    folder = hf_architecture(family)
    run = run_job.without_defaults(*training_overrides(folder, "adapter=lora", "adapter.rank=4"))
    for kind in (AdapterExport.alone, AdapterExport.merged):
        hf_export.write_export(load_trained(run.path), run.path / kind, kind)
    base, merged = (
        load_transformers(family, path).eval() for path in (folder, run.path / "merged")
    )
    tokens = random_tokens()
    with torch.no_grad():
        initial, expected = base(tokens).logits, merged(tokens).logits
        actual = PeftModel.from_pretrained(base, run.path / "alone").eval()(tokens).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (expected - initial).abs().max() > 1e-3


@pytest.mark.parametrize("option", EQUAL_BLOCKS_ONLY)
def test_hf_unequal_blocks_reject_options(
    option: str, hf_architecture: ArchitectureFolders
) -> None:
    overrides = training_overrides(hf_architecture("deepseek_v2"), *OPTIONS[option])
    key, fix = EQUAL_BLOCKS_ONLY[option]
    reason = "is not supported for models with several kinds of blocks (deepseek_v2)"
    assert_rejected([*overrides], key, reason, fix)


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (("precision=fp8",), "precision", "precision=bf16_mixed"),
        (("quantization=qat_int4",), "quantization", "quantization=none"),
        (("quantization=nf4", "adapter=lora"), "quantization", "quantization=none"),
    ],
)
def test_hf_experts_reject_formats_that_leave_them_out(
    overrides: tuple[str, ...], key: str, fix: str, hf_architecture: ArchitectureFolders
) -> None:
    model = ["model=hf", f"model.path={hf_architecture('mixtral')}", *SYNTHETIC]
    assert_rejected([*model, *overrides], key, "the experts of mixtral", fix)
