"""The JSON config of DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scalewise.parallelism.deepspeed import DeepSpeedConfig, OffloadTarget
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig


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
