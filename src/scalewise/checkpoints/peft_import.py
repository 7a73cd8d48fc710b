"""Import of an adapter in PEFT's format. Pickle files are not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isclose, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalewise.adapters import target_modules
from scalewise.adapters.config import AdapterConfig, weight_census
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_config import (
    DoRAAdapterConfig,
    LoRAAdapterConfig,
    PiSSAAdapterConfig,
    RSLoRAAdapterConfig,
)
from scalewise.adapters.prompt_config import (
    PREFIX_NAMES,
    PROMPT_NAME,
    PrefixAdapterConfig,
    PromptAdapterConfig,
)
from scalewise.errors import CheckpointError, ConfigIssue
from scalewise.models.base import ModelConfig
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.state_dict_adapter import (
    TensorMapping,
    iter_tensor_mappings,
    strip_prefix,
)
from scalewise.models.safetensors_files import DOWNLOAD_AGAIN, SafetensorsFiles
from scalewise.run_files import read_json

KEY = "adapter.resume"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROMPT = "prompt_embeddings"
HEAD, EMBEDDING = "lm_head.weight", "embedding.weight"
PARTS = {
    "lora_A.default.weight": "lora_A.weight",
    "lora_B.default.weight": "lora_B.weight",
    "lora_magnitude_vector.default.weight": "lora_magnitude_vector",
    "ia3_l.default": "ia3_l",
}
"""Suffixes of added parameters: in PEFT's modules -> in PEFT's files."""


class PeftFolder:
    """Folder with ``adapter_config.json`` and its tensors, for a decoder model.

    Raises ``ConfigError`` if a file is missing or invalid.
    """

    def __init__(self, path: Path, model: ModelConfig) -> None:
        assert isinstance(model, DecoderConfig)
        self.path, self.model = path, model
        self.config: dict[str, Any] = dict(read_json(path / CONFIG))
        if not self.config:
            reason = f"{CONFIG} is truncated or not a JSON object"
            raise CheckpointError.for_key(KEY, path, reason, DOWNLOAD_AGAIN)
        if not (path / WEIGHTS).is_file():
            fix = "save it with safe_serialization=True"
            raise CheckpointError.for_key(KEY, path, f"has no {WEIGHTS}; pickles are not read", fix)
        self.file = SafetensorsFiles([path / WEIGHTS], KEY, path)
        self.names = {
            strip_prefix(name.removeprefix("base_model.model.")): name for name in self.file.names
        }
        self.tensor_mappings: dict[str, TensorMapping] = {}
        self.expert_mappings: dict[str, list[TensorMapping]] = {}
        for mapping in iter_tensor_mappings(model):
            self.tensor_mappings |= dict.fromkeys(mapping.names, mapping)
            if mapping.expert is not None:
                self.expert_mappings.setdefault(mapping.names[0], []).append(mapping)
        self.row_counts = {weight.name: weight.shape[0] for weight in model.weight_census()}
        self.layers = {
            weight.name: target_modules.layer_name(weight) for weight in model.weight_census()
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor in the file, by its name without prefix; None if it is missing."""
        file_name = self.names.get(name)
        return None if file_name is None else self.file.shape(file_name)

    def read(self, name: str) -> Tensor:
        """Tensor of the file; raises ``CheckpointError`` if it is missing."""
        if name not in self.names:
            reason = f"lacks {name}"
            raise CheckpointError.for_key(
                KEY, self.path, reason, "set the model that it belongs to"
            )
        return self.file.read(self.names[name])

    def has_tied_head(self, embedding: Tensor) -> bool:
        """Whether the head is the trained ``embedding``."""
        if HEAD not in self.names:
            return bool(self.config.get("ensure_weight_tying"))
        return torch.equal(self.read(HEAD), embedding)

    def locate_weight(self, name: str) -> tuple[str, str, list[str]]:
        """Base weight of a trained weight, suffix of the added part, and names in the file.

        There is one name, or one per expert.
        """
        if name == PROMPT_NAME or target_modules.module_name(name) in PREFIX_NAMES:
            return name, "", [PROMPT]
        suffix = next((part for part in PARTS if name.endswith(f".{part}")), "")
        base_name = f"{name.removesuffix(suffix)}weight" if suffix else name
        mappings = self.expert_mappings.get(base_name, [self.tensor_mappings[base_name]])
        hf_names = [strip_prefix(mapping.memory_name) for mapping in mappings]
        if suffix:
            hf_names = [f"{it.removesuffix('weight')}{PARTS[suffix]}" for it in hf_names]
        return base_name, suffix, hf_names

    def read_weight(self, name: str, adapted_weights: list[str]) -> Tensor:
        """Trained weight by name.

        ``adapted_weights``: adapted matrices that Hugging Face joins in one. These share A, or each
        has rows of its own.
        """
        base_name, suffix, file_names = self.locate_weight(name)
        if len(file_names) > 1:
            return torch.cat([self.read(file_name) for file_name in file_names])
        tensor = self.read(file_names[0])
        if name == PROMPT_NAME:
            return tensor
        if target_modules.module_name(name) in PREFIX_NAMES:
            width, layer = self.model.kv_width, int(name.split(".")[1])
            first = width * (2 * layer + PREFIX_NAMES.index(target_modules.module_name(name)))
            return tensor[:, first : first + width]
        mapping = self.tensor_mappings[base_name]
        if not suffix and mapping.transposed and tensor.ndim == 2:
            tensor = tensor.T
        if len(mapping.names) == 1:
            return tensor
        if len(tensor) == sum(self.row_counts[joined_name] for joined_name in mapping.names):
            tensor = mapping.group_rows(tensor)
        row_counts = [self.row_counts[joined_name] for joined_name in mapping.names]
        top = sum(row_counts[: mapping.names.index(base_name)])
        rows = slice(top, top + self.row_counts[base_name])
        rank, number = int(self.config.get("r", 0)), adapted_weights.index(base_name)
        columns = slice(number * rank, (number + 1) * rank)
        if suffix.startswith("lora_A"):
            return tensor if len(tensor) == rank else tensor[columns]
        if suffix.startswith("lora_B"):
            return tensor[rows] if tensor.shape[1] == rank else tensor[rows, columns]
        return tensor if suffix.startswith("ia3") and len(tensor) == 1 else tensor[rows]


