"""Export of weights of quantization-aware training as 4-bit integers, and its effect on the loss.

The format is ``pack-quantized`` of compressed-tensors, which transformers and vLLM load. For a
weight ``NAME``, ``NAME_packed`` stores eight 4-bit values per 32-bit word, the first in the lowest
bits and each with an offset of 8; ``NAME_scale`` stores one scale per group.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from scalewise.checkpoints.trained_run import TrainedRun, load_model
from scalewise.data.prepare import TokenDataset
from scalewise.errors import CheckpointError
from scalewise.evaluation import validation_metrics
from scalewise.hardware import this_machine
from scalewise.models.base import ModelConfig, StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_meta, export_model
from scalewise.models.decoder import state_dict_adapter
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.safetensors_files import SINGLE
from scalewise.quantization.config import CODES_PER_WORD, FP32_BYTES
from scalewise.quantization.fake import WEIGHTS

BITS = 4
FORMAT = "pack-quantized"
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
INPUT_QUANTIZATION = "int8_asym_per_token"
"""torchao's name of 8-bit inputs with one range per token."""


def write_compressed(trained_run: TrainedRun, target_folder: Path) -> None:
    """Write config and weights, with fake-quantized weights as integers."""
    export_model(trained_run.model, trained_run.read_merged_state_dict(), target_folder)
    tensors, names = load_file(target_folder / SINGLE), _hf_names(trained_run.model)
    (target_folder / SINGLE).unlink()  # the tensors are memory-mapped; a new file replaces it
    for name in (names[weight.name] for weight in trained_run.fake_quantized_weights):
        weight = tensors.pop(name)
        quantized = to_torchao(weight, trained_run.quantization.group)
        tensors[f"{name}_packed"] = pack_int4(quantized.qdata)
        tensors[f"{name}_scale"] = quantized.scale
        tensors[f"{name}_shape"] = torch.tensor(weight.shape)
    config = json.loads((target_folder / "config.json").read_text("utf-8"))
    state_dict_adapter.save_folder(
        tensors, config | {"quantization_config": _compression_config(trained_run)}, target_folder
    )


def _hf_names(model: ModelConfig) -> dict[str, str]:
    """Name in transformers of each weight, by its name in scalewise."""
    if isinstance(model, DecoderConfig):
        return {
            mapping.names[0]: mapping.hf_name
            for mapping in state_dict_adapter.iter_tensor_mappings(model)
        }
    module = build_meta(model, StageSlice(range(model.layers)))
    assert isinstance(module, CausalLMModule)
    return {name: module.hf_name(name) for name, _ in module.base_parameters()}


def to_torchao(weight: Tensor, group_size: int) -> Any:
    """Quantize a weight to torchao's 4-bit integer tensor, with one scale per group."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    return IntxUnpackedToInt8Tensor.from_hp(weight.float(), (1, group_size), INT4)


def pack_int4(values: Tensor) -> Tensor:
    """Pack 4-bit integers, eight per 32-bit word."""
    nibbles = (values.int() - WEIGHTS.low).view(len(values), -1, CODES_PER_WORD)
    return (nibbles << _bit_offsets(values)).sum(-1, dtype=torch.int32)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack 4-bit integers to int8."""
    nibbles: Tensor = (packed.unsqueeze(-1) >> _bit_offsets(packed)) & (2**BITS - 1)
    return (nibbles + WEIGHTS.low).flatten(-2).to(torch.int8)


def _bit_offsets(tensor: Tensor) -> Tensor:
    return torch.arange(0, BITS * CODES_PER_WORD, BITS, dtype=torch.int32, device=tensor.device)


def load_compressed(folder: Path, trained_run: TrainedRun, device: torch.device) -> ModelModule:
    """Load the model of an exported folder, with integer weights.

    Raises:
        CheckpointError: a fake-quantized weight is not stored as integers.
    """
    from torchao.quantization import IntxUnpackedToInt8Tensor

    model, names = trained_run.model, _hf_names(trained_run.model)
    tensors, integers = load_file(folder / SINGLE, device=str(device)), {}
    for name, hf_name in names.items():
        if f"{hf_name}_packed" in tensors:
            packed, scale, _ = (
                tensors.pop(f"{hf_name}_{kind}") for kind in ("packed", "scale", "shape")
            )
            integers[name] = tensor = IntxUnpackedToInt8Tensor(
                unpack_int4(packed),
                scale,
                torch.zeros_like(scale, dtype=torch.int8),
                INT4,
                (1, trained_run.quantization.group),
                torch.float32,
                INPUT_QUANTIZATION if trained_run.quantization.rounds_inputs else None,
            )
            tensors[hf_name] = tensor.dequantize()
    if missing := [
        weight.name for weight in trained_run.fake_quantized_weights if weight.name not in integers
    ]:
        reason = f"contains no integers of {missing[0]}"
        raise CheckpointError.for_key("", folder, reason, "export it again")
    module = build_meta(model, StageSlice(range(model.layers))).to_empty(device=device)
    module.init_buffers()
    if isinstance(model, DecoderConfig):
        state = state_dict_adapter.from_hf_state_dict(tensors, model, folder)
    else:
        state = {name: tensors[hf_name] for name, hf_name in names.items()}
    module.load_state_dict(state)
    for name, tensor in integers.items():
        layer = module.get_submodule(name.removesuffix(".weight"))
        layer.weight = nn.Parameter(tensor, requires_grad=False)
    return module.float().eval()


def measure_compressed(
    trained_run: TrainedRun, folder: Path, validation_data: TokenDataset | None
) -> dict[str, float]:
    """Measure the disk size of an exported folder and, on validation data, its loss and logits.

    The exported file is loaded again. It is compared with the fake-quantized model and with fp32.
    """
    device = torch.device(this_machine().device.value)
    record: dict[str, float] = {
        "layers": len(trained_run.fake_quantized_weights),
        "disk_bytes": (folder / SINGLE).stat().st_size,
        "disk_bytes_in_fp32": FP32_BYTES * trained_run.model.num_parameters,
    }
    if validation_data is None:
        return record
    module = load_compressed(folder, trained_run, device)
    baselines = {
        "as_trained": load_model(trained_run, device).float(),
        "in_fp32": load_model(trained_run, device, unquantized=True).float(),
    }
    dataset_args = (
        validation_data,
        trained_run.trainer.validation_rows,
        int(trained_run.trainer.micro_batch),
    )
    metrics = validation_metrics.measure_loss(module, *dataset_args)
    record |= {"rows": metrics.rows, "loss": metrics.loss}
    for kind, baseline in baselines.items():
        record[f"loss_{kind}"] = validation_metrics.measure_loss(baseline, *dataset_args).loss
        distance = validation_metrics.logits_distance(module, baseline, *dataset_args)
        record[f"logits_apart_{kind}"] = distance
    return record


def _compression_config(trained_run: TrainedRun) -> dict[str, Any]:
    """Quantization config for compressed-tensors."""
    group = trained_run.quantization.group
    weights = {"num_bits": BITS, "type": "int", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": False, "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": FORMAT,  # the default for quantized inputs is another format
                "weights": weights | {"strategy": "group", "group_size": group},
                "input_activations": inputs | {"strategy": "token"}
                if trained_run.quantization.rounds_inputs
                else None,
            }
        },
        "ignore": ["lm_head", "score"],
    }
