"""Adapters train what they add, in every layout, and leave the rest as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.jobs import Job
from fixtures.layouts import LAYOUTS, LLAMA, SHAPE, marks
from fixtures.steps import Reference, assert_equal, gradients, steps_of
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
USUAL = ("ddp", "fsdp", "tensor", "pipeline_one_f_one_b", "deepspeed_zero3")
CASES = [
    pytest.param(
        layout,
        marks=(*marks(layout), *(() if layout in USUAL else (pytest.mark.exhaustive,))),
    )
    for layout in LAYOUTS
]


@pytest.mark.parametrize("layout", CASES)
def test_lora_takes_the_steps_of_one_device(
    layout: str, alone: Reference, tmp_path: Path, shared_cache: Path
) -> None:
    run = steps_of(LAYOUTS[layout], "accumulated", Job(tmp_path, shared_cache), *LORA)
    assert_equal(run, alone("accumulated", *LORA))


def test_what_is_frozen_stays_and_all_else_learns(alone: Reference) -> None:
    run = alone("accumulated", *LORA)
    spec = compose([*SHAPE, *LLAMA, *LORA])
    trained = {weight.name for weight in spec.census() if weight.trainable}
    held = {name.removeprefix("model."): tensor for name, tensor in run.weights().items()}
    assert held.keys() == {weight.name for weight in spec.census()}
    assert {name.removeprefix("model.") for name in gradients(run, 2)} == trained
    first = spec.model.build(spec.seed).state_dict()
    for name, tensor in first.items():
        assert torch.equal(held[name], tensor), name
    for name in trained:
        assert held[name].abs().max() > 0, name


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
