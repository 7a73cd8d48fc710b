"""Export of an adapter of a transformers model in PEFT's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from peft import IA3Config, PeftConfig
from torch import Tensor

from scalewise.adapters import peft_export
from scalewise.adapters.config import AdapterConfig
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_config import LoRAAdapterConfig
from scalewise.errors import ConfigError
from scalewise.models.base import StageSlice, is_adapter_weight
from scalewise.models.build import build_meta
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.hf.config import HuggingFaceConfig


def export_hf_adapter(
    state: Mapping[str, Tensor],
    adapter: AdapterConfig,
    model: HuggingFaceConfig,
    folder: Path,
    base_model_path: str,
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``state``: unsharded tensors. ``base_model_path``: path of the exported base model. Raises
    ``ConfigError`` if modules are trained in full.
    """
    if adapter.trained:
        reason = "is supported only for scalewise's decoder models"
        raise ConfigError.for_key(
            "adapter.trained", list(adapter.trained), reason, "set adapter=merged"
        )
    module = build_meta(model, StageSlice(range(model.layers)))
    assert isinstance(module, CausalLMModule)
    added_tensors = {
        module.hf_name(name): tensor for name, tensor in state.items() if is_adapter_weight(name)
    }
    adapted = {name.split(".lora_")[0].split(".ia3_l")[0] for name in added_tensors}
    transposed = bool(module.transposed_weights)
    config: PeftConfig
    if isinstance(adapter, LoRAAdapterConfig):
        config = peft_export.lora_peft_config(adapter, adapted, fan_in_fan_out=transposed)
    else:
        assert isinstance(adapter, IA3AdapterConfig)
        inputs = [name for name, tensor in added_tensors.items() if len(tensor) == 1]
        config = IA3Config(
            target_modules=sorted(adapted),
            feedforward_modules=sorted(name.split(".ia3_l")[0] for name in inputs),
            fan_in_fan_out=transposed,
        )
    tensors = {
        f"{peft_export.PEFT_PREFIX}{_peft_name(name)}": tensor
        for name, tensor in added_tensors.items()
    }
    task = "SEQ_2_SEQ_LM" if model.is_encoder_decoder else "CAUSAL_LM"
    # PEFT has no task type for image-text models.
    peft_export.save_adapter(
        config, tensors, folder, base_model_path, None if model.image_size else task
    )


def _peft_name(name: str) -> str:
    """PEFT's name of an added tensor in a file: magnitudes and scales are not modules."""
    name = name.replace(".default", "")
    return name.removesuffix(".weight") if "magnitude" in name else name
