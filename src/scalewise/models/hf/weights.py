"""The weights of a model of transformers under its own names, both ways, as safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from scalewise.errors import CheckpointError, ConfigIssue
from scalewise.models import init
from scalewise.models.base import StageSlice, Weight
from scalewise.models.hf import hub, introspection, vision_language
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.hf.config_reader import KEY, read_config
from scalewise.models.hf.pretrained import PretrainedTensors
from scalewise.models.hf.vision_language import VisionLanguageModule
from scalewise.models.safetensors_files import SINGLE, SafetensorsFiles, save_tensors, weight_files

if TYPE_CHECKING:
    from scalewise.models.hf.config import HuggingFaceConfig

INITIAL_STD = 0.02
"""Of a configuration that names none, as in transformers."""


@torch.no_grad()
def init_weights(module: CausalLMModule, weights: Iterable[Weight], seed: int) -> None:
    """Draws every matrix afresh, each from ``seed`` and its name; norms are one, biases zero."""
    roles = {weight.name: weight.role for weight in weights}
    std = getattr(module.head.config, "initializer_range", None) or INITIAL_STD
    for name, parameter in module.base_parameters():
        if isinstance(parameter, nn.Parameter) and roles[name] == "bias":
            nn.init.zeros_(parameter)
        elif isinstance(parameter, nn.Parameter) and roles[name] == "norm":
            nn.init.ones_(parameter)
        else:
            init.init_normal(name, parameter, seed, std)


@torch.no_grad()
def load_into(module: CausalLMModule, path: str, depth: int | None) -> None:
    """Gives a materialized module, sharded or not, the weights at ``path``, in its dtype.

    One tensor is read at a time, and each rank keeps its own part of it. Raises
    ``CheckpointError`` for files that cannot be read, or are of another model.
    """
    tensors = open_checkpoint(path, depth)
    names = _match_names(tensors, module, path)
    for name, parameter in module.base_parameters():
        tensor = tensors.read(names[name])
        init.copy_into(
            parameter, tensor.T if module.hf_name(name) in module.transposed_weights else tensor
        )
    if issues := [
        *_tie_issues(tensors, module, names, path),
        *_buffer_issues(tensors, module, path),
    ]:
        raise CheckpointError(issues)


def open_checkpoint(path: str, depth: int | None) -> PretrainedTensors:
    """Returns the tensors at ``path`` by transformers' names; raises ``CheckpointError``."""
    folder = hub.model_folder(path, hub.WEIGHTS)
    fix = "save_pretrained writes them; or set model.init=random"
    files = SafetensorsFiles(weight_files(folder, KEY, path, fix), KEY, path)
    return PretrainedTensors(files, introspection.build_original(path, depth))


def weight_issues(path: str) -> tuple[ConfigIssue, ...]:
    """Returns why the weights of a local folder are not those of its model; nothing is read.

    The files' headers are compared once for each state of the files.
    """
    folder = Path(path).expanduser()
    states = ((file, file.stat()) for file in sorted(folder.glob("*.safetensors*")))
    signature = tuple((str(file), at.st_mtime_ns, at.st_size) for file, at in states)
    return _check_weights(path, signature)


@lru_cache(maxsize=16)
def _check_weights(path: str, signature: object) -> tuple[ConfigIssue, ...]:
    part = StageSlice(range(introspection.read_model_info(path, None).layers))
    try:
        _match_names(
            open_checkpoint(path, None), introspection.build_meta_module(path, None, part), path
        )
    except CheckpointError as error:
        return tuple(error.issues)
    return ()


def _match_names(tensors: PretrainedTensors, module: CausalLMModule, path: str) -> dict[str, str]:
    """Returns transformers' name of the tensor for each weight of a module, or of a part of one.

    Raises ``CheckpointError`` for what is missing, left over or of another shape.
    """
    found, missing, misshapen = dict[str, str](), list[str](), list[str]()
    for name, parameter in module.base_parameters():
        theirs = module.hf_name(name)
        if not (held := tensors.find_tied_names(theirs)):
            missing.append(theirs)
            continue
        found[name] = held[0]
        want = (*parameter.shape,)[:: -1 if theirs in module.transposed_weights else 1]
        if (have := tensors.shape(held[0])) != want:
            misshapen.append(f"{held[0]} {[*have]} where the model has {[*want]}")
    whole = len(module.blocks) == module.num_layers
    lines = {"lacks": missing, "holds": misshapen}
    lines |= {"holds what the model lacks:": tensors.unexpected if whole else []}
    if issues := [
        ConfigIssue(
            KEY,
            path,
            f"{said} {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else ""),
            "give the folder of the model that config.json is of",
        )
        for said, names in lines.items()
        if names
    ]:
        raise CheckpointError(issues)
    return found


def _tie_issues(
    tensors: PretrainedTensors, module: CausalLMModule, names: Mapping[str, str], path: str
) -> Iterator[ConfigIssue]:
    """Yields tied parameters that the checkpoint holds several times with different values."""
    read = {*names.values()}
    for name in names.values():
        for other in {*tensors.find_tied_names(name)} - read:
            if not tensors.is_equal(name, other):
                reason = f"holds {other} and {name} with different values, which config.json ties"
                fix = "write tie_word_embeddings=false into config.json"
                yield ConfigIssue(KEY, path, reason, fix)


def _buffer_issues(
    tensors: PretrainedTensors, module: CausalLMModule, path: str
) -> Iterator[ConfigIssue]:
    """Yields buffers of the checkpoint that are not those which the configuration gives."""
    for name, constant in module.original_buffers.items():
        if (theirs := module.hf_name(name)) in tensors:
            held = tensors.read(theirs).to(constant.dtype)
            if held.shape != constant.shape or not torch.equal(held, constant.to(held.device)):
                reason = f"holds a buffer {theirs} with other values than config.json gives"
                yield ConfigIssue(KEY, path, reason, "choose a model without such a buffer")


def export_folder(state: Mapping[str, Tensor], spec: HuggingFaceConfig, folder: Path) -> None:
    """Writes a folder that ``transformers.AutoModelForCausalLM``, or that of its kind, loads.

    ``state`` holds whole tensors and gives the dtype.
    """
    module = introspection.build_meta_module(spec.path, spec.depth, StageSlice(range(spec.layers)))
    tensors = dict[str, Tensor]()
    for name, _ in module.base_parameters():
        theirs, tensor = module.hf_name(name), state[name].detach()
        tensors[theirs] = tensor.T if theirs in module.transposed_weights else tensor
    persistent = {*introspection.build_original(spec.path, spec.depth).state_dict()}
    for name, constant in module.original_buffers.items():
        if (theirs := module.hf_name(name)) in persistent:
            tensors[theirs] = constant
    tensors = revert_weight_conversion(introspection.build_original(spec.path, spec.depth), tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)
    config = read_config(spec.path, spec.depth)
    if spec.info.tied_head is None and not config.is_encoder_decoder:
        config.tie_word_embeddings = False  # the checkpoint may hold a head of its own
    config.architectures = [type(module.head).__name__]
    config.dtype = next(iter(state.values())).dtype
    config.save_pretrained(folder)
    if isinstance(module, VisionLanguageModule):
        processor = json.dumps(vision_language.image_processor(spec.image_size), indent=2)
        (folder / "preprocessor_config.json").write_text(processor, "utf-8")
