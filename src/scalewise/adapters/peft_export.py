"""An adapter alone, as PEFT keeps it: ``PeftModel.from_pretrained`` loads the folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig
from torch import Tensor

from scalewise.adapters.config import AdapterConfig
from scalewise.adapters.lora_config import LoRAAdapterConfig
from scalewise.adapters.lora_modules import DEFAULT, adapter_weight_name
from scalewise.adapters.prompt_tuning import (
    NAME,
    PREFIX,
    PrefixAdapterConfig,
    VirtualTokenAdapterConfig,
)
from scalewise.adapters.target_modules import module_name
from scalewise.errors import ConfigError
from scalewise.models import safetensors_files
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.state_dict_adapter import (
    TensorMapping,
    is_llama_shape,
    iter_tensor_mappings,
)

STEM = "base_model.model."
"""What PEFT's names of a model's tensors begin with."""


def export_adapter(
    state: Mapping[str, Tensor],
    adapter: AdapterConfig,
    model: DecoderConfig,
    folder: Path,
    base_model_path: str,
) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``state`` holds whole tensors; ``base_model_path`` is where the model lies that the adapter
    belongs to. Raises ``ConfigError`` for a model that has no home there.
    """
    config: PeftConfig
    if isinstance(adapter, VirtualTokenAdapterConfig):
        config, tensors = _virtual_token_config(state, adapter, model)
    elif isinstance(adapter, LoRAAdapterConfig):
        config, tensors = _lora_tensors(state, adapter, model)
    else:
        config, tensors = _ia3_tensors(state, model)
    whole = _fully_trained_tensors(state, adapter, model)
    saved = {_module_name(name) for name in whole}
    if both := saved & {name.split(".lora_")[0].removesuffix(".ia3_l") for name in tensors}:
        reason = f"Hugging Face's {min(both)} is adapted and trained whole, part by part"
        raise ConfigError.for_key("adapter.trained", adapter.trained, reason, "set adapter=merged")
    if saved:
        config.modules_to_save = sorted(saved)
    if isinstance(config, LoraConfig):  # IA3's has no such setting
        config.ensure_weight_tying = model.tied and "lm_head" in saved
    stem = "" if isinstance(adapter, VirtualTokenAdapterConfig) else STEM
    named = {f"{stem}{name}": tensor for name, tensor in (tensors | whole).items()}
    save_adapter(
        config, named, folder, base_model_path, "SEQ_CLS" if model.classes else "CAUSAL_LM"
    )


def save_adapter(
    config: PeftConfig,
    tensors: dict[str, Tensor],
    folder: Path,
    base_model_path: str,
    task_type: str | None,
) -> None:
    """Writes both files of an adapter of a model at ``base_model_path``; ``task_type``: what PEFT
    calls it."""
    config.base_model_name_or_path = base_model_path
    config.inference_mode = True
    config.task_type = task_type
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    safetensors_files.save_tensors(tensors, folder / "adapter_model.safetensors")


def lora_peft_config(
    adapter: LoRAAdapterConfig, targets: Iterable[str], **extra_options: Any
) -> LoraConfig:
    """Returns PEFT's configuration of added products; ``extra_options`` is what a model needs
    besides."""
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=cast(int, adapter.alpha),  # any number will do
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rank_stabilized,
        use_dora=adapter.magnitudes,
        target_modules=sorted(targets),
        **extra_options,
    )


