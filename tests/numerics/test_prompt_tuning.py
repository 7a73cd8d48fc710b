"""Prompt and prefix tuning: PEFT as the reference, every strategy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    BATCHES,
    SGD,
    ReferenceRun,
    assert_same_training,
    assert_tensors_close,
    load_gradients,
    train_strategy,
)
from fixtures.strategies import GPT2, LLAMA, STRATEGIES, TINY_DECODER, marks
from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from scalewise import cli, compose
from scalewise.checkpoints import peft_import
from scalewise.commands.run_arguments import load_trained
from scalewise.export import AdapterExport, hf_export
from scalewise.hardware import DeviceKind
from scalewise.models.base import AttentionFlops, is_adapter_weight
from scalewise.models.build import build_model
from scalewise.models.decoder import state_dict_adapter
from scalewise.objectives import IGNORED
from scalewise.strategies.single import SingleDevice
from scalewise.validation.run_issues import iter_machine_issues

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")
"""PEFT emits it."""

VIRTUAL_TOKENS = ("adapter.tokens=6", "model.context=38")
KINDS = {kind: (f"adapter={kind}", *VIRTUAL_TOKENS) for kind in ("prompt", "prefix")}
PEFT_CONFIGS = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}
TOKENS_BT = torch.arange(64).reshape(2, 32)
CI_CASES = (("prompt", "deepspeed_zero3"), ("prompt", "tensor"), ("prefix", "fsdp"))
TESTED_STRATEGIES = (
    "ddp",
    "fsdp",
    "fsdp_offload",
    "hsdp",
    "replicate_shard",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "tensor",
    "tensor_no_sequence_parallel",
    "shard_tensor",
    "replicate_tensor",
)
PIPELINE_STRATEGIES = ("pipeline_one_f_one_b", "pipeline_shard", "pipeline_tensor")
SHAPES = pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
for_each_kind = pytest.mark.parametrize("kind", KINDS)


def adapter_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by name."""
    return {
        name: parameter for name, parameter in module.named_parameters() if is_adapter_weight(name)
    }


def peft_model(tensors: Iterable[Tensor]) -> Tensor:
    """The same model with the PEFT adapter; prefixes of all layers are one tensor there."""
    return torch.cat([*tensors], dim=1)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param(
            kind,
            tested_strategy,
            marks=(
                *marks(tested_strategy),
                *(() if (kind, tested_strategy) in CI_CASES else [pytest.mark.exhaustive]),
            ),
        )
        for kind in KINDS
        for tested_strategy in (
            *TESTED_STRATEGIES,
            *(PIPELINE_STRATEGIES if kind == "prefix" else ()),
        )
    ],
)
def test_prompt_tuning_under_each_strategy_equals_one_device(
    kind: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(
        STRATEGIES[strategy], "accumulated", JobRunner(tmp_path, shared_cache), *KINDS[kind]
    )
    reference = reference_run("accumulated", *KINDS[kind])
    assert_same_training(run, reference)
    actual, expected = run.weights(), reference.weights()
    module = SingleDevice(DeviceKind.cpu).build(compose([*TINY_DECODER, *LLAMA, *KINDS[kind]]))
    first = dict(module.named_parameters())
    assert {*load_gradients(reference, 2)} == {
        f"model.{name}" for name in adapter_parameters(module)
    }
    assert actual.keys() == {f"model.{name}" for name in first}
    for name, tensor in first.items():
        assert torch.equal(actual[f"model.{name}"], tensor) != is_adapter_weight(name), name
        assert torch.equal(expected[f"model.{name}"], tensor) != is_adapter_weight(name), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["single", "fsdp", "tensor"])