def infer_config(path: Path, model: ModelConfig, current_adapter: AdapterConfig) -> AdapterConfig:
    """Config of the adapter in a PEFT folder.

    Of layers that Hugging Face joins in one, those in ``current_adapter`` count as adapted. Raises
    ``CheckpointError`` for kinds of adapters that are not supported.
    """
    folder = PeftFolder(path, model)
    config = folder.config
    if parameters := config.get("target_parameters"):
        reason = f"adapts stacked parameters, {sorted(parameters)[0]}, not the layers of experts"
        fix = "give an adapter with target_modules, as of transformers 4"
        raise CheckpointError.for_key(KEY, path, reason, fix)
    targets = tuple(dict.fromkeys(_iter_targets(folder, current_adapter)))
    trained = tuple(dict.fromkeys(_iter_trained_modules(folder, current_adapter)))
    virtual_class = {
        "PROMPT_TUNING": PromptAdapterConfig,
        "PREFIX_TUNING": PrefixAdapterConfig,
    }.get(str(config.get("peft_type")))
    if virtual_class is not None and (prompt_shape := folder.shape(PROMPT)):
        return virtual_class(tokens=prompt_shape[0])
    if config.get("peft_type") == "IA3":
        return IA3AdapterConfig(targets=targets, trained=trained)
    init_method = config.get("init_lora_weights")
    is_plain = init_method in (True, False, None, "gaussian", "orthogonal", "eva")
    classes: dict[tuple[bool, bool, bool], type[LoRAAdapterConfig]] = {
        (False, False, False): LoRAAdapterConfig,
        (True, False, False): RSLoRAAdapterConfig,
        (False, True, False): DoRAAdapterConfig,
        (False, False, True): PiSSAAdapterConfig,
    }
    is_pissa = str(init_method).startswith("pissa")
    flags = (bool(config.get("use_rslora")), bool(config.get("use_dora")), is_pissa)
    adapter_class = classes.get(flags) if is_plain or is_pissa else None
    if (
        config.get("peft_type") != "LORA"
        or adapter_class is None
        or config.get("alora_invocation_tokens")
    ):
        config_text = f"peft_type={config.get('peft_type')}, init_lora_weights={init_method}"
        reason = f"is of a kind that is not supported: {config_text}"
        raise CheckpointError.for_key(
            KEY, path, reason, "choose LoRA, rsLoRA, DoRA, PiSSA, IA3, prompt or prefix tuning"
        )
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        adapter = adapter_class(rank=rank, alpha=alpha, targets=targets, trained=trained)
        lora_names = [name for name in folder.names if name.endswith(".lora_A.weight")]
        deviating = next(
            (it for it in lora_names if not _has_uniform_scale(folder, adapter, it)), None
        )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        reason = f"{CONFIG} has an invalid r, lora_alpha or alpha_pattern ({type(error).__name__})"
        raise CheckpointError.for_key(KEY, path, reason, DOWNLOAD_AGAIN) from error
    if deviating is not None:
        reason = f"{deviating} differs from the other layers in rank or alpha"
        raise CheckpointError.for_key(KEY, path, reason, "give an adapter with one rank and alpha")
    return adapter


