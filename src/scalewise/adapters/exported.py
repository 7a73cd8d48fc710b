"""An adapter alone, as PEFT keeps it: ``PeftModel.from_pretrained`` loads the folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig
from torch import Tensor

from scalewise.adapters.layers import module_of
from scalewise.adapters.lora import DEFAULT, product_of
from scalewise.adapters.low_rank import Lora
from scalewise.adapters.prompts import NAME, PREFIX, Prefix, VirtualTokens
from scalewise.adapters.spec import Adapter
from scalewise.errors import ConfigError
from scalewise.models import safetensors_files
from scalewise.models.decoder.spec import Decoder
from scalewise.models.decoder.weights import Piece, is_llama, pieces

STEM = "base_model.model."
"""What PEFT's names of a model's tensors begin with."""


def export(
    state: Mapping[str, Tensor], spec: Adapter, model: Decoder, folder: Path, base: str
) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``state`` holds whole tensors; ``base`` is where the model lies that the adapter belongs to.
    Raises ``ConfigError`` for a model that has no home there.
    """
    config: PeftConfig
    if isinstance(spec, VirtualTokens):
        config, tensors = _virtual_tokens(state, spec, model)
    elif isinstance(spec, Lora):
        config, tensors = _low_rank(state, spec, model)
    else:
        config, tensors = _scaled(state, model)
    whole = _whole(state, spec, model)
    saved = {_module(name) for name in whole}
    if both := saved & {name.split(".lora_")[0].removesuffix(".ia3_l") for name in tensors}:
        reason = f"Hugging Face's {min(both)} is adapted and trained whole, part by part"
        raise ConfigError.one("adapter.trained", spec.trained, reason, "set adapter=merged")
    if saved:
        config.modules_to_save = sorted(saved)
    if isinstance(config, LoraConfig):  # IA3's has no such setting
        config.ensure_weight_tying = model.tied and "lm_head" in saved
    stem = "" if isinstance(spec, VirtualTokens) else STEM
    named = {f"{stem}{name}": tensor for name, tensor in (tensors | whole).items()}
    save(config, named, folder, base, "SEQ_CLS" if model.classes else "CAUSAL_LM")


def save(
    config: PeftConfig, tensors: dict[str, Tensor], folder: Path, base: str, task: str | None
) -> None:
    """Writes both files of an adapter of a model at ``base``; ``task``: what PEFT calls it."""
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.task_type = task
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    safetensors_files.save(tensors, folder / "adapter_model.safetensors")


def low_rank_config(spec: Lora, targets: Iterable[str], **more: Any) -> LoraConfig:
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


def _virtual_tokens(
    state: Mapping[str, Tensor], spec: VirtualTokens, model: Decoder
) -> tuple[PromptTuningConfig | PrefixTuningConfig, dict[str, Tensor]]:
    """Returns PEFT's configuration and its one tensor: of prefixes, keys and values by layer."""
    kind: type[PromptTuningConfig | PrefixTuningConfig] = PromptTuningConfig
    names, width, heads = [NAME], model.width, model.heads
    if isinstance(spec, Prefix):
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


def _low_rank(
    state: Mapping[str, Tensor], spec: Lora, model: Decoder
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Returns PEFT's configuration and its tensors.

    Layers of ours that Hugging Face keeps as one (GPT-2's queries, keys and values) become one
    product of as many times the rank.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for piece in pieces(model):
        adapted = [_module(name) for name in piece.ours if product_of(name, "A") in state]
        if not adapted or not piece.theirs.endswith(".weight"):
            continue
        theirs = _module(piece.theirs)
        for part, tensor in _joined(piece, state, spec.rank).items():
            tensors[f"{theirs}.lora_{part}.weight"] = tensor
        if spec.magnitudes:
            tensors[f"{theirs}.lora_magnitude_vector"] = _magnitudes(piece, state)
        ranks[_short(theirs)] = spec.rank * len(adapted)
    wide = {target: rank for target, rank in ranks.items() if rank != spec.rank}
    more = {target: rank / spec.rank for target, rank in wide.items()}
    config = low_rank_config(
        spec,
        ranks,
        rank_pattern=wide,
        # So that alpha / rank, or alpha / sqrt(rank), is what it was.
        alpha_pattern={
            target: spec.alpha * (times**0.5 if spec.rank_stabilized else times)
            for target, times in more.items()
        },
        fan_in_fan_out=not is_llama(model),
    )
    return config, tensors


def _scaled(state: Mapping[str, Tensor], model: Decoder) -> tuple[IA3Config, dict[str, Tensor]]:
    """Returns PEFT's configuration and its tensors; of a joined layer what has no scale has one."""
    tensors: dict[str, Tensor] = {}
    inputs: set[str] = set()
    for piece in pieces(model):
        scales = [state.get(f"{_module(name)}.ia3_l.{DEFAULT}") for name in piece.ours]
        if all(scale is None for scale in scales) or not piece.theirs.endswith(".weight"):
            continue
        theirs = _module(piece.theirs)
        held = [
            torch.ones(len(state[name]), 1) if scale is None else scale
            for name, scale in zip(piece.ours, scales, strict=True)
        ]
        tensors[f"{theirs}.ia3_l"] = torch.cat(held)
        if len(held[0]) == 1:
            inputs.add(_short(theirs))
    config = IA3Config(
        target_modules=sorted({_short(_module(name)) for name in tensors}),
        feedforward_modules=sorted(inputs),
        fan_in_fan_out=not is_llama(model),
    )
    return config, tensors


def _whole(state: Mapping[str, Tensor], spec: Adapter, model: Decoder) -> dict[str, Tensor]:
    """Returns the tensors of modules that are trained themselves; a tied head has the embedding."""
    trained, tensors = spec.whole(model), {}
    for piece in pieces(model):
        if any(module_of(name) in trained for name in piece.ours):
            tensor = torch.cat([state[name] for name in piece.ours])
            tensors[piece.theirs] = (tensor.T if piece.transposed else tensor).contiguous()
            if piece.ours[0] in model.tied_weights:
                tensors["lm_head.weight"] = tensor.clone()
    return tensors


def _joined(piece: Piece, state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Returns A and B of a tensor of theirs: A's below each other, B's along the diagonal."""
    adapted = [name for name in piece.ours if product_of(name, "A") in state]
    rows = [state[name].shape[0] for name in piece.ours]
    down = torch.cat([state[product_of(name, "A")] for name in adapted])
    up = torch.zeros(sum(rows), rank * len(adapted), dtype=down.dtype)
    for place, name in enumerate(adapted):
        index = piece.ours.index(name)
        top, left = sum(rows[:index]), rank * place
        up[top : top + rows[index], left : left + rank] = state[product_of(name, "B")]
    return {"A": down, "B": up}


def _magnitudes(piece: Piece, state: Mapping[str, Tensor]) -> Tensor:
    """Returns those of a tensor of theirs: rows that nothing is added to keep their norms."""
    held = [
        state.get(
            f"{_module(name)}.lora_magnitude_vector.{DEFAULT}.weight",
            torch.linalg.vector_norm(state[name].float(), dim=1).to(state[name].dtype),
        )
        for name in piece.ours
    ]
    return torch.cat(held)


def _short(theirs: str) -> str:
    """Returns what is enough of a module's name: ``self_attn.q_proj``."""
    return ".".join(theirs.split(".")[-2:])


def _module(name: str) -> str:
    return name.rpartition(".")[0]
