"""Strategy for one device."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from scalewise.hardware import DeviceKind
from scalewise.strategies.base import ParallelStrategy


class SingleDevice(ParallelStrategy, SingleDeviceStrategy):
    """Lightning's single-device strategy."""

    def __init__(self, device: DeviceKind) -> None:
        cuda = device is DeviceKind.cuda
        super().__init__(torch.device("cuda", 0) if cuda else torch.device("cpu"))
