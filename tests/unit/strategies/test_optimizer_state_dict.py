"""Optimizer state that is read from a checkpoint: devices, data types and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import Optimizer

from scalewise.compat.torch import FakeTensorMode
from scalewise.optimizers import AdamWConfig, OptimizerConfig
from scalewise.optimizers.build import build_from_groups
from scalewise.optimizers.config import (
    AdafactorConfig,
    AdamW4bitConfig,
    AdamW8bitConfig,
    LionConfig,
    MuonConfig,
    PagedAdamWConfig,
    ScheduleFreeConfig,
    SGDConfig,
)
from scalewise.strategies.optimizer_state_dict import (
    allocate_state,
    put_state,
    set_counts_or_settings,
    state_tensors,
    step_counts,
)

Groups = list[dict[str, Any]]
Build = Callable[[Groups], Optimizer]

SHAPES = ((32, 256), (1, 24), (16,), (1,))
TYPES = [torch.float32, torch.bfloat16]


def of_config(config: OptimizerConfig) -> Build:
    return lambda groups: build_from_groups(config, groups)


def of_torch(optimizer_class: Any, **settings: Any) -> Build:
    """Optimizer of torch, which user-defined modules may have."""

    def build(groups: Groups) -> Optimizer:
        plain = [{"params": group["params"]} for group in groups]
        built: Optimizer = optimizer_class(plain, **settings)
        return built

    return build


ON_CUDA: dict[str, Build] = {
    "adamw": of_config(AdamWConfig()),
    "adamw_unfused": of_config(AdamWConfig(fused=False)),
    "sgd": of_config(SGDConfig()),
    "lion": of_config(LionConfig()),
    "adafactor": of_config(AdafactorConfig()),
    "muon": of_config(MuonConfig()),
    "schedule_free": of_config(ScheduleFreeConfig()),
    "torch_amsgrad": of_torch(optim.Adam, amsgrad=True, fused=True),
    "torch_nadam": of_torch(optim.NAdam),
    "torch_radam": of_torch(optim.RAdam),
    "torch_rmsprop": of_torch(optim.RMSprop, centered=True, momentum=0.9),
    "torch_adagrad": of_torch(optim.Adagrad),
}
ON_CPU = {
    **{name: build for name, build in ON_CUDA.items() if name != "adafactor"},
    "adamw_offload": of_config(AdamWConfig(offload=True)),
    "adamw_paged": of_config(PagedAdamWConfig()),
    "adamw_8bit": of_config(AdamW8bitConfig()),
    "adamw_4bit": of_config(AdamW4bitConfig()),
    "adafactor": of_config(AdafactorConfig()),
}

Placement = dict[str, tuple[type, torch.device, torch.dtype, torch.Size]]


def placement(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Placement:
    return {
        f"{slot}/{index}": (type(value), value.device, value.dtype, value.shape)
        for index, parameter in enumerate(parameters)
        for slot, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }


def placements(build: Build, device: str, dtype: torch.dtype) -> tuple[Placement, Placement]:
    """Of the state after the first step, and of the one that is allocated for a checkpoint."""
    parameters = [nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)) for shape in SHAPES]
    groups: Groups = [
        {"params": [parameter], "weight_decay": 0.0, "hidden": parameter.ndim == 2}
        for parameter in parameters
    ]
    optimizer = build(groups)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with suppress(DataDependentOutputException):  # raised after the first state is created
        optimizer.step()
    stepped = placement(optimizer, parameters)
    names = {parameter: str(index) for index, parameter in enumerate(parameters)}
    shapes = {key: tensor.shape for key, tensor in state_tensors([optimizer], names).items()}
    put_state([optimizer], names, allocate_state([optimizer], names, shapes))
    return stepped, placement(optimizer, parameters)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ON_CUDA)
def test_resumed_state_on_cuda_has_devices_and_types_of_a_step(
    name: str, dtype: torch.dtype
) -> None:
    with FakeTensorMode():
        stepped, resumed = placements(ON_CUDA[name], "cuda", dtype)
    assert stepped
    assert resumed == stepped


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ON_CPU)
def test_resumed_state_on_cpu_has_types_and_shapes_of_a_step(name: str, dtype: torch.dtype) -> None:
    stepped, resumed = placements(ON_CPU[name], "cpu", dtype)
    assert stepped
    assert resumed == stepped


def schedule_free_groups(lrs: Iterable[float]) -> Optimizer:
    groups: Groups = [
        {"params": [nn.Parameter(torch.ones(3))], "weight_decay": 0.0, "lr": lr} for lr in lrs
    ]
    return build_from_groups(ScheduleFreeConfig(lr=0.1), groups)


@pytest.mark.parametrize("resumed_lrs", [(0.1, 0.02, 0.0), (0.02,), (0.0, 0.1)], ids=str)
def test_schedule_free_sums_follow_the_learning_rate_of_their_group(
    resumed_lrs: tuple[float, ...],
) -> None:
    trained_lrs = (0.02, 0.1, 0.0)
    trained = schedule_free_groups(trained_lrs)
    for _ in range(3):
        for group in trained.param_groups:
            group["params"][0].grad = torch.ones(3)
        trained.step()
    resumed = schedule_free_groups(resumed_lrs)  # those of another rank, or in another order
    set_counts_or_settings(resumed, step_counts(trained))
    for lr, group in zip(resumed_lrs, resumed.param_groups, strict=True):
        expected = trained.param_groups[trained_lrs.index(lr)]
        for key in ("k", "lr_max", "weight_sum"):
            assert group[key] == pytest.approx(expected[key], rel=1e-12), (lr, key)
