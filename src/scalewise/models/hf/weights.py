"""Initialization, loading and export of Hugging Face weights, as safetensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from scalewise import regular_files
from scalewise.compat.torch import unset_fake_temporarily
from scalewise.errors import CheckpointError, ConfigIssue
from scalewise.models import build, init
from scalewise.models.base import StageSlice, Weight
from scalewise.models.base_module import ModelModule
from scalewise.models.hf import hub, introspection, model_info, vision_language
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.hf.config import HuggingFaceConfig, InitKind
from scalewise.models.hf.config_reader import KEY, read_config, reads_images_and_text
from scalewise.models.hf.pretrained import PretrainedTensors
from scalewise.models.hf.vision_language import VisionLanguageModule
from scalewise.models.safetensors_files import (
    PATTERNS,
    SINGLE,
    SafetensorsFiles,
    save_tensors,
    weight_files,
)

PRETRAINED_BUFFERS = ("e_score_correction_bias",)
"""Suffixes of buffers that pretraining updates: the balancing biases of routers."""
DEFAULT_STD = 0.02
"""Standard deviation of a configuration without ``initializer_range``, as in transformers."""


@torch.no_grad()
def init_weights(module: CausalLMModule, weights: Iterable[Weight], seed: int) -> None:
    """Initialize every matrix from ``seed`` and its name; norms are one, biases zero."""
    roles = {weight.name: weight.role for weight in weights}
    std = getattr(module.head.config, "initializer_range", None) or DEFAULT_STD
    for name, parameter in module.base_parameters():
        if isinstance(parameter, nn.Parameter) and roles[name] == "bias":
            nn.init.zeros_(parameter)
        elif isinstance(parameter, nn.Parameter) and roles[name] == "norm":
            nn.init.ones_(parameter)
        else:
            init.init_normal(name, parameter, seed, std)


@torch.no_grad()
def load_into(module: CausalLMModule, path: str, depth: int | None) -> None:
    """Copy the weights at ``path`` into a materialized module, sharded or not, in its dtype.

    One tensor is read at a time, and each rank stores its own shard.

    Raises:
        CheckpointError: A file cannot be read, or the weights are of another model.
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
    """Return the tensors at ``path`` by transformers' names; raises ``CheckpointError``."""
    folder = hub.model_folder(path, PATTERNS)
    fix = "save the model with save_pretrained, or set model.init=random"
    files = SafetensorsFiles(weight_files(folder, KEY, path, fix), KEY, path)
    return PretrainedTensors(files, introspection.build_original(path, depth))


