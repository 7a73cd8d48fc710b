"""Strategy for one device."""

from __future__ import annotations

from datetime import timedelta

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from scalewise.hardware import DeviceKind
from scalewise.parallelism.single import SingleConfig
from scalewise.strategies.base import ParallelStrategy
from scalewise.strategies.build import build_strategy


class SingleDevice(ParallelStrategy, SingleDeviceStrategy):
    """Lightning's single-device strategy."""

    def __init__(self, device: DeviceKind) -> None:
        cuda = device is DeviceKind.cuda
        super().__init__(torch.device("cuda", 0) if cuda else torch.device("cpu"))


@build_strategy.register
def _build_single(config: SingleConfig, device: DeviceKind, timeout: timedelta) -> SingleDevice:
    return SingleDevice(device)
