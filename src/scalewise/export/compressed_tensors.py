"""Matrices that were trained to be integers, as integers, and what that costs.

They are written as compressed-tensors has them, safetensors that transformers and vLLM read
(``pack-quantized``): of ``NAME``, ``NAME_packed`` holds eight numbers of 4 bits in one of 32, the
first in its lowest bits, each 8 more than it stands for; ``NAME_scale`` a number for each group.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchao.quantization import IntxUnpackedToInt8Tensor

from scalewise.checkpoints.trained import TrainedRun
from scalewise.data.base import Sequences
from scalewise.errors import CheckpointError
from scalewise.evaluation import load_model, validation_metrics
from scalewise.hardware import this_machine
from scalewise.models.base import ModelConfig, StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.decoder import state_dict_adapter
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.safetensors_files import SINGLE
from scalewise.quantization.fake import WEIGHTS
from scalewise.quantization.qat import FP32, PER_WORD

BITS = 4
FORM = "pack-quantized"
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
INPUTS = "int8_asym_per_token"
"""What torchao calls inputs in 8 bits, each token by its own range."""


def write_compressed(trained_run: TrainedRun, target_folder: Path) -> None:
    """Writes weights and configuration, with the matrices that were rounded as integers."""
    trained_run.model.export(trained_run.read_merged_state_dict(), target_folder)
    tensors, names = load_file(target_folder / SINGLE), _hf_names(trained_run.model)
    (target_folder / SINGLE).unlink()  # tensors are mapped from it, and another takes its name
    for name in (names[weight.name] for weight in trained_run.fake_quantized_weights):
        whole = tensors.pop(name)
        found = to_torchao(whole, trained_run.quantization.group)
        tensors[f"{name}_packed"] = pack_int4(found.qdata)
        tensors[f"{name}_scale"] = found.scale
        tensors[f"{name}_shape"] = torch.tensor(whole.shape)
    config = json.loads((target_folder / "config.json").read_text("utf-8"))
    state_dict_adapter.save_folder(
        tensors, config | {"quantization_config": _compression_config(trained_run)}, target_folder
    )


def _hf_names(model: ModelConfig) -> dict[str, str]:
    """Returns transformers' name of each weight that is one there too, by its own."""
    if isinstance(model, DecoderConfig):
        return {
            piece.names[0]: piece.hf_name
            for piece in state_dict_adapter.iter_tensor_mappings(model)
        }
    from scalewise.models.hf.causal_lm import CausalLMModule

    module = model.build_meta(StageSlice(range(model.layers)))
    assert isinstance(module, CausalLMModule)
    return {name: module.hf_name(name) for name, _ in module.base_parameters()}


def to_torchao(weight: Tensor, group_size: int) -> Any:
    """Returns a matrix as torchao's tensor of integers, with a scale for each group."""
    return IntxUnpackedToInt8Tensor.from_hp(weight.float(), (1, group_size), INT4)


def pack_int4(values: Tensor) -> Tensor:
    """Returns integers of 4 bits, eight in one of 32."""
    of_word = (values.int() - WEIGHTS.low).view(len(values), -1, PER_WORD)
    return (of_word << _group_positions(values)).sum(-1, dtype=torch.int32)


def unpack_int4(packed: Tensor) -> Tensor:
    """Returns them in 8 bits each."""
    of_word: Tensor = (packed.unsqueeze(-1) >> _group_positions(packed)) & (2**BITS - 1)
    return (of_word + WEIGHTS.low).flatten(-2).to(torch.int8)


def _group_positions(tensor: Tensor) -> Tensor:
    return torch.arange(0, BITS * PER_WORD, BITS, dtype=torch.int32, device=tensor.device)


def load_compressed(folder: Path, trained_run: TrainedRun, device: torch.device) -> ModelModule:
    """Returns the model of a folder that was written, whose layers multiply by integers.

    Raises ``CheckpointError`` where a matrix that was trained to be integers is none.
    """
    model, names = trained_run.model, _hf_names(trained_run.model)
    held, integers = load_file(folder / SINGLE, device=str(device)), {}
    for ours, theirs in names.items():
        if f"{theirs}_packed" in held:
            words, scale, _ = (
                held.pop(f"{theirs}_{kind}") for kind in ("packed", "scale", "shape")
            )
            integers[ours] = tensor = IntxUnpackedToInt8Tensor(
                unpack_int4(words),
                scale,
                torch.zeros_like(scale, dtype=torch.int8),
                INT4,
                (1, trained_run.quantization.group),
                torch.float32,
                INPUTS if trained_run.quantization.rounds_inputs else None,
            )
            held[theirs] = tensor.dequantize()
    if lacking := [
        weight.name for weight in trained_run.fake_quantized_weights if weight.name not in integers
    ]:
        reason = f"holds no integers of {lacking[0]}"
        raise CheckpointError.for_key("", folder, reason, "export it anew")
    module = model.build_meta(StageSlice(range(model.layers))).to_empty(device=device)
    module.init_buffers()
    if isinstance(model, DecoderConfig):
        state = state_dict_adapter.from_hf_state_dict(held, model, folder)
    else:
        state = {ours: held[theirs] for ours, theirs in names.items()}
    module.load_state_dict(state)
    for name, tensor in integers.items():
        layer = module.get_submodule(name.removesuffix(".weight"))
        layer.weight = nn.Parameter(tensor, requires_grad=False)
    return module.float().eval()


def measure_compressed(
    trained_run: TrainedRun, folder: Path, validation_data: Sequences | None
) -> dict[str, float]:
    """Returns what a folder saves and costs: bytes, and on held-out rows losses and logits.

    The file is read back. Logits are told apart from those as trained, and from those of fp32.
    """
    device = torch.device(this_machine().device.value)
    found: dict[str, float] = {
        "layers": len(trained_run.fake_quantized_weights),
        "disk_bytes": (folder / SINGLE).stat().st_size,
        "disk_bytes_in_fp32": FP32 * trained_run.model.num_parameters,
    }
    if validation_data is None:
        return found
    integers = load_compressed(folder, trained_run, device)
    others = {
        "as_trained": load_model.load_model(trained_run, device).float(),
        "in_fp32": load_model.load_model(trained_run, device, unquantized=True).float(),
    }
    rows = (
        validation_data,
        trained_run.trainer.validation_rows,
        int(trained_run.trainer.micro_batch),
    )
    first = validation_metrics.measure_loss(integers, *rows)
    found |= {"rows": first.rows, "loss": first.loss}
    for kind, other in others.items():
        found[f"loss_{kind}"] = validation_metrics.measure_loss(other, *rows).loss
        found[f"logits_apart_{kind}"] = validation_metrics.logits_distance(integers, other, *rows)
    return found


def _compression_config(trained_run: TrainedRun) -> dict[str, Any]:
    """Returns how compressed-tensors is to read the integers."""
    group = trained_run.quantization.group
    numbers = {"num_bits": BITS, "type": "int", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": False, "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": FORM,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": FORM,  # else inputs that are rounded as well have it look for another
                "weights": numbers | {"strategy": "group", "group_size": group},
                "input_activations": inputs | {"strategy": "token"}
                if trained_run.quantization.rounds_inputs
                else None,
            }
        },
        "ignore": ["lm_head", "score"],
    }