def _has_uniform_scale(folder: PeftFolder, adapter: LoRAAdapterConfig, name: str) -> bool:
    """Whether a layer has the scale of ``adapter`` and a multiple of its rank."""
    # Not at import: PEFT imports bitsandbytes, which queries CUDA devices in the forkserver.
    from peft.utils.other import get_pattern_key

    module, config = name.removesuffix(".lora_A.weight"), folder.config
    alpha_pattern = config.get("alpha_pattern") or {}
    alpha = float(alpha_pattern.get(get_pattern_key([*alpha_pattern], module), adapter.alpha))
    (rank, _) = folder.shape(name) or (0, 0)
    scale = alpha / (sqrt(rank) if adapter.rank_stabilized else rank)
    return rank % adapter.rank == 0 and isclose(scale, adapter.scale)


def _iter_targets(folder: PeftFolder, current_adapter: AdapterConfig) -> Iterator[str]:
    """Layers, by name within a block, with added weights in the file."""
    listed = {
        *current_adapter.adapted_layers(folder.model),
        *current_adapter.scaled_layers(folder.model),
    }
    for mapping in dict.fromkeys(folder.tensor_mappings.values()):
        prefix = strip_prefix(mapping.memory_name).removesuffix("weight")
        if any(f"{prefix}{part}" in folder.names for part in PARTS.values()):
            layers = [folder.layers[name] for name in mapping.names]
            yield from [layer for layer in layers if layer in listed] or layers


def _iter_trained_modules(folder: PeftFolder, current_adapter: AdapterConfig) -> Iterator[str]:
    """Modules whose own weights are in the file."""
    listed = current_adapter.fully_trained_modules(folder.model)
    for mapping in dict.fromkeys(folder.tensor_mappings.values()):
        if strip_prefix(mapping.memory_name) in folder.names:
            modules = [target_modules.module_name(name) for name in mapping.names]
            yield from [module for module in modules if module in listed] or modules


def load_tensors(path: Path, names: Iterable[str], model: ModelConfig) -> dict[str, Tensor]:
    """Unsharded tensors by name; raises ``ConfigError`` if one is missing or invalid."""
    folder, requested = PeftFolder(path, model), list(names)
    matrices = {folder.locate_weight(name)[0] for name in requested}

    def adapted_weights(name: str) -> list[str]:
        mapping: TensorMapping | None = folder.tensor_mappings.get(folder.locate_weight(name)[0])
        return (
            []
            if mapping is None
            else [joined_name for joined_name in mapping.names if joined_name in matrices]
        )

    return {name: folder.read_weight(name, adapted_weights(name)) for name in requested}


def shape_issues(
    path: Path, current_adapter: AdapterConfig, model: ModelConfig
) -> Iterator[ConfigIssue]:
    """Yield issues with shapes that differ from ``current_adapter``, and with unused tensors."""
    expected_shapes = {
        weight.name: weight.shape
        for weight in weight_census(current_adapter, model)
        if weight.trainable
    }
    folder, fix = PeftFolder(path, model), "set the model that it belongs to"
    tensors, used_names = load_tensors(path, expected_shapes, model), set()
    for name, shape in expected_shapes.items():
        used_names.update(folder.locate_weight(name)[2])
        if tuple(tensors[name].shape) != shape:
            reason = f"{name} is {tuple(tensors[name].shape)}, the model has {shape}"
            yield ConfigIssue(KEY, path, reason, fix)
            return
    if folder.model.tied and HEAD in folder.names:
        used_names.add(HEAD)
    if (
        folder.model.tied
        and tensors.get(EMBEDDING) is not None
        and not folder.has_tied_head(tensors[EMBEDDING])
    ):
        reason = "has a trained embedding without the head that is tied to it"
        yield ConfigIssue(KEY, path, reason, "set model.tied=false")
    if unused := sorted(folder.names.keys() - used_names):
        yield ConfigIssue(KEY, path, f"holds {unused[0]}, which the run does not train", fix)
    counts = Counter[str]()
    for name, tensor in tensors.items():
        _, _, file_names = folder.locate_weight(name)
        if len(file_names) == 1:  # experts share no tensor with others
            counts[file_names[0]] += int(tensor.count_nonzero())
    for file_name, count in counts.items():
        if (
            file_name.endswith("lora_B.weight")
            and int(folder.read(file_name).count_nonzero()) != count
        ):
            reason = f"{file_name} changes layers that adapter.targets does not match"
            yield ConfigIssue(KEY, path, reason, "add them to adapter.targets")
            return
