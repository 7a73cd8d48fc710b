"""What DeepSpeed's engine is built from: its JSON config, the ZeRO-3 module, the NVMe folder."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from scalewise.adapters.build import apply_adapter
from scalewise.checkpoints import initial_parameters
from scalewise.compat.deepspeed import parameter_group
from scalewise.data.build_cache import cache_folder
from scalewise.errors import ConfigError
from scalewise.models.base import StageSlice
from scalewise.models.build import build_meta
from scalewise.objectives.losses import set_chunked_loss
from scalewise.parallelism.deepspeed import DeepSpeedConfig, OffloadTarget
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.strategies.activation_checkpointing import apply_checkpointing

LOCK_FILE = "in-use"


def build_deepspeed_config(
    config: DeepSpeedConfig, run: RunConfig, nvme_folder: str, num_parameters: int, num_trained: int
) -> dict[str, Any]:
    """Return the DeepSpeed config.

    The strategy divides the loss by the accumulation steps; DeepSpeed does not.

    Args:
        config: Parallelism strategy of ``run``.
        run: Run to train.
        nvme_folder: Offload folder of this rank.
        num_parameters: Number of parameters.
        num_trained: Number of trained parameters.
    """
    elements = config.bucket_elements(num_trained)
    zero: dict[str, Any] = {
        "stage": config.stage,
        "overlap_comm": config.overlap_comm,
        "contiguous_gradients": config.contiguous_gradients,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements + elements % 2,  # DeepSpeed aligns to pairs
    }
    if config.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": config.bucket_elements(num_parameters),
            "stage3_param_persistence_threshold": config.keep_whole_below,
            "memory_efficient_linear": False,  # would patch torch's linear permanently
            "zero_hpz_partition_size": config.hierarchical,
            "zero_quantized_weights": config.quantized_weights,
            "zero_quantized_gradients": config.quantized_gradients,
        }
    for key, target in (
        ("offload_optimizer", config.offload_optimizer),
        ("offload_param", config.offload_parameters),
    ):
        if target is not OffloadTarget.none:
            zero[key] = {"device": target.value, "nvme_path": nvme_folder}
    if config.offload_parameters is OffloadTarget.nvme:  # the default buffers take 2 GB
        zero["offload_param"]["buffer_size"] = max(weight.numel for weight in run.weight_census())
    return {
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": run.trainer.clip_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **_dtype_config(config, run),
    }


def _dtype_config(config: DeepSpeedConfig, run: RunConfig) -> Mapping[str, Any]:
    """Return the data types: bf16 with fp32 master weights, or bf16 throughout.

    Gradients accumulate in fp32, except in stage 1, which accumulates in bf16: with fp32,
    DeepSpeed would select an optimizer that keeps gradients unsharded on every rank.
    """
    if run.precision.compute is not FloatFormat.bf16:
        return {}
    throughout = run.precision.parameters is FloatFormat.bf16
    bf16 = {
        "enabled": True,
        "bf16_master_weights_and_grads": throughout,
        "bf16_optimizer_states": throughout,
        "check_grad_overflow": True,
    }
    communication_dtype = "bf16" if throughout else "fp32"
    accumulation_dtype = "bf16" if throughout or config.stage == 1 else "fp32"
    return {
        "bf16": bf16,
        "communication_data_type": communication_dtype,
        "data_types": {"grad_accum_dtype": accumulation_dtype},
    }


def iter_layers(run: RunConfig, device: torch.device) -> Iterator[nn.Module]:
    """Initialized parts of the model with one layer each; values are those of other strategies."""
    for stage_slice in run.model.split_stages(run.model.layers, run.data.sequence):
        module = build_meta(run.model, stage_slice)
        apply_adapter(run.adapter, module, run.model)
        module.to_empty(device=device)
        initial_parameters.init_parameters(module, run.model, run.adapter, run.seed)
        yield module


def build_zero3_sharded(run: RunConfig, config: dict[str, Any], device: torch.device) -> nn.Module:
    """Build the model with this rank's partition of every parameter."""
    from deepspeed import zero

    all_layers, swapper = StageSlice(range(run.model.layers)), None
    model = build_meta(run.model, all_layers)
    model.set_sequence_weight(run.sequence_loss_weight)
    apply_adapter(run.adapter, model, run.model)
    for layer_module in iter_layers(run, device):
        if run.precision.compute is FloatFormat.bf16:
            for parameter in layer_module.parameters():
                parameter.data = parameter.data.bfloat16()
        tensors = {**dict(layer_module.named_parameters()), **dict(layer_module.named_buffers())}
        swapper = zero.Init(
            module=layer_module,
            config_dict_or_path=config,
            zero_param_parallel_group=parameter_group(),
            param_swapper=swapper,
        ).param_swapper
        for name, tensor in tensors.items():
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, tensor)
    for layer in model.modules():
        if hasattr(layer, "base_layer"):  # an adapter layer reads parameters of its base layer
            for parameter in layer.parameters():
                zero.register_external_parameter(layer, parameter)
    set_chunked_loss(
        run.objective,
        model,
        in_forward=run.computes_loss_gradients_in_forward,
        compile_config=run.loss_compile,
    )
    apply_checkpointing(run.memory, model, all_layers, run.hardware.device)
    return model


class SwapFolder:
    """Folder that ``open`` creates and ``close`` removes.

    The folder of a killed rank is removed by the next call of ``open``.
    """

    def __init__(self, parent: str | None) -> None:
        self._parent = Path(parent) if parent else cache_folder() / "nvme"
        self._folder: Path | None = None
        self._lock: IO[str] | None = None

    def open(self) -> Path:
        """Create the folder and return its path; raises ``ConfigError`` if it cannot be written."""
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            for folder in self._parent.glob("rank-*"):
                _remove_unless_used(folder)
            self._folder = Path(tempfile.mkdtemp(prefix="rank-", dir=self._parent))
            self._lock = (self._folder / LOCK_FILE).open("w")
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            raise ConfigError.for_key("parallelism.nvme_path", self._parent, reason) from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self._folder

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None and self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()


def _remove_unless_used(folder: Path) -> None:
    """Remove a folder unless a running process has locked it."""
    try:
        with (folder / LOCK_FILE).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # locked, or without a lock file yet
