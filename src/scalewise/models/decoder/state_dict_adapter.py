"""Conversion of decoder weights from and to Hugging Face state dicts, as safetensors.

A ``DecoderConfig`` is convertible if it has the architecture of Llama (RMSNorm, rotary positions,
SwiGLU, no biases) or of GPT-2 (LayerNorm, learned positions, GELU, biases, default head width). No
pickle file is read.
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
from scalewise.models import build, init, safetensors_files
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
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
WEIGHTS_FIX = "save the model with safetensors and set model.weights to its folder"

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
"""Suffixes of buffers in old checkpoints, which are ignored."""


@dataclass(frozen=True)
class TensorMapping:
    """A Hugging Face tensor, and the parameters of the decoder that it concatenates."""

    hf_name: str
    """Name in the Hugging Face state dict."""
    names: tuple[str, ...]
    """Names in the state dict of ``DecoderModule``, in the order of concatenation."""
    transposed: bool = False
    """Whether the tensor is stored as (features in, features out), as in GPT-2's ``Conv1D``."""


def is_llama_shape(spec: DecoderConfig) -> bool:
    """Return True for the architecture of Llama and False for that of GPT-2.

    Raises:
        ConfigError: The decoder has neither architecture. The issues name the fields that differ
            from the architecture with the same position encoding.
    """
    llama = spec.position is PositionKind.rope
    if llama:
        required = dict(LLAMA_SHAPE)
        actual = {name: getattr(spec, name) for name in required}
    else:
        required = {"norm": NormKind.layernorm, "activation": ActivationKind.gelu, "bias": True}
        required |= {"kv_heads": spec.heads, "head_width": spec.width // spec.heads}
        actual = {name: getattr(spec, name) for name in required}
        actual |= {"kv_heads": spec.key_heads, "head_width": spec.head_size}
    architecture = "Llama" if llama else "GPT-2"
    issues = [
        ConfigIssue(
            f"model.{name}",
            actual[name],
            f"is not supported by Hugging Face's {architecture} (model.position={spec.position})",
            f"set model.{name}={str(value).lower()}",
        )
        for name, value in required.items()
        if actual[name] != value
    ]
    if issues:
        raise ConfigError(issues)
    return llama


def iter_tensor_mappings(spec: DecoderConfig) -> Iterator[TensorMapping]:
    """Yield the tensors of the Hugging Face model; raises ``ConfigError`` as ``is_llama_shape``."""
    llama = is_llama_shape(spec)
    body, stem = ("model.", "model.layers") if llama else ("transformer.", "transformer.h")
    outer_names, block_names = (LLAMA, LLAMA_BLOCK) if llama else (GPT2, GPT2_BLOCK)
    names: dict[str, list[str]] = {}
    for weight in spec.weight_census():
        module, kind = weight.name.rsplit(".", 1)
        if module == "head":
            hf_module = "score" if spec.classes else "lm_head"
        elif weight.layer is None:
            hf_module = body + outer_names[module]
        else:
            hf_module = f"{stem}.{weight.layer}.{block_names[module.split('.', 2)[2]]}"
        names.setdefault(f"{hf_module}.{kind}", []).append(weight.name)
    for hf_name, concatenated in names.items():
        conv1d = not llama and hf_name.endswith(".weight")
        conv1d &= ".attn." in hf_name or ".mlp." in hf_name
        yield TensorMapping(hf_name, tuple(concatenated), conv1d)


def from_hf_state_dict(
    tensors: Mapping[str, Tensor], spec: DecoderConfig, source: object = "checkpoint"
) -> dict[str, Tensor]:
    """Return a state dict of the decoder from a Hugging Face state dict.

    Names may lack the prefix ``model.`` or ``transformer.``. If the decoder is a classifier, its
    head is optional, so that it can start from a language model.

    Args:
        tensors: Tensors by Hugging Face name.
        spec: Configuration of the decoder.
        source: Path of the checkpoint, for errors.

    Raises:
        CheckpointError: A tensor is missing, unexpected or of another shape.
        ConfigError: Hugging Face has no such architecture.
    """
    unexpected = {
        strip_prefix(name): tensor for name, tensor in tensors.items() if not name.endswith(BUFFERS)
    }
    shapes = {weight.name: weight.shape for weight in spec.weight_census()}
    state: dict[str, Tensor] = {}
    missing, misshapen = [], []
    for mapping in iter_tensor_mappings(spec):
        tensor = unexpected.pop(strip_prefix(mapping.hf_name), None)
        if tensor is None:
            missing.append(mapping.hf_name)
            continue
        if mapping.transposed and tensor.ndim == 2:
            tensor = tensor.T
        sizes = [shapes[name][0] for name in mapping.names]
        expected = (sum(sizes), *shapes[mapping.names[0]][1:])
        if tuple(tensor.shape) == expected:
            state |= zip(mapping.names, torch.split(tensor, sizes), strict=True)
        else:
            misshapen.append(f"{mapping.hf_name} {tuple(tensor.shape)}, not {expected}")
    if spec.classes:  # a new head replaces the head of a language model
        unexpected.pop("lm_head.weight", None)
        missing = [name for name in missing if name != "score.weight"]
    head = unexpected.pop("lm_head.weight", None) if spec.tied else None
    embedding = state.get("embedding.weight")
    is_untied = head is not None and embedding is not None and not torch.equal(head, embedding)

    use_other = "set model=NAME of the checkpoint's architecture"
    untie, tie = "set model.tied=false", "set model.tied=true"
    problems = (
        ("has no tensor", missing, tie if missing == ["lm_head.weight"] else use_other),
        ("has a tensor that the model does not have:", list(unexpected), use_other),
        ("has a tensor of another shape:", misshapen, use_other),
        ("has a head that differs from the embedding:", ["lm_head.weight"] * is_untied, untie),
    )
    issues = [
        ConfigIssue(KEY, source, f"{reason} {names[0]}" + _other_tensors(names), fix)
        for reason, names, fix in problems
        if names
    ]
    if issues:
        raise CheckpointError(issues)
    return state


def strip_prefix(name: str) -> str:
    """Return a Hugging Face name without the prefix of the model class."""
    return name.removeprefix("model.").removeprefix("transformer.")


def _other_tensors(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def to_hf_state_dict(
    state: Mapping[str, Tensor], spec: DecoderConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the Hugging Face state dict, with contiguous tensors, and the ``config.json``.

    Args:
        state: Unsharded state dict of the decoder.
        spec: Configuration of the decoder.

    Raises:
        ConfigError: Hugging Face has no such architecture.
    """
    tensors = {}
    for mapping in iter_tensor_mappings(spec):
        sources = [state[name].detach() for name in mapping.names]
        # One source is not copied here, to save memory.
        tensor = torch.cat(sources) if len(sources) > 1 else sources[0]
        tensors[mapping.hf_name] = (tensor.T if mapping.transposed else tensor).contiguous()
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
    """Return transformers' label names of a classification head."""
    names = {str(index): f"LABEL_{index}" for index in range(spec.classes or 0)}
    return {"id2label": names, "label2id": {n: int(i) for i, n in names.items()}} if names else {}


def load_state_dict(path: str | Path, spec: DecoderConfig) -> dict[str, Tensor]:
    """Load a state dict on the CPU from a .safetensors file, or from a folder of such files.

    Tensors keep the dtype of the file and are memory-mapped.

    Raises:
        CheckpointError: A file is missing, truncated or of another model.
    """
    files = SafetensorsFiles(_weight_files(Path(path)), KEY, path)
    return from_hf_state_dict({name: files.read(name) for name in files.names}, spec, path)


def _weight_files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if not path.is_dir():
        reason = "is neither a .safetensors file nor a folder"
        raise CheckpointError.for_key(KEY, path, reason, WEIGHTS_FIX)
    return weight_files(path, KEY, path, WEIGHTS_FIX)


def load_into(module: DecoderModule, path: str | Path, seed: int) -> None:
    """Copy the weights of ``path`` into a materialized module, sharded or not, in its dtype.

    A classification head that the checkpoint does not have is initialized from ``seed``.
    """
    module.init_buffers()
    state = load_state_dict(path, module.spec)
    for name, parameter in module.base_parameters():
        if name in state:
            init.copy_into(parameter, state[name])
        else:
            init.init_normal(name, parameter, seed, module.spec.initial_std)


def export_folder(state: Mapping[str, Tensor], spec: DecoderConfig, folder: str | Path) -> None:
    """Write a folder that the Auto classes of transformers load.

    Args:
        state: Unsharded state dict, whose dtype the files have.
        spec: Configuration of the decoder.
        folder: Folder to write.

    Raises:
        ConfigError: Hugging Face has no such architecture; nothing is written.
    """
    save_folder(*to_hf_state_dict(state, spec), Path(folder))


def save_folder(tensors: dict[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Write a Hugging Face state dict and its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors_files.save_tensors(tensors, folder / SINGLE)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


@build.build_meta.register(DecoderConfig)
def _build_decoder(config: DecoderConfig, stage: StageSlice) -> DecoderModule:
    return DecoderModule(config, stage)


@build.init_weights.register(DecoderConfig)
def _init_or_load(config: DecoderConfig, module: ModelModule, seed: int) -> None:
    assert isinstance(module, DecoderModule)
    if config.weights is None:
        module.init_weights(seed)
    else:
        load_into(module, config.weights, seed)


@build.export_model.register(DecoderConfig)
def _export(config: DecoderConfig, state: Mapping[str, Tensor], folder: Path) -> None:
    export_folder(state, config, folder)
