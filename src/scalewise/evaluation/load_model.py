"""Loading of a trained model onto one device, from a checkpoint of any parallelism strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from scalewise.adapters.build import apply_adapter
from scalewise.checkpoints.trained import TrainedRun, checkpoint_errors
from scalewise.hardware import DeviceKind
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_meta
from scalewise.precision import FloatFormat
from scalewise.precision.build import apply_precision
from scalewise.quantization.build import apply_quantization


def load_model(
    trained_run: TrainedRun, device: torch.device, *, unquantized: bool = False
) -> ModelModule:
    """Load the unsharded model of a run for inference, with its adapter merged if possible.

    Args:
        trained_run: Run and checkpoint.
        device: Device of the model.
        unquantized: Whether to restore quantized weights from before quantization, and to disable
            fake quantization and fp8.
    """
    module = build_meta(trained_run.model, StageSlice(range(trained_run.model.layers)))
    if not trained_run.adapter.can_merge:
        apply_adapter(trained_run.adapter, module, trained_run.model)
    if not unquantized:
        apply_precision(trained_run.precision, module, trained_run.model, DeviceKind(device.type))
    if trained_run.fake_quantized_weights and not unquantized:
        apply_quantization(trained_run.quantization, module, trained_run.model)
    module.to_empty(device=device)
    module.init_buffers()
    state = trained_run.read_merged_state_dict(unquantized=unquantized)
    with checkpoint_errors(trained_run.checkpoint):
        module.load_state_dict(state)
    is_bf16 = trained_run.precision.parameters is FloatFormat.bf16
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    return module.to(dtype).eval().requires_grad_(False)


def autocast_context(
    trained_run: TrainedRun, device: torch.device
) -> AbstractContextManager[object]:
    """Autocast context with the compute precision of a run."""
    dtypes = {FloatFormat.bf16: torch.bfloat16, FloatFormat.fp16: torch.float16}
    compute = trained_run.precision.compute
    is_mixed = compute is not trained_run.precision.parameters
    return torch.autocast(device.type, dtypes.get(compute), enabled=is_mixed)
