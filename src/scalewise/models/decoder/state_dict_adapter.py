"""A decoder's weights under Hugging Face's names, both ways, as safetensors. Nothing is unpickled.

Two of the shapes that a ``Decoder`` can take have a home there: Llama (RMSNorm, rotary positions,
SwiGLU, no biases) and GPT-2 (LayerNorm, learned positions, GELU, biases, one head width).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalewise.errors import CheckpointError, ConfigError, ConfigIssue
from scalewise.models import init, safetensors_files
from scalewise.models.decoder.config import (
    LLAMA_SHAPE,
    ActivationKind,
    DecoderConfig,
    NormKind,
    PositionKind,
)
from scalewise.models.decoder.model import DecoderModule
from scalewise.models.safetensors_files import SINGLE, SafetensorsFiles, weight_files

KEY = "model.weights"
CURE = "save the model with safetensors and give its folder"

LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}
LLAMA = {"embedding": "embed_tokens", "norm": "norm"}
GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}
GPT2 = {"embedding": "wte", "position": "wpe", "norm": "ln_f"}
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Endings of tensors that old checkpoints carry and that are no weights."""


@dataclass(frozen=True)
class TensorMapping:
    """A Hugging Face tensor and those of ours that it holds, one after the other.

    ``transposed``: theirs is (features in, features out), GPT-2's ``Conv1D``.
    """

    hf_name: str
    names: tuple[str, ...]
    transposed: bool = False


