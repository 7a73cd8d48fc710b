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
    state: Mapping[str, Tensor], spec: AdapterConfig, model: DecoderConfig, folder: Path, base: str
) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``state`` holds whole tensors; ``base`` is where the model lies that the adapter belongs to.
    Raises ``ConfigError`` for a model that has no home there.
    """
    config: PeftConfig
    if isinstance(spec, VirtualTokenAdapterConfig):
        config, tensors = _virtual_token_config(state, spec, model)
    elif isinstance(spec, LoRAAdapterConfig):
        config, tensors = _lora_tensors(state, spec, model)
    else:
        config, tensors = _ia3_tensors(state, model)
    whole = _fully_trained_tensors(state, spec, model)
    saved = {_module_name(name) for name in whole}
    if both := saved & {name.split(".lora_")[0].removesuffix(".ia3_l") for name in tensors}:
        reason = f"Hugging Face's {min(both)} is adapted and trained whole, part by part"
        raise ConfigError.one("adapter.trained", spec.trained, reason, "set adapter=merged")
    if saved:
        config.modules_to_save = sorted(saved)
    if isinstance(config, LoraConfig):  # IA3's has no such setting
        config.ensure_weight_tying = model.tied and "lm_head" in saved
    stem = "" if isinstance(spec, VirtualTokenAdapterConfig) else STEM
    named = {f"{stem}{name}": tensor for name, tensor in (tensors | whole).items()}
    save_adapter(config, named, folder, base, "SEQ_CLS" if model.classes else "CAUSAL_LM")


def save_adapter(
    config: PeftConfig, tensors: dict[str, Tensor], folder: Path, base: str, task: str | None
) -> None:
    """Writes both files of an adapter of a model at ``base``; ``task``: what PEFT calls it."""
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.task_type = task
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    safetensors_files.save_tensors(tensors, folder / "adapter_model.safetensors")


def lora_peft_config(spec: LoRAAdapterConfig, targets: Iterable[str], **more: Any) -> LoraConfig:
    """Returns PEFT's configuration of added products; ``more`` is what a model needs besides."""
    return LoraConfig(
        r=spec.rank,
        lora_alpha=cast(int, spec.alpha),  # any number will do
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilized,
        use_dora=spec.magnitudes,
        target_modules=sorted(targets),
        **more,
    )


def _virtual_token_config(
    state: Mapping[str, Tensor], spec: VirtualTokenAdapterConfig, model: DecoderConfig
) -> tuple[PromptTuningConfig | PrefixTuningConfig, dict[str, Tensor]]:
    """Returns PEFT's configuration and its one tensor: of prefixes, keys and values by layer."""
    kind: type[PromptTuningConfig | PrefixTuningConfig] = PromptTuningConfig
    names, width, heads = [NAME], model.width, model.heads
    if isinstance(spec, PrefixAdapterConfig):
        kind, width, heads = PrefixTuningConfig, model.kv_width, model.key_heads
        within = [f"{name}.weight" for name in PREFIX]
        names = [f"blocks.{layer}.{name}" for layer in range(model.layers) for name in within]
    config = kind(
        num_virtual_tokens=spec.tokens,
        token_dim=width,
        num_transformer_submodules=1,
        num_attention_heads=heads,
        num_layers=model.layers,
    )
    return config, {"prompt_embeddings": torch.cat([state[name] for name in names], dim=1)}


def _lora_tensors(
    state: Mapping[str, Tensor], spec: LoRAAdapterConfig, model: DecoderConfig
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Returns PEFT's configuration and its tensors.

    Layers of ours that Hugging Face keeps as one (GPT-2's queries, keys and values) become one
    product of as many times the rank.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for piece in iter_tensor_mappings(model):
        adapted = [
            _module_name(name) for name in piece.ours if adapter_weight_name(name, "A") in state
        ]
        if not adapted or not piece.theirs.endswith(".weight"):
            continue
        theirs = _module_name(piece.theirs)
        for part, tensor in _joined_lora(piece, state, spec.rank).items():
            tensors[f"{theirs}.lora_{part}.weight"] = tensor
        if spec.magnitudes:
            tensors[f"{theirs}.lora_magnitude_vector"] = _joined_magnitudes(piece, state)
        ranks[_short_name(theirs)] = spec.rank * len(adapted)
    wide = {target: rank for target, rank in ranks.items() if rank != spec.rank}
    more = {target: rank / spec.rank for target, rank in wide.items()}
    config = lora_peft_config(
        spec,
        ranks,
        rank_pattern=wide,
        # So that alpha / rank, or alpha / sqrt(rank), is what it was.
        alpha_pattern={
            target: spec.alpha * (times**0.5 if spec.rank_stabilized else times)
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
        scales = [state.get(f"{_module_name(name)}.ia3_l.{DEFAULT}") for name in piece.ours]
        if all(scale is None for scale in scales) or not piece.theirs.endswith(".weight"):
            continue
        theirs = _module_name(piece.theirs)
        held = [
            torch.ones(len(state[name]), 1) if scale is None else scale
            for name, scale in zip(piece.ours, scales, strict=True)
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
    state: Mapping[str, Tensor], spec: AdapterConfig, model: DecoderConfig
) -> dict[str, Tensor]:
    """Returns the tensors of modules that are trained themselves; a tied head has the embedding."""
    trained, tensors = spec.whole(model), {}
    for piece in iter_tensor_mappings(model):
        if any(module_name(name) in trained for name in piece.ours):
            tensor = torch.cat([state[name] for name in piece.ours])
            tensors[piece.theirs] = (tensor.T if piece.transposed else tensor).contiguous()
            if piece.ours[0] in model.tied_weights:
                tensors["lm_head.weight"] = tensor.clone()
    return tensors


def _joined_lora(piece: TensorMapping, state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Returns A and B of a tensor of theirs: A's below each other, B's along the diagonal."""
    adapted = [name for name in piece.ours if adapter_weight_name(name, "A") in state]
    rows = [state[name].shape[0] for name in piece.ours]
    down = torch.cat([state[adapter_weight_name(name, "A")] for name in adapted])
    up = torch.zeros(sum(rows), rank * len(adapted), dtype=down.dtype)
    for place, name in enumerate(adapted):
        index = piece.ours.index(name)
        top, left = sum(rows[:index]), rank * place
        up[top : top + rows[index], left : left + rank] = state[adapter_weight_name(name, "B")]
    return {"A": down, "B": up}


def _joined_magnitudes(piece: TensorMapping, state: Mapping[str, Tensor]) -> Tensor:
    """Returns those of a tensor of theirs: rows that nothing is added to keep their norms."""
    held = [
        state.get(
            f"{_module_name(name)}.lora_magnitude_vector.{DEFAULT}.weight",
            torch.linalg.vector_norm(state[name].float(), dim=1).to(state[name].dtype),
        )
        for name in piece.ours
    ]
    return torch.cat(held)


def _short_name(theirs: str) -> str:
    """Returns what is enough of a module's name: ``self_attn.q_proj``."""
    return ".".join(theirs.split(".")[-2:])


def _module_name(name: str) -> str:
    return name.rpartition(".")[0]
