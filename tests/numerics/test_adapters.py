"""Adapters train what they add, in every layout, and leave the rest as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.jobs import Job
from fixtures.layouts import LAYOUTS, LLAMA, SHAPE, marks
from fixtures.steps import Reference, assert_equal, gradients, steps_of
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch.utils.flop_counter import FlopCounterMode

from scalewise import compose
from scalewise.hardware import DeviceKind
from scalewise.layouts.single import SingleLayout

LORA = (
    "adapter=lora",
    "adapter.rank=4",
    "adapter.targets=[attention.query,attention.output,feedforward.up,feedforward.down]",
)
"""Layers of both kinds: those cut by their outputs and those cut by their inputs."""
ADAPTERS = {
    "lora": LORA,
    "rslora": ("adapter=rslora", *LORA[1:]),
    "pissa": ("adapter=pissa", *LORA[1:]),
}
USUAL = {
    "lora": ("ddp", "fsdp", "tensor", "pipeline_one_f_one_b", "deepspeed_zero3"),
    "rslora": (),
    "pissa": ("tensor", "deepspeed_zero3"),
}
CASES = [
    pytest.param(
        adapter,
        layout,
        marks=(*marks(layout), *(() if layout in usual else (pytest.mark.exhaustive,))),
    )
    for adapter, usual in USUAL.items()
    for layout in (LAYOUTS if adapter == "lora" else USUAL["lora"])
]


@pytest.mark.parametrize(("adapter", "layout"), CASES)
def test_an_adapter_takes_the_steps_of_one_device(
    adapter: str, layout: str, alone: Reference, tmp_path: Path, shared_cache: Path
) -> None:
    line = ADAPTERS[adapter]
    run = steps_of(LAYOUTS[layout], "accumulated", Job(tmp_path, shared_cache), *line)
    assert_equal(run, alone("accumulated", *line))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_is_frozen_stays_and_all_else_learns(adapter: str, alone: Reference) -> None:
    run = alone("accumulated", *ADAPTERS[adapter])
    spec = compose([*SHAPE, *LLAMA, *ADAPTERS[adapter]])
    trained = {weight.name for weight in spec.census() if weight.trainable}
    held = {name.removeprefix("model."): tensor for name, tensor in run.weights().items()}
    assert held.keys() == {weight.name for weight in spec.census()}
    assert {name.removeprefix("model.") for name in gradients(run, 2)} == trained
    first = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in SingleLayout(DeviceKind.cpu).build(spec).named_parameters()
    }
    for name, tensor in first.items():
        assert torch.equal(held[name], tensor) == (name not in trained), name


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapted_model_begins_as_the_model(adapter: str) -> None:
    lines = [[*SHAPE, *LLAMA, *further] for further in ((), ADAPTERS[adapter])]
    plain, adapted = (SingleLayout(DeviceKind.cpu).build(compose(line)) for line in lines)
    tokens_BT = torch.arange(64).reshape(2, 32)
    torch.testing.assert_close(adapted(tokens_BT), plain(tokens_BT), rtol=0, atol=2e-6)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_values_and_scales_are_those_of_peft(adapter: str) -> None:
    """PEFT draws A of LoRA by itself; what it makes of W alone is compared."""
    spec = compose([*SHAPE, *LLAMA, *ADAPTERS[adapter]])
    ours = SingleLayout(DeviceKind.cpu).build(spec)
    theirs = spec.model.build(spec.seed)
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["query"],
        init_lora_weights="pissa" if adapter == "pissa" else True,
        use_rslora=adapter == "rslora",
    )
    inject_adapter_in_model(config, theirs)
    for name, layer in theirs.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        mine = ours.get_submodule(name)
        assert isinstance(mine, LoraLayer)
        assert mine.scaling == layer.scaling
        if adapter == "pissa":
            for key, tensor in layer.named_parameters():
                torch.testing.assert_close(mine.get_parameter(key), tensor, rtol=1e-5, atol=1e-6)
        else:
            assert not mine.lora_B["default"].weight.any()


@pytest.mark.parametrize("rank", [1, 4])
def test_the_census_is_the_module(rank: int) -> None:
    spec = compose([*SHAPE, *LLAMA, *LORA, f"adapter.rank={rank}"])
    with torch.device("meta"):
        module = spec.model.build(1)
    spec.adapter.apply(module, spec.model)
    found = [
        (name.replace(".base_layer.", "."), tuple(parameter.shape), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    ]
    assert found == [(w.name, w.shape, w.trainable) for w in spec.census()]


def test_flops_are_those_torch_counts() -> None:
    run = compose([*SHAPE, *LLAMA, *LORA, "model.layers=8"])
    module = SingleLayout(DeviceKind.cpu).build(run)
    tokens = torch.zeros(2, run.data.sequence, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:  # it counts no attention on the CPU
        module(tokens).float().logsumexp(-1).sum().backward()
    attention = 14.0 * run.data.sequence * run.model.query_width * run.model.layers
    found = counter.get_total_flops() / tokens.numel()
    # The first block's inputs are frozen: gradients end in its first adapted layers.
    assert run.flops_per_token - attention == pytest.approx(found, rel=0.05)
    assert found < run.model.flops(run.data.sequence) - attention
