"""Overrides of Lightning's strategies: DDP on the current stream, no copies at the end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from scalewise.hardware import DeviceKind
from scalewise.parallelism import ParallelismConfig
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.parallelism.single import SingleConfig
from scalewise.strategies import ddp
from scalewise.strategies.build import build_strategy

TIMEOUT = timedelta(seconds=7)


class Module(LightningModule):
    """Linear layer on the meta device, which cannot be copied to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize("config", [SingleConfig(), DDPConfig(), MeshConfig(shards=2)])
def test_teardown_copies_nothing_to_the_host(config: ParallelismConfig) -> None:
    strategy: Any = build_strategy(config, DeviceKind.cpu, TIMEOUT)
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters())
    module.linear.weight.grad = torch.zeros_like(module.linear.weight)
    optimizer.step()
    strategy.connect(module)
    strategy.accelerator, strategy.optimizers = CPUAccelerator(), [optimizer]
    if not isinstance(config, SingleConfig):
        strategy.cluster_environment = LightningEnvironment()
    strategy.teardown()
    assert module.linear.weight.device.type == "meta"
    assert optimizer.state[module.linear.weight]["exp_avg"].device.type == "meta"
    assert strategy.model is module


def test_ddp_module_is_built_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, Any]] = []

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module, **arguments: Any) -> None:
            super().__init__()
            built.append({"module": module, **arguments})

    def reject_stream(*arguments: object) -> None:
        raise AssertionError("a side stream")

    monkeypatch.setattr(ddp, "DistributedDataParallel", Wrapper)
    monkeypatch.setattr("lightning.pytorch.strategies.ddp.DistributedDataParallel", Wrapper)
    monkeypatch.setattr(torch.cuda, "Stream", reject_stream)
    strategy: Any = build_strategy(DDPConfig(static_graph=True), DeviceKind.cuda, TIMEOUT)
    monkeypatch.setattr(type(strategy), "determine_ddp_device_ids", lambda self: [0])
    module = Module()
    strategy.connect(module)
    strategy.configure_ddp()
    ((arguments),) = built
    assert arguments["module"] is module
    assert (arguments["device_ids"], arguments["static_graph"]) == ([0], True)
    assert isinstance(strategy.model, Wrapper)
