"""Adapters: trained parameters, frozen weights, every strategy, PEFT as the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    ReferenceRun,
    assert_same_training,
    load_gradients,
    train_strategy,
)
from fixtures.strategies import GPT2, LLAMA, STRATEGIES, TINY_DECODER, marks
from peft import IA3Config, LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scalewise import compose
from scalewise.adapters.build import apply_adapter
from scalewise.hardware import DeviceKind
from scalewise.models.base import AttentionFlops
from scalewise.models.build import build_model
from scalewise.strategies.single import SingleDevice

LORA = (
    "adapter=lora",
    "adapter.rank=4",
    "adapter.targets=[attention.query,attention.output,feedforward.up,feedforward.down]",
)
"""Column-parallel and row-parallel layers."""
ADAPTERS = {
    "lora": LORA,
    "rslora": ("adapter=rslora", *LORA[1:]),
    "pissa": ("adapter=pissa", *LORA[1:]),
    "dora": ("adapter=dora", *LORA[1:]),
    "ia3": ("adapter=ia3", "adapter.targets=[auto,attention.output,feedforward.up]"),
}
TRAINED_PARAMETERS = {
    "trained_parameters": (*LORA, "adapter.trained=[embedding,.*norm,attention.key]"),
    "head": ("adapter=ia3", "adapter.trained=[head,feedforward.up]"),
}
"""With model modules that are trained next to the adapter."""
CI_STRATEGIES = {
    "lora": ("deepspeed_zero3",),
    "rslora": (),
    "pissa": (),
    "dora": (),
    "ia3": ("fsdp",),
    "trained_parameters": (),
    "head": (),
}
TESTED_STRATEGIES = ("ddp", "fsdp", "tensor", "pipeline_one_f_one_b", "deepspeed_zero3")
CASES = [
    pytest.param(
        adapter,
        strategy,
        marks=(*marks(strategy), *(() if strategy in ci_strategies else (pytest.mark.exhaustive,))),
    )
    for adapter, ci_strategies in CI_STRATEGIES.items()
    for strategy in (
        STRATEGIES
        if adapter in ("lora", "dora", "ia3", "trained_parameters")
        else TESTED_STRATEGIES
    )
]


@pytest.mark.parametrize(("adapter", "strategy"), CASES)
def test_adapter_training_equals_one_device(
    adapter: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    overrides = (ADAPTERS | TRAINED_PARAMETERS)[adapter]
    run = train_strategy(
        STRATEGIES[strategy], "accumulated", JobRunner(tmp_path, shared_cache), *overrides
    )
    reference = reference_run("accumulated", *overrides)
    assert_same_training(run, reference)
    actual, expected, trained_gradients = (
        run.weights(),
        reference.weights(),
        load_gradients(reference, 0),
    )
    for name in expected.keys() - trained_gradients.keys():
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(n, marks=() if ci_strategies else pytest.mark.exhaustive)
        for n, ci_strategies in CI_STRATEGIES.items()
    ],
)
def test_adapter_freezes_base_weights_and_trains_the_rest(
    adapter: str, reference_run: ReferenceRun
) -> None:
    run = reference_run("accumulated", *(ADAPTERS | TRAINED_PARAMETERS)[adapter])
    spec = compose([*TINY_DECODER, *LLAMA, *(ADAPTERS | TRAINED_PARAMETERS)[adapter]])
    trainable_names = {weight.name for weight in spec.weight_census() if weight.trainable}
    weights = {name.removeprefix("model."): tensor for name, tensor in run.weights().items()}
    assert weights.keys() == {weight.name for weight in spec.weight_census()}
    assert {name.removeprefix("model.") for name in load_gradients(run, 2)} == trainable_names
    first = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in SingleDevice(DeviceKind.cpu).build(spec).named_parameters()
    }
    for name, tensor in first.items():
        assert torch.equal(weights[name], tensor) == (name not in trainable_names), name


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_starts_as_the_base_model(adapter: str) -> None:
    override_lists = [
        [*TINY_DECODER, *LLAMA, *adapter_overrides] for adapter_overrides in ((), ADAPTERS[adapter])
    ]
    base_model, adapted = (
        SingleDevice(DeviceKind.cpu).build(compose(overrides)) for overrides in override_lists
    )
    tokens_BT = torch.arange(64).reshape(2, 32)
    torch.testing.assert_close(adapted(tokens_BT), base_model(tokens_BT), rtol=0, atol=2e-6)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_values_and_scales_equal_peft(adapter: str) -> None:
    """PEFT initializes A of LoRA at random; values derived from W are compared."""
    actual, expected = both_models(adapter, LLAMA)
    initialized_part = ".lora_A." if adapter != "pissa" else None
    for name, tensor in expected.named_parameters():
        actual_value = actual.get_parameter(name)
        assert actual_value.requires_grad == tensor.requires_grad, name
        if initialized_part is None or initialized_part not in name:
            torch.testing.assert_close(actual_value, tensor, rtol=1e-5, atol=1e-6)
    for name, layer in expected.named_modules():
        if isinstance(layer, LoraLayer):
            actual_value = actual.get_submodule(name)
            assert isinstance(actual_value, LoraLayer), name
            assert actual_value.scaling == layer.scaling, name


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_outputs_equal_peft(adapter: str, shape: tuple[str, ...]) -> None:
    actual, expected = both_models(adapter, shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in actual.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    expected.load_state_dict(actual.state_dict())
    tokens_BT = torch.arange(64).reshape(2, 32)
    logits = [module(tokens_BT) for module in (actual, expected)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    for output in logits:
        output.logsumexp(-1).sum().backward()
    for name, tensor in expected.named_parameters():
        actual_gradient = actual.get_parameter(name).grad
        assert (actual_gradient is None) == (tensor.grad is None), name
        if actual_gradient is not None:
            torch.testing.assert_close(actual_gradient, tensor.grad, rtol=1e-4, atol=1e-4)


def both_models(adapter: str, shape: tuple[str, ...]) -> tuple[nn.Module, nn.Module]:
    """Adapted model, and the same model adapted by PEFT."""
    spec = compose([*TINY_DECODER, *shape, *ADAPTERS[adapter]])
    expected = build_model(spec.model, spec.seed)
    config: PeftConfig
    if adapter == "ia3":
        row_layers = ["attention.output", "feedforward.down"]
        config = IA3Config(target_modules=[*spec.adapter.scaled_layers(spec.model)])
        config.feedforward_modules = set(row_layers)
    else:
        config = LoraConfig(
            r=4,
            lora_alpha=16,
            target_modules=[*spec.adapter.adapted_layers(spec.model)],
            init_lora_weights="pissa" if adapter == "pissa" else True,
            use_rslora=adapter == "rslora",
            use_dora=adapter == "dora",
        )
    inject_adapter_in_model(config, expected)
    return SingleDevice(DeviceKind.cpu).build(spec), expected


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "adapter",
    [*ADAPTERS.values(), (*LORA, "adapter.rank=1"), TRAINED_PARAMETERS["trained_parameters"]],
    ids=str,
)
def test_adapter_parameter_shapes_equal_the_module(
    adapter: tuple[str, ...], shape: tuple[str, ...]
) -> None:
    spec = compose([*TINY_DECODER, *shape, *adapter])
    with torch.device("meta"):
        module = build_model(spec.model, 1)
    apply_adapter(spec.adapter, module, spec.model)
    actual = [
        (name.replace(".base_layer.", "."), tuple(parameter.shape), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    ]
    assert actual == [(w.name, w.shape, w.trainable) for w in spec.weight_census()]


@pytest.mark.parametrize("adapter", ["lora", "dora", "ia3", "trained_parameters", "head"])
def test_adapter_flops_equal_torch_counter(adapter: str) -> None:
    run = compose(
        [*TINY_DECODER, *LLAMA, *(ADAPTERS | TRAINED_PARAMETERS)[adapter], "model.layers=8"]
    )
    module = SingleDevice(DeviceKind.cpu).build(run)
    tokens = torch.zeros(2, run.data.sequence, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:  # the counter omits attention on CPU
        module(tokens).float().logsumexp(-1).sum().backward()
    attention = 14.0 * run.data.sequence * run.model.query_width * run.model.layers
    counted_flops = counter.get_total_flops() / tokens.numel()
    # The inputs of the first block are frozen: its first adapted layers have no input gradient.
    assert run.count_flops(AttentionFlops.kernel) - attention == pytest.approx(
        counted_flops, rel=0.05
    )
    assert counted_flops < run.model.flops(run.data.sequence) - attention
