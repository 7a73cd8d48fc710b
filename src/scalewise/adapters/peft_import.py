"""An adapter as PEFT keeps it, read as if it had been trained here. Nothing is unpickled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isclose, sqrt
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
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
from scalewise.adapters.prompt_tuning import NAME, PREFIX, PrefixAdapterConfig, PromptAdapterConfig
from scalewise.errors import CheckpointError, ConfigIssue
from scalewise.models.base import ModelConfig
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.state_dict_adapter import (
    TensorMapping,
    iter_tensor_mappings,
    strip_prefix,
)
from scalewise.models.safetensors_files import DOWNLOAD_AGAIN, SafetensorsFiles
from scalewise.tracking.run_files import read_json

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
"""How PEFT's module names what is added to a layer, and how its files do."""


class PeftFolder:
    """An ``adapter_config.json`` with its tensors, for a model that has a home at Hugging Face.

    Raises ``ConfigError`` for what cannot be read.
    """

    def __init__(self, path: Path, model: ModelConfig) -> None:
        assert isinstance(model, DecoderConfig)
        self.path, self.model = path, model
        self.config: dict[str, Any] = dict(read_json(path / CONFIG))
        if not self.config:
            reason = f"{CONFIG} is truncated or no JSON object"
            raise CheckpointError.for_key(KEY, path, reason, DOWNLOAD_AGAIN)
        if not (path / WEIGHTS).is_file():
            fix = "save it with safe_serialization=True"
            raise CheckpointError.for_key(KEY, path, f"has no {WEIGHTS}; pickles are not read", fix)
        self.file = SafetensorsFiles([path / WEIGHTS], KEY, path)
        self.names = {
            strip_prefix(name.removeprefix("base_model.model.")): name for name in self.file.names
        }
        self.tensor_mappings = {
            ours: piece for piece in iter_tensor_mappings(model) for ours in piece.names
        }
        self.row_counts = {weight.name: weight.shape[0] for weight in model.weight_census()}
        self.layers = {
            weight.name: target_modules.layer_name(weight) for weight in model.weight_census()
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor in the file, by its bare name; None: it has no such."""
        known = self.names.get(name)
        return None if known is None else self.file.shape(known)

    def read(self, name: str) -> Tensor:
        """Returns a tensor of the file; raises ``CheckpointError`` where there is none."""
        if name not in self.names:
            reason = f"lacks {name}"
            raise CheckpointError.for_key(
                KEY, self.path, reason, "set the model that it belongs to"
            )
        return self.file.read(self.names[name])

    def has_tied_head(self, embedding: Tensor) -> bool:
        """Returns whether the head is an embedding that has been trained."""
        if HEAD not in self.names:
            return bool(self.config.get("ensure_weight_tying"))
        return torch.equal(self.read(HEAD), embedding)

    def locate_weight(self, name: str) -> tuple[str, str, str]:
        """Returns the weight of ours that a trained one belongs to, the part, and its home."""
        if name == NAME or target_modules.module_name(name) in PREFIX:
            return name, "", PROMPT
        if name in self.tensor_mappings:
            return name, "", strip_prefix(self.tensor_mappings[name].hf_name)
        suffix = next(part for part in PARTS if name.endswith(f".{part}"))
        ours = f"{name.removesuffix(suffix)}weight"
        theirs = strip_prefix(self.tensor_mappings[ours].hf_name).removesuffix("weight")
        return ours, suffix, f"{theirs}{PARTS[suffix]}"

    def read_weight(self, name: str, adapted_weights: list[str]) -> Tensor:
        """Returns a trained weight; ``adapted_weights``: our matrices, in one of theirs, that have
        some.

        Of ours that are one matrix there, A is shared, or each has rows of its own.
        """
        ours, suffix, home = self.locate_weight(name)
        found = self.read(home)
        if name == NAME:
            return found
        if target_modules.module_name(name) in PREFIX:
            width, layer = self.model.kv_width, int(name.split(".")[1])
            first = width * (2 * layer + PREFIX.index(target_modules.module_name(name)))
            return found[:, first : first + width]
        piece = self.tensor_mappings[ours]
        if not suffix and piece.transposed and found.ndim == 2:
            found = found.T
        if len(piece.names) == 1:
            return found
        place = [self.row_counts[each] for each in piece.names]
        top = sum(place[: piece.names.index(ours)])
        rows = slice(top, top + self.row_counts[ours])
        rank, number = int(self.config.get("r", 0)), adapted_weights.index(ours)
        columns = slice(number * rank, (number + 1) * rank)
        if suffix.startswith("lora_A"):
            return found if len(found) == rank else found[columns]
        if suffix.startswith("lora_B"):
            return found[rows] if found.shape[1] == rank else found[rows, columns]
        return found if suffix.startswith("ia3") and len(found) == 1 else found[rows]


def infer_config(path: Path, model: ModelConfig, current_adapter: AdapterConfig) -> AdapterConfig:
    """Returns what would have trained an adapter here; raises ``CheckpointError`` for others.

    Where PEFT has one matrix for several of ours, those count as adapted that are in
    ``current_adapter``.
    """
    folder = PeftFolder(path, model)
    config = folder.config
    targets = tuple(dict.fromkeys(_iter_targets(folder, current_adapter)))
    trained = tuple(dict.fromkeys(_iter_trained_modules(folder, current_adapter)))
    virtual = {"PROMPT_TUNING": PromptAdapterConfig, "PREFIX_TUNING": PrefixAdapterConfig}.get(
        str(config.get("peft_type"))
    )
    if virtual is not None and (learnt := folder.shape(PROMPT)):
        return virtual(tokens=learnt[0])
    if config.get("peft_type") == "IA3":
        return IA3AdapterConfig(targets=targets, trained=trained)
    initial = config.get("init_lora_weights")
    plain = initial in (True, False, None, "gaussian", "orthogonal", "eva")
    kinds: dict[tuple[bool, bool, bool], type[LoRAAdapterConfig]] = {
        (False, False, False): LoRAAdapterConfig,
        (True, False, False): RSLoRAAdapterConfig,
        (False, True, False): DoRAAdapterConfig,
        (False, False, True): PiSSAAdapterConfig,
    }
    pissa = str(initial).startswith("pissa")
    flags = (bool(config.get("use_rslora")), bool(config.get("use_dora")), pissa)
    kind = kinds.get(flags) if plain or pissa else None
    if config.get("peft_type") != "LORA" or kind is None or config.get("alora_invocation_tokens"):
        told = f"peft_type={config.get('peft_type')}, init_lora_weights={initial}"
        reason = f"is of a kind that is not trained here: {told}"
        raise CheckpointError.for_key(
            KEY, path, reason, "choose LoRA, rsLoRA, DoRA, PiSSA, IA3, prompt or prefix tuning"
        )
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        found = kind(rank=rank, alpha=alpha, targets=targets, trained=trained)
        products = [name for name in folder.names if name.endswith(".lora_A.weight")]
        other = next((it for it in products if not _has_uniform_scale(folder, found, it)), None)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        reason = f"{CONFIG} has no sound r, lora_alpha or alpha_pattern ({type(error).__name__})"
        raise CheckpointError.for_key(KEY, path, reason, DOWNLOAD_AGAIN) from error
    if other is not None:
        reason = f"{other} has another rank or alpha than the rest"
        raise CheckpointError.for_key(KEY, path, reason, "give one of a single rank and alpha")
    return found


def _has_uniform_scale(folder: PeftFolder, adapter: LoRAAdapterConfig, name: str) -> bool:
    """Returns whether a layer's product has the weight of all others', and their rank or more."""
    module, config = name.removesuffix(".lora_A.weight"), folder.config
    known = config.get("alpha_pattern") or {}
    alpha = float(known.get(get_pattern_key([*known], module), adapter.alpha))
    (rank, _) = folder.shape(name) or (0, 0)
    scale = alpha / (sqrt(rank) if adapter.rank_stabilized else rank)
    return rank % adapter.rank == 0 and isclose(scale, adapter.scale)


def _iter_targets(folder: PeftFolder, current_adapter: AdapterConfig) -> Iterator[str]:
    """Yields our layers, by name within a block, that have something added in the file."""
    listed = {
        *current_adapter.adapted_layers(folder.model),
        *current_adapter.scaled_layers(folder.model),
    }
    for piece in dict.fromkeys(folder.tensor_mappings.values()):
        home = strip_prefix(piece.hf_name).removesuffix("weight")
        if any(f"{home}{part}" in folder.names for part in PARTS.values()):
            within = [folder.layers[ours] for ours in piece.names]
            yield from [layer for layer in within if layer in listed] or within


def _iter_trained_modules(folder: PeftFolder, current_adapter: AdapterConfig) -> Iterator[str]:
    """Yields our modules of which the file holds the weights themselves."""
    listed = current_adapter.fully_trained_modules(folder.model)
    for piece in dict.fromkeys(folder.tensor_mappings.values()):
        if strip_prefix(piece.hf_name) in folder.names:
            within = [target_modules.module_name(ours) for ours in piece.names]
            yield from [module for module in within if module in listed] or within


def load_tensors(path: Path, names: Iterable[str], model: ModelConfig) -> dict[str, Tensor]:
    """Returns whole tensors by our names; raises ``ConfigError`` for what cannot be read."""
    folder, wanted = PeftFolder(path, model), list(names)
    matrices = {folder.locate_weight(name)[0] for name in wanted}

    def adapted(name: str) -> list[str]:
        piece: TensorMapping | None = folder.tensor_mappings.get(folder.locate_weight(name)[0])
        return [] if piece is None else [ours for ours in piece.names if ours in matrices]

    return {name: folder.read_weight(name, adapted(name)) for name in wanted}


def shape_issues(
    path: Path, current_adapter: AdapterConfig, model: ModelConfig
) -> Iterator[ConfigIssue]:
    """Yields what of a folder has another shape than ``current_adapter``, and what has no place in
    it."""
    wanted = {
        weight.name: weight.shape
        for weight in weight_census(current_adapter, model)
        if weight.trainable
    }
    folder, fix = PeftFolder(path, model), "set the model that it belongs to"
    found, homes = load_tensors(path, wanted, model), set()
    for name, shape in wanted.items():
        homes.add(folder.locate_weight(name)[2])
        if tuple(found[name].shape) != shape:
            reason = f"{name} is {tuple(found[name].shape)}, the model has {shape}"
            yield ConfigIssue(KEY, path, reason, fix)
            return
    if folder.model.tied and HEAD in folder.names:
        homes.add(HEAD)
    if (
        folder.model.tied
        and found.get(EMBEDDING) is not None
        and not folder.has_tied_head(found[EMBEDDING])
    ):
        reason = "has trained an embedding and left the head that is tied to it"
        yield ConfigIssue(KEY, path, reason, "set model.tied=false")
    if left := sorted(folder.names.keys() - homes):
        yield ConfigIssue(KEY, path, f"holds {left[0]}, which the run does not train", fix)
    counts = Counter[str]()
    for name, tensor in found.items():
        counts[folder.locate_weight(name)[2]] += int(tensor.count_nonzero())
    for home, count in counts.items():
        if home.endswith("lora_B.weight") and int(folder.read(home).count_nonzero()) != count:
            reason = f"{home} changes layers that adapter.targets does not describe"
            yield ConfigIssue(KEY, path, reason, "add them to adapter.targets")
            return