def test_prefix_keys_precede_each_packed_text(
    strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    packing_overrides = (*KINDS["prefix"], "data.packing=true")
    strategy_overrides = STRATEGIES.get(strategy, ())
    run = train_strategy(
        strategy_overrides, "accumulated", JobRunner(tmp_path, shared_cache), *packing_overrides
    )
    assert_same_training(run, reference_run("accumulated", *packing_overrides))


def test_prompt_tuning_of_packed_texts_equals_separate_texts() -> None:
    module = SingleDevice(DeviceKind.cpu).build(compose([*TINY_DECODER, *LLAMA, *KINDS["prefix"]]))
    positions_BS = torch.arange(32).remainder(20).expand(2, -1)
    actual_logits = module(TOKENS_BT, positions_BS=positions_BS)
    for text in (slice(0, 20), slice(20, 32)):
        torch.testing.assert_close(actual_logits[:, text], module(TOKENS_BT[:, text]))


@for_each_kind
@SHAPES
def test_prompt_tuning_equals_peft(kind: str, shape: tuple[str, ...], tmp_path: Path) -> None:
    spec = compose([*TINY_DECODER, *shape, *KINDS[kind]])
    actual = SingleDevice(DeviceKind.cpu).build(spec)
    state_dict_adapter.export_folder(
        build_model(spec.model, spec.seed).state_dict(), spec.model, tmp_path
    )
    config = PEFT_CONFIGS[kind](num_virtual_tokens=6, task_type="CAUSAL_LM")
    reference = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), config)
    vectors = reference.prompt_encoder["default"].embedding.weight
    with torch.no_grad():
        vectors.copy_(peft_model(adapter_parameters(actual).values()))
    labels_BT = TOKENS_BT.roll(-1, 1)
    labels_BT[:, -1] = IGNORED
    actual_logits = actual(TOKENS_BT)
    peft_tokens_BT = TOKENS_BT.clone()
    peft_tokens_BT[:, 0] = IGNORED  # which the last vector would predict
    expected = reference(TOKENS_BT, labels=peft_tokens_BT)
    torch.testing.assert_close(actual_logits, expected.logits[:, -32:], rtol=1e-5, atol=1e-5)
    loss = F.cross_entropy(actual_logits.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.loss.backward()
    trained_names = {name for name, p in actual.named_parameters() if p.grad is not None}
    assert trained_names == {*adapter_parameters(actual)}
    assert vectors.grad is not None
    gradient = peft_model(
        parameter.grad
        for parameter in adapter_parameters(actual).values()
        if parameter.grad is not None
    )
    torch.testing.assert_close(gradient, vectors.grad, rtol=1e-4, atol=1e-7)


@for_each_kind
@SHAPES
def test_prompt_tuning_export_round_trips_through_peft(
    kind: str,
    shape: tuple[str, ...],
    reference_run: ReferenceRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch = "accumulated" if shape is LLAMA else "combined"
    run = reference_run(batch, *KINDS[kind])
    trained_run = load_trained(run.path)
    assert hf_export.write_export(trained_run, tmp_path / "alone", AdapterExport.alone) == [
        "no tokenizer: the data were token ids"
    ]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "base")
    expected = PeftModel.from_pretrained(base, tmp_path / "alone").eval()
    resume = f"adapter.resume={tmp_path / 'alone'}"
    actual = SingleDevice(DeviceKind.cpu).build(
        compose([*TINY_DECODER, *shape, *KINDS[kind], resume])
    )
    for name, tensor in adapter_parameters(actual).items():
        assert torch.equal(tensor, run.weights()[f"model.{name}"]), name
    with torch.no_grad():
        expected_logits = expected(TOKENS_BT).logits[:, -32:]
        torch.testing.assert_close(actual(TOKENS_BT), expected_logits, rtol=1e-5, atol=1e-5)
    assert cli.main(["export", str(run.path), f"to={tmp_path / 'merged'}"]) == 2
    assert "set adapter=alone" in capsys.readouterr().err
    resumed_spec = compose(
        [*TINY_DECODER, *shape, *KINDS[kind], "adapter.tokens=4", resume], check_machine=False
    )
    (issue,) = iter_machine_issues(resumed_spec)
    assert issue.key == "adapter.tokens"


@for_each_kind
@pytest.mark.exhaustive
def test_prompt_tuning_resumes_and_evaluates(
    kind: str, reference_run: ReferenceRun, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier_run = reference_run("accumulated", *KINDS[kind])
    run = reference_run("accumulated", *KINDS[kind], f"adapter.resume={earlier_run.path}")
    assert run.column("train/loss")[0] < earlier_run.column("train/loss")[0]
    assert cli.main(["evaluate", str(run.path)]) == 0
    stderr = capsys.readouterr().out
    assert f"{run.column('val/loss')[-1]:.4f}" in stderr


@for_each_kind
@pytest.mark.parametrize(
    "strategy", ["tensor", pytest.param("shard_tensor", marks=pytest.mark.exhaustive)]
)
def test_prompt_tuning_of_tensor_ranks_loads_elsewhere(
    kind: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy(
        STRATEGIES[strategy], "accumulated", run_job, *KINDS[kind], "checkpoint.every=2"
    )
    reference = reference_run("accumulated", *KINDS[kind])
    export_folders = []
    for source_run, to in ((run, tmp_path / "tensor"), (reference, tmp_path / "alone")):
        hf_export.write_export(load_trained(source_run.path), to, AdapterExport.alone)
        export_folders.append(load_file(to / peft_import.WEIGHTS))
    assert_tensors_close(*export_folders, "exports")
    half = run.checkpoint(2)
    for resumed_strategy in ((), STRATEGIES["fsdp"], STRATEGIES[strategy]):
        overrides = (*TINY_DECODER, *SGD, *BATCHES["accumulated"], *KINDS[kind], *resumed_strategy)
        resumed_run = run_job.without_defaults(*overrides, "trainer.micro_batch=2", resume=half)
        assert_tensors_close(resumed_run.weights(), reference.weights(), "weights after step 2")


@for_each_kind
def test_prompt_tuning_flops_equal_torch_counter(kind: str) -> None:
    run = compose([*TINY_DECODER, *LLAMA, *KINDS[kind]])
    module = SingleDevice(DeviceKind.cpu).build(run)
    with FlopCounterMode(display=False) as counter:  # the counter omits attention on CPU
        module(TOKENS_BT).float().logsumexp(-1).sum().backward()
    queries = 38 / 32 if kind == "prompt" else 1
    attention = 14.0 * 38 * run.model.query_width * run.model.layers * queries
    counted_flops = counter.get_total_flops() / TOKENS_BT.numel()
    assert run.count_flops(AttentionFlops.kernel) - attention == pytest.approx(
        counted_flops, rel=0.01
    )


@for_each_kind
def test_prompt_tuning_parameter_shapes_equal_the_module(kind: str) -> None:
    run = compose([*TINY_DECODER, *GPT2, *KINDS[kind]])
    module = SingleDevice(DeviceKind.cpu).build(run)
    actual_shapes = [
        (name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()
    ]
    assert actual_shapes == [(w.name, w.shape, w.trainable) for w in run.weight_census()]
