"""Export of an adapter in PEFT's format, for ``PeftModel.from_pretrained``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig
from torch import Tensor

from scalewise.adapters.config import AdapterConfig
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_config import LoRAAdapterConfig
from scalewise.adapters.lora_modules import adapter_weight_name
from scalewise.adapters.prompt_config import (
    PREFIX_NAMES,
    PROMPT_NAME,
    PrefixAdapterConfig,
    VirtualTokenAdapterConfig,
)
from scalewise.adapters.target_modules import DEFAULT, module_name
from scalewise.errors import ConfigError
from scalewise.models import safetensors_files
from scalewise.models.base import StageSlice, is_adapter_weight
from scalewise.models.build import build_meta
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.hf_families import find_family
from scalewise.models.decoder.state_dict_adapter import (
    TensorMapping,
    iter_tensor_mappings,
)
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.hf.config import HuggingFaceConfig

PEFT_PREFIX = "base_model.model."
"""Prefix of tensor names in PEFT's files."""


def export_adapter(
    state: Mapping[str, Tensor],
    adapter: AdapterConfig,
    model: DecoderConfig,
    folder: Path,
    base_model_path: str,
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``state``: unsharded tensors. ``base_model_path``: path of the exported base model. Raises
    ``ConfigError`` if a Hugging Face module joins an adapted layer with a fully trained one.
    """
    config: PeftConfig
    if isinstance(adapter, VirtualTokenAdapterConfig):
        config, tensors = _virtual_token_config(state, adapter, model)
    elif isinstance(adapter, LoRAAdapterConfig):
        config, tensors = _lora_tensors(state, adapter, model)
    else:
        config, tensors = _ia3_tensors(state, model)
    full_tensors = _fully_trained_tensors(state, adapter, model)
    full_modules = {_module_name(name) for name in full_tensors}
    if conflicting := full_modules & {
        name.split(".lora_")[0].removesuffix(".ia3_l") for name in tensors
    }:
        reason = f"trains a part of {min(conflicting)}, whose other part is adapted"
        raise ConfigError.for_key("adapter.trained", adapter.trained, reason, "set adapter=merged")
    if full_modules:
        config.modules_to_save = sorted(full_modules)
    if isinstance(config, LoraConfig):  # IA3Config has no such option
        config.ensure_weight_tying = model.tied and "lm_head" in full_modules
    prefix = "" if isinstance(adapter, VirtualTokenAdapterConfig) else PEFT_PREFIX
    named_tensors = {f"{prefix}{name}": tensor for name, tensor in (tensors | full_tensors).items()}
    save_adapter(
        config, named_tensors, folder, base_model_path, "SEQ_CLS" if model.classes else "CAUSAL_LM"
    )


def save_adapter(
    config: PeftConfig,
    tensors: dict[str, Tensor],
    folder: Path,
    base_model_path: str,
    task_type: str | None,
) -> None:
    """Write the config and the tensors of an adapter.

    ``base_model_path``: path of the base model. ``task_type``: PEFT's name of the task.
    """
    config.base_model_name_or_path = base_model_path
    config.inference_mode = True
    config.task_type = task_type
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    safetensors_files.save_tensors(tensors, folder / "adapter_model.safetensors")


def lora_peft_config(
    adapter: LoRAAdapterConfig, targets: Iterable[str], **extra_options: Any
) -> LoraConfig:
    """PEFT's config of a LoRA adapter.

    ``extra_options``: options that depend on the model.
    """
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=cast(int, adapter.alpha),  # annotated as int, but floats work
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rank_stabilized,
        use_dora=adapter.magnitudes,
        target_modules=sorted(targets),
        **extra_options,
    )


def _virtual_token_config(
    state: Mapping[str, Tensor], adapter: VirtualTokenAdapterConfig, model: DecoderConfig
) -> tuple[PromptTuningConfig | PrefixTuningConfig, dict[str, Tensor]]:
    """PEFT's config and its one tensor.

    For prefix tuning, the tensor contains keys and values by layer.
    """
    config_class: type[PromptTuningConfig | PrefixTuningConfig] = PromptTuningConfig
    names, width, heads = [PROMPT_NAME], model.width, model.heads
    if isinstance(adapter, PrefixAdapterConfig):
        config_class, width, heads = PrefixTuningConfig, model.kv_width, model.key_heads
        parameter_names = [f"{name}.weight" for name in PREFIX_NAMES]
        names = [
            f"blocks.{layer}.{name}" for layer in range(model.layers) for name in parameter_names
        ]
    config = config_class(
        num_virtual_tokens=adapter.tokens,
        token_dim=width,
        num_transformer_submodules=1,
        num_attention_heads=heads,
        num_layers=model.layers,
    )
    return config, {"prompt_embeddings": torch.cat([state[name] for name in names], dim=1)}


def _lora_tensors(
    state: Mapping[str, Tensor], adapter: LoRAAdapterConfig, model: DecoderConfig
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """PEFT's config and its tensors.

    Layers that Hugging Face stores as one (GPT-2's queries, keys and values) become one update of a
    multiple of the rank. Experts have the names of Mixtral and Qwen3-MoE in transformers 4, one
    linear layer per expert and matrix, which PEFT stacks for transformers 5.
    """
    _check_experts(adapter, model)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for mapping in iter_tensor_mappings(model):
        adapted = [
            _module_name(name) for name in mapping.names if adapter_weight_name(name, "A") in state
        ]
        if not adapted or not mapping.memory_name.endswith(".weight"):
            continue
        hf_name = _module_name(mapping.memory_name)
        if mapping.expert is not None:
            factors = _expert_lora(mapping, state, model.routed_experts)
            tensors |= {f"{hf_name}.lora_{part}.weight": it for part, it in factors.items()}
            ranks[hf_name.rpartition(".")[2]] = adapter.rank
            continue
        for part, tensor in _joined_lora(mapping, state, adapter.rank).items():
            tensors[f"{hf_name}.lora_{part}.weight"] = tensor
        if adapter.magnitudes:
            tensors[f"{hf_name}.lora_magnitude_vector"] = _joined_magnitudes(mapping, state)
        ranks[_short_name(hf_name)] = adapter.rank * len(adapted)
    rank_pattern = {target: rank for target, rank in ranks.items() if rank != adapter.rank}
    rank_factors = {target: rank / adapter.rank for target, rank in rank_pattern.items()}
    config = lora_peft_config(
        adapter,
        ranks,
        rank_pattern=rank_pattern,
        # Keeps alpha / rank, or alpha / sqrt(rank), unchanged.
        alpha_pattern={
            target: adapter.alpha * (factor**0.5 if adapter.rank_stabilized else factor)
            for target, factor in rank_factors.items()
        },
        fan_in_fan_out=find_family(model).has_conv1d,
    )
    return config, tensors


def _check_experts(adapter: LoRAAdapterConfig, model: DecoderConfig) -> None:
    """Raise ``ConfigError`` for experts that PEFT cannot load into transformers 5.

    It stores gates and up projections as one parameter of the same module as down projections.
    """
    adapted = {*adapter.adapted_layers(model)} & {*model.expert_layers}
    missing = [name for name in model.expert_layers if name not in adapted]
    if adapted and missing:
        reason = f"leaves out {missing[0]}: PEFT loads all matrices of experts or none"
        fix = "set adapter=merged, or train with feedforward.experts.*"
        raise ConfigError.for_key("adapter.targets", list(adapter.targets), reason, fix)


def _expert_lora(
    mapping: TensorMapping, state: Mapping[str, Tensor], experts: int
) -> dict[str, Tensor]:
    """A and B of one expert, as copies: tensors of a file cannot share memory."""
    assert mapping.expert is not None
    return {
        part: state[adapter_weight_name(mapping.names[0], part)]
        .unflatten(0, (experts, -1))[mapping.expert]
        .clone()
        for part in "AB"
    }


def _ia3_tensors(
    state: Mapping[str, Tensor], model: DecoderConfig
) -> tuple[IA3Config, dict[str, Tensor]]:
    """PEFT's config and its tensors; layers without scale in a joined layer get ones."""
    tensors: dict[str, Tensor] = {}
    scaled_inputs: set[str] = set()
    for mapping in iter_tensor_mappings(model):
        scales = [state.get(f"{_module_name(name)}.ia3_l.{DEFAULT}") for name in mapping.names]
        if all(scale is None for scale in scales) or not mapping.memory_name.endswith(".weight"):
            continue
        hf_name = _module_name(mapping.memory_name)
        joined_scales = [
            torch.ones(len(state[name]), 1) if scale is None else scale
            for name, scale in zip(mapping.names, scales, strict=True)
        ]
        tensors[f"{hf_name}.ia3_l"] = mapping.interleave_rows(torch.cat(joined_scales))
        if len(joined_scales[0]) == 1:
            scaled_inputs.add(_short_name(hf_name))
    config = IA3Config(
        target_modules=sorted({_short_name(_module_name(name)) for name in tensors}),
        feedforward_modules=sorted(scaled_inputs),
        fan_in_fan_out=find_family(model).has_conv1d,
    )
    return config, tensors


def _fully_trained_tensors(
    state: Mapping[str, Tensor], adapter: AdapterConfig, model: DecoderConfig
) -> dict[str, Tensor]:
    """Tensors of modules trained in full; a tied head gets a copy of the embedding."""
    trained, tensors = adapter.fully_trained_modules(model), {}
    for mapping in iter_tensor_mappings(model):
        if any(module_name(name) in trained for name in mapping.names):
            if mapping.expert is not None:
                reason = f"trains {module_name(mapping.names[0])}, which is no module for PEFT"
                fix = "set adapter=merged"
                raise ConfigError.for_key("adapter.trained", [*adapter.trained], reason, fix)
            tensor = mapping.interleave_rows(torch.cat([state[name] for name in mapping.names]))
            tensors[mapping.memory_name] = (tensor.T if mapping.transposed else tensor).contiguous()
            if mapping.names[0] in model.tied_weights:
                tensors["lm_head.weight"] = tensor.clone()
    return tensors


def _joined_lora(
    mapping: TensorMapping, state: Mapping[str, Tensor], rank: int
) -> dict[str, Tensor]:
    """A and B of a joined layer: concatenated As, and Bs along the block diagonal."""
    adapted = [name for name in mapping.names if adapter_weight_name(name, "A") in state]
    rows = [state[name].shape[0] for name in mapping.names]
    down = torch.cat([state[adapter_weight_name(name, "A")] for name in adapted])
    up = torch.zeros(sum(rows), rank * len(adapted), dtype=down.dtype)
    for number, name in enumerate(adapted):
        index = mapping.names.index(name)
        first_row, first_column = sum(rows[:index]), rank * number
        up[first_row : first_row + rows[index], first_column : first_column + rank] = state[
            adapter_weight_name(name, "B")
        ]
    return {"A": down, "B": mapping.interleave_rows(up)}


def _joined_magnitudes(mapping: TensorMapping, state: Mapping[str, Tensor]) -> Tensor:
    """Magnitudes of a joined layer; rows without adapter get their norms."""
    magnitudes = [
        state.get(
            f"{_module_name(name)}.lora_magnitude_vector.{DEFAULT}.weight",
            torch.linalg.vector_norm(state[name].float(), dim=1).to(state[name].dtype),
        )
        for name in mapping.names
    ]
    return mapping.interleave_rows(torch.cat(magnitudes))


def _short_name(module_name: str) -> str:
    """Last two parts of a module name: ``self_attn.q_proj``."""
    return ".".join(module_name.split(".")[-2:])


def _module_name(name: str) -> str:
    return name.rpartition(".")[0]


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
        config = lora_peft_config(adapter, adapted, fan_in_fan_out=transposed)
    else:
        assert isinstance(adapter, IA3AdapterConfig)
        inputs = [name for name, tensor in added_tensors.items() if len(tensor) == 1]
        config = IA3Config(
            target_modules=sorted(adapted),
            feedforward_modules=sorted(name.split(".ia3_l")[0] for name in inputs),
            fan_in_fan_out=transposed,
        )
    tensors = {f"{PEFT_PREFIX}{_peft_name(name)}": tensor for name, tensor in added_tensors.items()}
    task = "SEQ_2_SEQ_LM" if model.is_encoder_decoder else "CAUSAL_LM"
    # PEFT has no task type for image-text models.
    save_adapter(config, tensors, folder, base_model_path, None if model.image_size else task)


def _peft_name(name: str) -> str:
    """PEFT's name of an added tensor in a file: magnitudes and scales are not modules."""
    name = name.replace(".default", "")
    return name.removesuffix(".weight") if "magnitude" in name else name