@model_info.weight_issues.register(HuggingFaceConfig)
def _weight_issues(config: HuggingFaceConfig) -> tuple[ConfigIssue, ...]:
    """Issues of the weights; cached until a file changes."""
    folder = regular_files.expand_home(config.path)
    stats = ((file, file.stat()) for file in sorted(folder.glob("*.safetensors*")))
    signature = tuple((str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats)
    return _check_weights(config.path, signature)


@lru_cache(maxsize=16)
def _check_weights(path: str, signature: object) -> tuple[ConfigIssue, ...]:
    full = StageSlice(range(introspection.read_model_info(path, None).layers))
    try:
        _match_names(
            open_checkpoint(path, None), introspection.build_meta_module(path, None, full), path
        )
    except CheckpointError as error:
        return tuple(error.issues)
    return ()


def _match_names(tensors: PretrainedTensors, module: CausalLMModule, path: str) -> dict[str, str]:
    """Return the checkpoint's name for each parameter of a module, or of one stage of it.

    Raises:
        CheckpointError: A tensor is missing, unexpected or of another shape.
    """
    names, missing, misshapen = dict[str, str](), list[str](), list[str]()
    for name, parameter in module.base_parameters():
        hf_name = module.hf_name(name)
        if not (stored := tensors.find_tied_names(hf_name)):
            missing.append(hf_name)
            continue
        names[name] = stored[0]
        expected = (*parameter.shape,)[:: -1 if hf_name in module.transposed_weights else 1]
        if (shape := tensors.shape(stored[0])) != expected:
            misshapen.append(f"{stored[0]} {[*shape]}, not {[*expected]}")
    is_full = len(module.blocks) == module.num_layers
    problems = {
        "has no tensor": missing,
        "has a tensor of another shape:": misshapen,
        "has a tensor that the model does not have:": tensors.unexpected if is_full else [],
    }
    if issues := [
        ConfigIssue(
            KEY,
            path,
            f"{reason} {affected[0]}" + (f" and {len(affected) - 1} more" if affected[1:] else ""),
            "choose a folder whose weights match its config.json",
        )
        for reason, affected in problems.items()
        if affected
    ]:
        raise CheckpointError(issues)
    return names


def _tie_issues(
    tensors: PretrainedTensors, module: CausalLMModule, names: Mapping[str, str], path: str
) -> Iterator[ConfigIssue]:
    """Yield tied parameters that have different values in the checkpoint.

    A stage of several stacks may have the embedding without a head that is not tied to it.
    """
    if len(module.blocks) < module.num_layers:
        return
    loaded = {*names.values()}
    for name in names.values():
        for other in {*tensors.find_tied_names(name)} - loaded:
            if not tensors.is_equal(name, other):
                reason = f"has different values for {other} and {name}, which config.json ties"
                fix = "set tie_word_embeddings=false in config.json"
                yield ConfigIssue(KEY, path, reason, fix)


def _buffer_issues(
    tensors: PretrainedTensors, module: CausalLMModule, path: str
) -> Iterator[ConfigIssue]:
    """Yield buffers of the checkpoint that differ from those of the configuration."""
    for name, constant in module.original_buffers.items():
        if (hf_name := module.hf_name(name)) in tensors:
            stored = tensors.read(hf_name).to(constant.dtype)
            if stored.shape != constant.shape or not torch.equal(
                stored, constant.to(stored.device)
            ):
                reason = f"has a buffer {hf_name} with other values than config.json gives"
                yield ConfigIssue(KEY, path, reason, "choose a model without such a buffer")


def export_folder(state: Mapping[str, Tensor], spec: HuggingFaceConfig, folder: Path) -> None:
    """Write a folder that the Auto classes of transformers load.

    Args:
        state: Unsharded state dict, whose dtype the files have.
        spec: Configuration of the model.
        folder: Folder to write.
    """
    module = _meta_module(spec, StageSlice(range(spec.layers)))
    tensors = dict[str, Tensor]()
    for name, _ in module.base_parameters():
        hf_name, tensor = module.hf_name(name), state[name].detach()
        tensors[hf_name] = tensor.T if hf_name in module.transposed_weights else tensor
    if reads_images_and_text(module.head.config):
        dtype = next(iter(state.values())).dtype
        tensors |= dict(_vision_tower_tensors(spec, {*tensors}, dtype))
    persistent = {*introspection.build_original(spec.path, spec.depth).state_dict()}
    for name, constant in module.original_buffers.items():
        if (hf_name := module.hf_name(name)) in persistent:
            tensors[hf_name] = constant
    tensors = revert_weight_conversion(introspection.build_original(spec.path, spec.depth), tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)
    config = read_config(spec.path, spec.depth)
    if spec.info.tied_head is None and not config.is_encoder_decoder:
        config.tie_word_embeddings = False  # the checkpoint may have a head of its own
    config.architectures = [type(module.head).__name__]
    config.dtype = next(iter(state.values())).dtype
    config.save_pretrained(folder)
    if isinstance(module, VisionLanguageModule):
        processor = json.dumps(vision_language.image_processor(spec.image_size), indent=2)
        (folder / "preprocessor_config.json").write_text(processor, "utf-8")


def _vision_tower_tensors(
    spec: HuggingFaceConfig, trained: Collection[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the vision tower, which is not trained, by transformers' names."""
    original = introspection.build_original(spec.path, spec.depth)
    stored = None if spec.init is InitKind.random else open_checkpoint(spec.path, spec.depth)
    tied = {*original.get_expanded_tied_weights_keys(all_submodels=True)}
    for name, parameter in original.named_parameters():
        if name in trained or name in tied:
            continue
        if stored is not None:
            yield name, stored.read(name).to(dtype)
        else:
            tensor = nn.Parameter(torch.zeros(parameter.shape, dtype=dtype))
            init.init_normal(name, tensor, 0, DEFAULT_STD)
            yield name, tensor.detach()


@build.build_meta.register(HuggingFaceConfig)
def _build_meta(config: HuggingFaceConfig, stage: StageSlice) -> ModelModule:
    return _meta_module(config, stage)


def _meta_module(config: HuggingFaceConfig, stage: StageSlice) -> CausalLMModule:
    module = introspection.build_meta_module(config.path, config.depth, stage)
    names = [name for name in module.original_buffers if name.endswith(PRETRAINED_BUFFERS)]
    if names and config.init is InitKind.weights:
        _read_buffers(module, names, open_checkpoint(config.path, config.depth))
    return module


@unset_fake_temporarily()  # buffers have values in a trace too
def _read_buffers(module: CausalLMModule, names: Iterable[str], tensors: PretrainedTensors) -> None:
    """Set the values that ``to_empty`` restores to those of a checkpoint."""
    for name in names:
        if (hf_name := module.hf_name(name)) in tensors:
            constant = tensors.read(hf_name).to(module.original_buffers[name].dtype)
            module.original_buffers[name] = constant


@build.init_weights.register(HuggingFaceConfig)
def _init_or_load(config: HuggingFaceConfig, module: ModelModule, seed: int) -> None:
    assert isinstance(module, CausalLMModule)
    if config.init is InitKind.random:
        init_weights(module, config.weight_census(), seed)
    else:
        load_into(module, config.path, config.depth)


@build.export_model.register(HuggingFaceConfig)
def _export(config: HuggingFaceConfig, state: Mapping[str, Tensor], folder: Path) -> None:
    export_folder(state, config, folder)
