"""Conversion of decoder weights from and to Hugging Face state dicts, as safetensors.

A ``DecoderConfig`` is convertible if it has the architecture of a family in ``hf_families.py``. No
pickle file is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalewise.errors import CheckpointError, ConfigIssue
from scalewise.models import build, init, safetensors_files
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.hf_config_check import declares_own_head
from scalewise.models.decoder.hf_config_json import write_config
from scalewise.models.decoder.hf_families import find_family
from scalewise.models.decoder.model import DecoderModule
from scalewise.models.safetensors_files import SINGLE, SafetensorsFiles, weight_files

KEY = "model.weights"
WEIGHTS_FIX = "save the model with safetensors and set model.weights to its folder"

BUFFERS = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias"),
)
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
    expert: int | None = None
    """Index of the expert whose rows of the parameter it has; None: all rows."""
    row_order: tuple[int, ...] | None = None
    """For each row of the tensor, that of the concatenated parameters; None: the same one."""

    @property
    def memory_name(self) -> str:
        """Name in a model of transformers 5, which renames the head of GPT-NeoX when it loads."""
        return re.sub(r"^embed_out\b", "lm_head", self.hf_name)

    def interleave_rows(self, tensor: Tensor) -> Tensor:
        """Return concatenated parameters in the order of the rows of the Hugging Face tensor."""
        return tensor if self.row_order is None else tensor[list(self.row_order)]

    def group_rows(self, tensor: Tensor) -> Tensor:
        """Return a Hugging Face tensor with the rows of each parameter next to each other."""
        if self.row_order is None:
            return tensor
        return tensor[torch.tensor(self.row_order, device="cpu").argsort()]


def _row_order(spec: DecoderConfig, names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the row order of joined projections whose rows are next to each other by head.

    DeepSeek rotates adjacent features, and the decoder those half of the features apart.
    """
    modules = [name.rsplit(".", 1)[0].split(".", 2)[-1] for name in names]
    if len(names) == 1:
        return None
    rows = {name: out for name, out, _ in spec.attention_linears}
    heads = 1 if "attention.key_rope" in modules else spec.heads
    order: list[list[int]] = [[] for _ in range(heads)]
    start = 0
    for module in modules:
        size = rows[module] // heads
        features = [*range(size)]
        if module.endswith("_rope"):
            features = [it for pair in range(size // 2) for it in (pair, pair + size // 2)]
        for head in range(heads):
            order[head] += [start + head * size + feature for feature in features]
        start += rows[module]
    return tuple(row for head_rows in order for row in head_rows)


def iter_tensor_mappings(spec: DecoderConfig) -> Iterator[TensorMapping]:
    """Yield the tensors of the Hugging Face model; raises ``ConfigError`` as ``find_family``."""
    family = find_family(spec)
    hf_modules = family.module_names(spec)
    names: dict[str, list[str]] = {}
    experts: list[TensorMapping] = []
    for weight in spec.weight_census():
        module, kind = weight.name.rsplit(".", 1)
        if module == "head":
            hf_module = "score" if spec.classes else family.head
        elif weight.layer is None:
            hf_module = hf_modules[module]
        else:
            hf_module = f"{family.blocks}.{weight.layer}.{hf_modules[module.split('.', 2)[2]]}"
        if weight.role == "experts":
            hf_name = f"{hf_module}.{kind}"
            experts += [
                TensorMapping(hf_name.format(expert=index), (weight.name,), expert=index)
                for index in range(spec.routed_experts)
            ]
            continue
        names.setdefault(f"{hf_module}.{kind}", []).append(weight.name)
    for hf_name, concatenated in names.items():
        is_linear = hf_name.endswith(".weight") and (".attn." in hf_name or ".mlp." in hf_name)
        order = _row_order(spec, concatenated) if family.interleaves_heads else None
        transposed = family.has_conv1d and is_linear
        yield TensorMapping(hf_name, tuple(concatenated), transposed, row_order=order)
    yield from experts


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
    parts = _collect_parts(tensors, spec, source)
    return {name: _concatenate(tensors) for name, tensors in parts.items()}


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Return the rows of all tensors; one tensor is not copied."""
    return torch.cat([*tensors]) if len(tensors) > 1 else tensors[0]


def _collect_parts(
    tensors: Mapping[str, Tensor], spec: DecoderConfig, source: object
) -> dict[str, list[Tensor]]:
    """Return the tensors whose concatenation is each parameter: one, or one per expert."""
    head_module = find_family(spec).head
    unexpected = {
        re.sub(r"^lm_head\b", head_module, strip_prefix(name)): tensor
        for name, tensor in tensors.items()
        if not name.endswith(BUFFERS)
    }
    shapes = {weight.name: weight.shape for weight in spec.weight_census()}
    parts: dict[str, list[Tensor]] = {}
    missing, misshapen = [], []
    for mapping in iter_tensor_mappings(spec):
        tensor = unexpected.pop(strip_prefix(mapping.hf_name), None)
        if tensor is None:
            missing.append(mapping.hf_name)
            continue
        if mapping.transposed and tensor.ndim == 2:
            tensor = tensor.T
        num_experts = 1 if mapping.expert is None else spec.routed_experts
        sizes = [shapes[name][0] // num_experts for name in mapping.names]
        expected = (sum(sizes), *shapes[mapping.names[0]][1:])
        if tuple(tensor.shape) == expected:
            grouped = torch.split(mapping.group_rows(tensor), sizes)
            for name, part in zip(mapping.names, grouped, strict=True):
                parts.setdefault(name, []).append(part)
        else:
            misshapen.append(f"{mapping.hf_name} {tuple(tensor.shape)}, not {expected}")
    if spec.classes:  # a new head replaces the head of a language model
        for kind in ("weight", "bias"):
            unexpected.pop(f"{head_module}.{kind}", None)
        missing = [name for name in missing if name != "score.weight"]
    head_name = f"{head_module}.weight"
    head = unexpected.pop(head_name, None) if spec.tied else None
    embedding = parts.get("embedding.weight")
    is_untied = head is not None and embedding and not torch.equal(head, embedding[0])

    use_other = "set model=NAME of the checkpoint's architecture"
    untie, tie = "set model.tied=false", "set model.tied=true"
    if missing == [head_name] and declares_own_head(Path(str(source))):
        tie = "use the weights of the language model: these are of its base model, without a head"
    problems = (
        ("has no tensor", missing, tie if missing == [head_name] else use_other),
        ("has a tensor that the model does not have:", list(unexpected), use_other),
        ("has a tensor of another shape:", misshapen, use_other),
        (
            "has a head that differs from the embedding:",
            [head_name] * bool(is_untied),
            untie,
        ),
    )
    issues = [
        ConfigIssue(KEY, source, f"{reason} {names[0]}" + _other_tensors(names), fix)
        for reason, names, fix in problems
        if names
    ]
    if issues:
        raise CheckpointError(issues)
    return parts


def strip_prefix(name: str) -> str:
    """Return a Hugging Face name without the prefix of the model class."""
    return name.removeprefix("model.").removeprefix("transformer.").removeprefix("gpt_neox.")


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
        tensor = mapping.interleave_rows(_concatenate(sources))
        if mapping.expert is not None:  # a copy: tensors of a file cannot share memory
            tensor = tensor.unflatten(0, (spec.routed_experts, -1))[mapping.expert].clone()
        tensors[mapping.hf_name] = (tensor.T if mapping.transposed else tensor).contiguous()
    return tensors, write_config(find_family(spec), spec)


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
    files = SafetensorsFiles(_weight_files(Path(path)), KEY, path)
    tensors = {name: files.read(name) for name in files.names}
    # Matrices of experts are concatenated one at a time, and not kept.
    parts = _collect_parts(tensors, module.spec, path)
    for name, parameter in module.base_parameters():
        if name in parts:
            init.copy_into(parameter, _concatenate(parts[name]))
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
