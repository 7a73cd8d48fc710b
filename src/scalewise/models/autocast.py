"""Autocast of the device of a tensor."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_DEVICE_TYPES = ("cpu", "cuda")
"""Devices with autocast; meta tensors have none, and torch 2.11 cannot compile a query for it."""


def uses_autocast(x: Tensor) -> bool:
    """Whether autocast is enabled for the device of ``x``."""
    device_type = x.device.type
    return device_type in _DEVICE_TYPES and torch.is_autocast_enabled(device_type)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a matmul of ``x``: autocast's if enabled, else that of ``x``."""
    return torch.get_autocast_dtype(x.device.type) if uses_autocast(x) else x.dtype


def residual_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the residual stream: bf16 under bf16 autocast, as with FSDP's mixed precision.

    Under fp16 autocast it is that of the parameters, because a sum over blocks may overflow fp16.
    """
    dtype = compute_dtype(x)
    return dtype if dtype is torch.bfloat16 else x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context without autocast for the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if uses_autocast(x) else nullcontext()
