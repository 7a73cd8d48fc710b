"""A trained model alive on one device, whatever layout it was trained in."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from scalewise.checkpoints.trained import TrainedRun, checkpoint_errors
from scalewise.hardware import DeviceKind
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.precision import FloatFormat


def load_model(
    trained_run: TrainedRun, device: torch.device, *, unquantized: bool = False
) -> ModelModule:
    """Returns the whole model with its weights, with an adapter merged if it can be, to be asked.

    ``unquantized``: with the matrices that were packed as they had been before, and none rounded or
    in 8 bits.
    """
    module = trained_run.model.build_meta(StageSlice(range(trained_run.model.layers)))
    if not trained_run.adapter.merges:
        trained_run.adapter.apply(module, trained_run.model)
    if not unquantized:
        trained_run.precision.apply(module, trained_run.model, DeviceKind(device.type))
    if trained_run.fake_quantized_weights and not unquantized:
        trained_run.quantization.apply(module, trained_run.model)
    module.to_empty(device=device)
    module.init_buffers()
    state = trained_run.read_merged_state_dict(unquantized=unquantized)
    with checkpoint_errors(trained_run.checkpoint):
        module.load_state_dict(state)
    held = torch.bfloat16 if trained_run.precision.parameters is FloatFormat.bf16 else torch.float32
    return module.to(held).eval().requires_grad_(False)


def autocast_context(
    trained_run: TrainedRun, device: torch.device
) -> AbstractContextManager[object]:
    """Returns what makes products compute in the format in which they were trained."""
    formats = {FloatFormat.bf16: torch.bfloat16, FloatFormat.fp16: torch.float16}
    compute = trained_run.precision.compute
    mixed = compute is not trained_run.precision.parameters
    return torch.autocast(device.type, formats.get(compute), enabled=mixed)