def _virtual_token_config(
    state: Mapping[str, Tensor], adapter: VirtualTokenAdapterConfig, model: DecoderConfig
) -> tuple[PromptTuningConfig | PrefixTuningConfig, dict[str, Tensor]]:
    """Returns PEFT's configuration and its one tensor: of prefixes, keys and values by layer."""
    kind: type[PromptTuningConfig | PrefixTuningConfig] = PromptTuningConfig
    names, width, heads = [NAME], model.width, model.heads
    if isinstance(adapter, PrefixAdapterConfig):
        kind, width, heads = PrefixTuningConfig, model.kv_width, model.key_heads
        within = [f"{name}.weight" for name in PREFIX]
        names = [f"blocks.{layer}.{name}" for layer in range(model.layers) for name in within]
    config = kind(
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
    """Returns PEFT's configuration and its tensors.

    Layers of ours that Hugging Face keeps as one (GPT-2's queries, keys and values) become one
    product of as many times the rank.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for piece in iter_tensor_mappings(model):
        adapted = [
            _module_name(name) for name in piece.names if adapter_weight_name(name, "A") in state
        ]
        if not adapted or not piece.hf_name.endswith(".weight"):
            continue
        theirs = _module_name(piece.hf_name)
        for part, tensor in _joined_lora(piece, state, adapter.rank).items():
            tensors[f"{theirs}.lora_{part}.weight"] = tensor
        if adapter.magnitudes:
            tensors[f"{theirs}.lora_magnitude_vector"] = _joined_magnitudes(piece, state)
        ranks[_short_name(theirs)] = adapter.rank * len(adapted)
    wide = {target: rank for target, rank in ranks.items() if rank != adapter.rank}
    more = {target: rank / adapter.rank for target, rank in wide.items()}
    config = lora_peft_config(
        adapter,
        ranks,
        rank_pattern=wide,
        # So that alpha / rank, or alpha / sqrt(rank), is what it was.
        alpha_pattern={
            target: adapter.alpha * (times**0.5 if adapter.rank_stabilized else times)
            for target, times in more.items()
        },
        fan_in_fan_out=not is_llama_shape(model),
    )
    return config, tensors


def _ia3_tensors(
    state: Mapping[str, Tensor], model: DecoderConfig
) -> tuple[IA3Config, dict[str, Tensor]]:
    """Returns PEFT's configuration and its tensors; of a joined layer what has no scale has one."""
    tensors: dict[str, Tensor] = {}
    inputs: set[str] = set()
    for piece in iter_tensor_mappings(model):
        scales = [state.get(f"{_module_name(name)}.ia3_l.{DEFAULT}") for name in piece.names]
        if all(scale is None for scale in scales) or not piece.hf_name.endswith(".weight"):
            continue
        theirs = _module_name(piece.hf_name)
        held = [
            torch.ones(len(state[name]), 1) if scale is None else scale
            for name, scale in zip(piece.names, scales, strict=True)
        ]
        tensors[f"{theirs}.ia3_l"] = torch.cat(held)
        if len(held[0]) == 1:
            inputs.add(_short_name(theirs))
    config = IA3Config(
        target_modules=sorted({_short_name(_module_name(name)) for name in tensors}),
        feedforward_modules=sorted(inputs),
        fan_in_fan_out=not is_llama_shape(model),
    )
    return config, tensors


def _fully_trained_tensors(
    state: Mapping[str, Tensor], adapter: AdapterConfig, model: DecoderConfig
) -> dict[str, Tensor]:
    """Returns the tensors of modules that are trained themselves; a tied head has the embedding."""
    trained, tensors = adapter.fully_trained_modules(model), {}
    for piece in iter_tensor_mappings(model):
        if any(module_name(name) in trained for name in piece.names):
            tensor = torch.cat([state[name] for name in piece.names])
            tensors[piece.hf_name] = (tensor.T if piece.transposed else tensor).contiguous()
            if piece.names[0] in model.tied_weights:
                tensors["lm_head.weight"] = tensor.clone()
    return tensors


def _joined_lora(
    mapping: TensorMapping, state: Mapping[str, Tensor], rank: int
) -> dict[str, Tensor]:
    """Returns A and B of a tensor of theirs: A's below each other, B's along the diagonal."""
    adapted = [name for name in mapping.names if adapter_weight_name(name, "A") in state]
    rows = [state[name].shape[0] for name in mapping.names]
    down = torch.cat([state[adapter_weight_name(name, "A")] for name in adapted])
    up = torch.zeros(sum(rows), rank * len(adapted), dtype=down.dtype)
    for place, name in enumerate(adapted):
        index = mapping.names.index(name)
        top, left = sum(rows[:index]), rank * place
        up[top : top + rows[index], left : left + rank] = state[adapter_weight_name(name, "B")]
    return {"A": down, "B": up}


def _joined_magnitudes(mapping: TensorMapping, state: Mapping[str, Tensor]) -> Tensor:
    """Returns those of a tensor of theirs: rows that nothing is added to keep their norms."""
    held = [
        state.get(
            f"{_module_name(name)}.lora_magnitude_vector.{DEFAULT}.weight",
            torch.linalg.vector_norm(state[name].float(), dim=1).to(state[name].dtype),
        )
        for name in mapping.names
    ]
    return torch.cat(held)


def _short_name(module_name: str) -> str:
    """Returns what is enough of a module's name: ``self_attn.q_proj``."""
    return ".".join(module_name.split(".")[-2:])


def _module_name(name: str) -> str:
    return name.rpartition(".")[0]
