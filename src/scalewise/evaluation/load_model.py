"""A trained model alive on one device, whatever layout it was trained in."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from scalewise.checkpoints.trained import TrainedRun, checkpoint_errors
from scalewise.hardware import DeviceKind
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.precision import FloatFormat


def load_model(told: TrainedRun, device: torch.device, *, exact: bool = False) -> ModelModule:
    """Returns the whole model with its weights, with an adapter merged if it can be, to be asked.

    ``exact``: with the matrices that were packed as they had been before, and none rounded or in
    8 bits.
    """
    module = told.model.shape(StageSlice(range(told.model.layers)))
    if not told.adapter.merges:
        told.adapter.apply(module, told.model)
    if not exact:
        told.precision.apply(module, told.model, DeviceKind(device.type))
    if told.fake_quantized and not exact:
        told.quantization.apply(module, told.model)
    module.to_empty(device=device)
    module.init_buffers()
    state = told.merged(exact=exact)
    with checkpoint_errors(told.checkpoint):
        module.load_state_dict(state)
    held = torch.bfloat16 if told.precision.parameters is FloatFormat.bf16 else torch.float32
    return module.to(held).eval().requires_grad_(False)


def autocast_context(told: TrainedRun, device: torch.device) -> AbstractContextManager[object]:
    """Returns what makes products compute in the format in which they were trained."""
    formats = {FloatFormat.bf16: torch.bfloat16, FloatFormat.fp16: torch.float16}
    compute = told.precision.compute
    mixed = compute is not told.precision.parameters
    return torch.autocast(device.type, formats.get(compute), enabled=mixed)
