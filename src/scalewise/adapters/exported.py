"""A low-rank adapter alone, as PEFT keeps it: ``PeftModel.from_pretrained`` loads the folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from scalewise.adapters.lora import DEFAULT
from scalewise.adapters.low_rank import Lora
from scalewise.models.decoder.spec import Decoder
from scalewise.models.decoder.weights import Piece, is_llama, pieces


def export(
    state: Mapping[str, Tensor], spec: Lora, model: Decoder, folder: Path, base: str
) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``state`` holds whole tensors; ``base`` is where the model lies that the adapter belongs to.
    Layers of ours that Hugging Face keeps as one (GPT-2's queries, keys and values) become one
    product of as many times the rank. Raises ``ConfigError`` for a model that has no home there.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for piece in pieces(model):
        adapted = [_module(name) for name in piece.ours if _of(name, "A") in state]
        if not adapted:
            continue
        theirs = _module(piece.theirs)
        for part, tensor in _joined(piece, state, spec.rank).items():
            tensors[f"base_model.model.{theirs}.lora_{part}.weight"] = tensor
        ranks[".".join(theirs.split(".")[-2:])] = spec.rank * len(adapted)
    wide = {target: rank for target, rank in ranks.items() if rank != spec.rank}
    more = {target: rank / spec.rank for target, rank in wide.items()}
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=cast(int, spec.alpha),  # any number will do
        lora_dropout=spec.dropout,
        use_rslora=spec.rank_stabilized,
        target_modules=sorted(ranks),
        rank_pattern=wide,
        # So that alpha / rank, or alpha / sqrt(rank), is what it was.
        alpha_pattern={
            target: spec.alpha * (times**0.5 if spec.rank_stabilized else times)
            for target, times in more.items()
        },
        fan_in_fan_out=not is_llama(model),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _joined(piece: Piece, state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Returns A and B of a tensor of theirs: A's below each other, B's along the diagonal."""
    adapted = [name for name in piece.ours if _of(name, "A") in state]
    rows = [state[name].shape[0] for name in piece.ours]
    down = torch.cat([state[_of(name, "A")] for name in adapted])
    up = torch.zeros(sum(rows), rank * len(adapted), dtype=down.dtype)
    for place, name in enumerate(adapted):
        index = piece.ours.index(name)
        top, left = sum(rows[:index]), rank * place
        up[top : top + rows[index], left : left + rank] = state[_of(name, "B")]
    return {"A": down, "B": up}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _of(name: str, part: str) -> str:
    return f"{_module(name)}.lora_{part}.{DEFAULT}.weight"