def is_llama_shape(spec: DecoderConfig) -> bool:
    """Returns True for the Llama shape, False for GPT-2's; raises ``ConfigError`` for neither.

    The refusal names what keeps the spec from the shape that its position encoding belongs to.
    """
    llama = spec.position is PositionKind.rope
    if llama:
        wanted = dict(LLAMA_SHAPE)
        have = {name: getattr(spec, name) for name in wanted}
    else:
        wanted = {"norm": NormKind.layernorm, "activation": ActivationKind.gelu, "bias": True}
        wanted |= {"kv_heads": spec.heads, "head_width": spec.width // spec.heads}
        have = {name: getattr(spec, name) for name in wanted}
        have |= {"kv_heads": spec.key_heads, "head_width": spec.head_size}
    shape = "Llama" if llama else "GPT-2"
    issues = [
        ConfigIssue(
            f"model.{name}",
            have[name],
            f"Hugging Face's {shape} has no such model with position={spec.position}",
            f"model.{name}={str(value).lower()}",
        )
        for name, value in wanted.items()
        if have[name] != value
    ]
    if issues:
        raise ConfigError(issues)
    return llama


def iter_tensor_mappings(spec: DecoderConfig) -> Iterator[TensorMapping]:
    """Yields the tensors of the Hugging Face model; raises ``ConfigError`` where it has none."""
    llama = is_llama_shape(spec)
    body, stem = ("model.", "model.layers") if llama else ("transformer.", "transformer.h")
    outside, inside = (LLAMA, LLAMA_BLOCK) if llama else (GPT2, GPT2_BLOCK)
    held: dict[str, list[str]] = {}
    for weight in spec.weight_census():
        module, kind = weight.name.rsplit(".", 1)
        if module == "head":
            theirs = "score" if spec.classes else "lm_head"
        elif weight.layer is None:
            theirs = body + outside[module]
        else:
            theirs = f"{stem}.{weight.layer}.{inside[module.split('.', 2)[2]]}"
        held.setdefault(f"{theirs}.{kind}", []).append(weight.name)
    for name, ours in held.items():
        conv1d = not llama and name.endswith(".weight") and (".attn." in name or ".mlp." in name)
        yield TensorMapping(name, tuple(ours), conv1d)


def from_hf_state_dict(
    tensors: Mapping[str, Tensor], spec: DecoderConfig, source: object = "checkpoint"
) -> dict[str, Tensor]:
    """Returns a state dict of the module from tensors named as Hugging Face names them.

    One of classes lacks its head where there is none, as in a language model to start from.
    Names with and without ``model.`` or ``transformer.`` in front are known. Raises
    ``CheckpointError`` naming ``source`` and what is missing, left over or of another shape, and
    ``ConfigError`` for a spec that Hugging Face has no shape for.
    """
    rest = {
        strip_prefix(name): tensor for name, tensor in tensors.items() if not name.endswith(BUFFERS)
    }
    shapes = {weight.name: weight.shape for weight in spec.weight_census()}
    state: dict[str, Tensor] = {}
    missing, misshapen = [], []
    for piece in iter_tensor_mappings(spec):
        tensor = rest.pop(strip_prefix(piece.hf_name), None)
        if tensor is None:
            missing.append(piece.hf_name)
            continue
        if piece.transposed and tensor.ndim == 2:
            tensor = tensor.T
        rows = [shapes[name][0] for name in piece.names]
        want = (sum(rows), *shapes[piece.names[0]][1:])
        if tuple(tensor.shape) == want:
            state |= zip(piece.names, torch.split(tensor, rows), strict=True)
        else:
            misshapen.append(f"{piece.hf_name} {tuple(tensor.shape)} where the model has {want}")
    if spec.classes:  # a head of tokens gives way to a new one
        rest.pop("lm_head.weight", None)
        missing = [name for name in missing if name != "score.weight"]
    head = rest.pop("lm_head.weight", None) if spec.tied else None
    embedding = state.get("embedding.weight")
    other = head is not None and embedding is not None and not torch.equal(head, embedding)

    shape = "model=NAME of the checkpoint's shape"
    found = (
        ("lacks", missing, "model.tied=true" if missing == ["lm_head.weight"] else shape),
        ("holds what the model lacks:", list(rest), shape),
        ("holds", misshapen, shape),
        ("has a head that is not its embedding:", ["lm_head.weight"] * other, "model.tied=false"),
    )
    issues = [
        ConfigIssue(KEY, source, f"{reason} {names[0]}" + _other_tensors(names), fix)
        for reason, names, fix in found
        if names
    ]
    if issues:
        raise CheckpointError(issues)
    return state


def strip_prefix(name: str) -> str:
    """Returns a Hugging Face name without what only some of its models have in front."""
    return name.removeprefix("model.").removeprefix("transformer.")


def _other_tensors(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def to_hf_state_dict(
    state: Mapping[str, Tensor], spec: DecoderConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors under Hugging Face's names, contiguous, and the ``config.json``.

    ``state`` holds whole tensors, not shards. Raises ``ConfigError`` for a spec that Hugging Face
    has no shape for.
    """
    tensors = {}
    for piece in iter_tensor_mappings(spec):
        held = [state[name].detach() for name in piece.names]
        tensor = torch.cat(held) if len(held) > 1 else held[0]  # no second copy of a large model
        tensors[piece.hf_name] = (tensor.T if piece.transposed else tensor).contiguous()
    return tensors, _llama_config(spec) if is_llama_shape(spec) else _gpt2_config(spec)


def _llama_config(spec: DecoderConfig) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": spec.rope_factor,
        "low_freq_factor": spec.rope_low_frequency,
        "high_freq_factor": spec.rope_high_frequency,
        "original_max_position_embeddings": spec.rope_original_context,
    }
    return {
        "architectures": ["LlamaForSequenceClassification" if spec.classes else "LlamaForCausalLM"],
        **_labels(spec),
        "model_type": "llama",
        "vocab_size": spec.vocabulary,
        "max_position_embeddings": spec.context,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.key_heads,
        "head_dim": spec.head_size,
        "intermediate_size": spec.feedforward,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling if spec.rope_scaling else None,
        "attention_dropout": spec.dropout,
        "initializer_range": spec.initial_std,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gpt2_config(spec: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2ForSequenceClassification" if spec.classes else "GPT2LMHeadModel"],
        **_labels(spec),
        "model_type": "gpt2",
        "vocab_size": spec.vocabulary,
        "n_positions": spec.context,
        "n_embd": spec.width,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.feedforward,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": spec.norm_epsilon,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attn_pdrop": spec.dropout,
        "initializer_range": spec.initial_std,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _labels(spec: DecoderConfig) -> dict[str, Any]:
    """Returns what transformers calls the classes of a head that tells some apart."""
    names = {str(number): f"LABEL_{number}" for number in range(spec.classes or 0)}
    return {"id2label": names, "label2id": {n: int(i) for i, n in names.items()}} if names else {}


def load_state_dict(path: str | Path, spec: DecoderConfig) -> dict[str, Tensor]:
    """Returns a state dict on the host from a .safetensors file, or a folder of one or of shards.

    Tensors keep the file's dtype, and are mapped from it: none takes memory before it is copied.
    Raises ``CheckpointError`` for files that are missing, truncated or of another model.
    """
    files = SafetensorsFiles(_weight_files(Path(path)), KEY, path)
    return from_hf_state_dict({name: files.read(name) for name in files.names}, spec, path)


def _weight_files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if not path.is_dir():
        reason = "is neither a .safetensors file nor a folder"
        raise CheckpointError.for_key(KEY, path, reason, CURE)
    return weight_files(path, KEY, path, CURE)


def load_into(module: DecoderModule, path: str | Path, seed: int) -> None:
    """Gives a materialized module, sharded or not, the weights of ``path``, as ``load`` does.

    They take the module's dtype. A head of classes that is not there is drawn from ``seed``.
    """
    module.init_buffers()
    state = load_state_dict(path, module.spec)
    for name, parameter in module.base_parameters():
        if name in state:
            init.copy_into(parameter, state[name])
        else:
            init.init_normal(name, parameter, seed, module.spec.initial_std)


def export_folder(state: Mapping[str, Tensor], spec: DecoderConfig, folder: str | Path) -> None:
    """Writes a folder that transformers loads, ``AutoModelForCausalLM`` or, of classes, its like.

    ``state`` holds whole tensors and gives the dtype. Raises ``ConfigError`` for a spec that
    Hugging Face has no shape for, before anything is written.
    """
    save_folder(*to_hf_state_dict(state, spec), Path(folder))


def save_folder(tensors: dict[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Writes tensors under Hugging Face's names and their ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors_files.save_tensors(tensors, folder / SINGLE)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
