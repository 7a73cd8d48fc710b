"""Facts about Hugging Face models from their configuration and a module on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from scalewise.compat.hugging_face import block_class_names
from scalewise.compat.torch import registered_parameters, unset_fake_temporarily
from scalewise.errors import CheckpointError, ConfigError
from scalewise.models.base import StageSlice, Weight
from scalewise.models.hf import encoder_decoder, experts, hub, model_info, vision_language
from scalewise.models.hf.causal_lm import (
    CausalLMModule,
    TiedLinearHead,
    conv1d_as_linear,
    packs_texts,
)
from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.models.hf.config_reader import (
    IMAGE_TEXT,
    KEY,
    LIKE,
    auto_class,
    dropout_probabilities,
    first_line,
    read_config,
)
from scalewise.models.hf.encoder_decoder import EncoderDecoderModule, MultiStackModule
from scalewise.models.hf.model_info import ModelInfo
from scalewise.models.hf.pretrained import PretrainedTensors
from scalewise.models.hf.probe import block_issues, distinct_blocks, forward_issues
from scalewise.models.hf.vision_language import VisionLanguageModule
from scalewise.models.safetensors_files import SafetensorsFiles, weight_files

UNLIMITED = 2**31 - 1
"""Context of a model whose configuration sets none."""
EMBEDDING_ROLES = ("embedding", "position")


def build_meta_module(path: str, depth: int | None, stage: StageSlice) -> CausalLMModule:
    """Return a new module on the meta device, in torch's default dtype, with a stage's weights."""
    with unset_fake_temporarily():
        module = copy.deepcopy(_cached_module(path, depth)).to(torch.get_default_dtype())
    for layer in {*range(len(module.blocks))} - {*stage.layers}:
        del module.blocks[str(layer)]
    outside = [
        weight for weight in read_model_info(path, depth).weight_census if weight.layer is None
    ]
    for weight in outside:
        is_input = weight.role in EMBEDDING_ROLES
        if not (stage.is_first if is_input else stage.is_last):
            owner, _, key = weight.name.rpartition(".")
            delattr(module.get_submodule(owner), key)
    return module


@lru_cache(maxsize=16)
def read_model_info(path: str, depth: int | None) -> ModelInfo:
    """Return the facts about a model; raises ``ConfigError`` if it is not supported."""
    module, config = _cached_module(path, depth), read_config(path, depth)
    starts = module.stack_starts if isinstance(module, MultiStackModule) else (0,)
    linears = {
        name: (layer.out_features, layer.in_features)
        for block in distinct_blocks(module).values()
        for name, layer in block.named_modules()
        if type(layer) is nn.Linear
    }
    text = config.get_text_config()
    heads = text.num_attention_heads
    context = getattr(text, "max_position_embeddings", None) or UNLIMITED
    dropout_configs, vision = [text], None
    if isinstance(module, VisionLanguageModule):
        dropout_configs += [config.vision_config, config.qformer_config]
        vision = vision_language.vision_info(config, module.tokens_by_layer)
        context -= vision.decoder_tokens
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if key_size := getattr(text, "qk_nope_head_dim", None):  # multi-head latent attention
        head_size = (key_size + text.qk_rope_head_dim + text.v_head_dim) // 2
    return ModelInfo(
        vocabulary=text.vocab_size,
        context=context,
        layers=module.num_layers,
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        width=text.hidden_size,
        head_size=head_size,
        weight_census=tuple(_weight_census(module)),
        tied_weights=_tied_names(module),
        model_type=config.model_type if vision else text.model_type,
        linear_layers=tuple(linears.items()),
        buffer_bytes=sum(buffer.nbytes for buffer in module.original_buffers.values()),
        dropout=max(chain.from_iterable(map(dropout_probabilities, dropout_configs)), default=0.0),
        layer_order=tuple(module.layer_order),
        tied_head=_find_tied_head(module),
        hf_tp_plan=tuple(_tensor_parallel_plan(module, text)) if len(starts) == 1 else (),
        has_equal_blocks=len(starts) == 1 and len(distinct_blocks(module)) == 1,
        returns_tuples=module.returns_tuples,
        expert_fractions={
            name: module.expert_fractions.get(name.rpartition(".")[0], 1.0)
            for name, parameter in module.named_parameters()
            if parameter.dim() > 2
        },
        packs_texts=len(starts) == 1 and packs_texts(module),
        stack_starts=starts,
        source_layers=frozenset(module.source_layers)
        if isinstance(module, EncoderDecoderModule)
        else frozenset(),
        vision=vision,
    )


@model_info.peft_targets.register(HuggingFaceConfig)
def _peft_targets(config: HuggingFaceConfig, adapter: str) -> tuple[str, ...]:
    from peft.utils import constants  # the import takes seconds

    table = getattr(constants, f"TRANSFORMERS_MODELS_TO_{adapter}_TARGET_MODULES_MAPPING")
    suffixes, names = (
        table.get(config.info.model_type, ()),
        tuple(name for name, _ in config.info.linear_layers),
    )
    targets = (name for name in names if any(f".{name}".endswith(f".{end}") for end in suffixes))
    if config.has_experts:  # PEFT takes the names of feedforward layers for those of experts
        names = tuple(name for name in names if "att" in name) or names
    return tuple(targets) or names


@model_info.read_info.register(HuggingFaceConfig)
def _read_info(config: HuggingFaceConfig) -> ModelInfo:
    return read_model_info(config.path, config.depth)


@lru_cache(maxsize=16)
@unset_fake_temporarily()  # the cache outlives a fake mode of the caller
def build_original(path: str, depth: int | None) -> PreTrainedModel:
    """Return transformers' model with weights on the meta device; callers must not modify it.

    Raises:
        ConfigError: transformers cannot build the model.
    """
    config = read_config(path, depth)
    try:
        with _MetaWeights():
            model: PreTrainedModel = auto_class(config).from_config(
                config,
                dtype=torch.float32,
                trust_remote_code=False,
                experts_implementation=experts.IMPLEMENTATION,
            )
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = f"cannot be built by transformers ({first_line(error)})"
        raise ConfigError.for_key(KEY, path, reason, "fix its config.json") from error
    return model


@lru_cache(maxsize=16)
@unset_fake_temporarily()  # the cache outlives a fake mode of the caller
def _cached_module(path: str, depth: int | None) -> CausalLMModule:
    """Return the module that is copied for each use; raises ``ConfigError``."""
    config, model = read_config(path, depth), copy.deepcopy(build_original(path, depth))
    _untie_head(model, path)
    module = _build_any(model, config, path)
    for owner in module.modules():
        parameters = registered_parameters(owner)
        for name, parameter in parameters.items():
            if parameter is not None and parameter.device.type != "meta":
                parameters[name] = nn.Parameter(parameter.detach().to("meta"))
    if issues := list(block_issues(module, path)) or list(forward_issues(module, path)):
        raise ConfigError(issues)
    return module


def _build_any(model: PreTrainedModel, config: PretrainedConfig, path: str) -> CausalLMModule:
    if config.model_type in IMAGE_TEXT:
        return _build_vision_language(model, path)
    return (
        _build_encoder_decoder(model, path)
        if config.is_encoder_decoder
        else _build_causal(model, path)
    )


def _build_causal(hf_model: PreTrainedModel, path: str) -> CausalLMModule:
    text = hf_model.config.get_text_config()
    text.pad_token_id = None  # else each forward pass searches the tokens for it
    stem, stack = _find_block_list(hf_model, text.num_hidden_layers, path)
    if text is not hf_model.config:
        _remove_vision_tower(hf_model, stem)
    transposed = frozenset(_replace_conv1d(hf_model))
    _tie_to_embedding(hf_model, path)
    return CausalLMModule(hf_model, stem, stack, transposed)


def _build_encoder_decoder(model: PreTrainedModel, path: str) -> EncoderDecoderModule:
    try:
        encoder_decoder.tie_embeddings(model)
        return EncoderDecoderModule(model, encoder_decoder.find_stacks(model))
    except ValueError as error:
        fix = "choose another model, such as T5"
        raise ConfigError.for_key(KEY, path, str(error), fix) from error


def _build_vision_language(model: PreTrainedModel, path: str) -> VisionLanguageModule:
    language_model = cast(Any, model).language_model
    try:
        if language_model.config.is_encoder_decoder:
            encoder_decoder.tie_embeddings(language_model)
        else:
            _tie_to_embedding(language_model, path)
        return VisionLanguageModule(model)
    except ValueError as error:
        fix = "choose another model, such as BLIP-2"
        raise ConfigError.for_key(KEY, path, str(error), fix) from error


def _untie_head(model: PreTrainedModel, path: str) -> None:
    """Give the head its own weight if the checkpoint has one that differs from the embedding.

    transformers does the same, whatever ``tie_word_embeddings`` is. Without weights the
    configuration decides; T5 keeps its ``tie_word_embeddings`` as ``scale_decoder_outputs`` only.
    """
    head = cast(Any, model).get_output_embeddings()
    name = next((f"{name}.weight" for name, each in model.named_modules() if each is head), None)
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    if name not in tied or head.weight is not model.get_parameter(tied[name]):
        return
    folder = hub.model_folder(path, hub.CONFIG_FILES)
    try:
        files = SafetensorsFiles(weight_files(folder, KEY, path, ""), KEY, path)
    except CheckpointError:  # reported when the weights are loaded
        if getattr(model.config.get_text_config(), "scale_decoder_outputs", True) is False:
            head.weight = nn.Parameter(head.weight.detach().clone())
        return
    tensors = PretrainedTensors(files, model)
    stored = tensors.find_tied_names(tied[name])
    if name in stored and not all(tensors.is_equal(name, other) for other in stored):
        head.weight = nn.Parameter(head.weight.detach().clone())


class _MetaWeights(TorchFunctionMode):
    """Puts ``torch.empty``, which allocates weights, on the meta device; buffers are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _find_block_list(hf_model: PreTrainedModel, layers: int, path: str) -> tuple[str, str]:
    """Return the name of the module that runs the blocks, and that of the list in it."""
    block_classes, decoder = (
        block_class_names(hf_model),
        {*cast(Any, hf_model).get_decoder().modules()},
    )
    lists = {
        name: {type(block).__name__ for block in module}
        for name, module in hf_model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers and module in decoder
    }
    uniform = [name for name, classes in lists.items() if len(classes) == 1]
    listed = [name for name, classes in lists.items() if classes <= block_classes]
    candidates = listed if len(listed) == 1 else uniform
    if len(candidates) != 1:
        reason = f"has no list of {layers} blocks"
        raise ConfigError.for_key(KEY, path, reason, f"choose another model{LIKE}")
    stem, _, stack = candidates[0].rpartition(".")
    return stem, stack


def _remove_vision_tower(hf_model: PreTrainedModel, stem: str) -> None:
    """Remove the modules next to the language model ``stem``, which texts do not use."""
    owner = hf_model.get_submodule(stem.rpartition(".")[0])
    kept = (hf_model.get_submodule(stem), cast(Any, hf_model).get_output_embeddings())
    for name, child in [*owner.named_children()]:
        if all(each is not child for each in kept):
            setattr(owner, name, None)


def _replace_conv1d(hf_model: PreTrainedModel) -> Iterator[str]:
    """Replace ``Conv1D`` by linear layers; yields the names of their weights."""
    for name, layer in [*hf_model.named_modules()]:
        if isinstance(layer, Conv1D):
            owner, _, key = name.rpartition(".")
            setattr(hf_model.get_submodule(owner), key, conv1d_as_linear(layer))
            yield f"{name}.weight"


def _tie_to_embedding(hf_model: PreTrainedModel, path: str) -> None:
    """Replace a tied head by a module without weight; raises ``ConfigError`` for other ties."""
    model = cast(Any, hf_model)  # transformers annotates few attributes
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight is embedding.weight:
        name = next(name for name, layer in hf_model.named_modules() if layer is head)
        owner, _, key = name.rpartition(".")
        setattr(hf_model.get_submodule(owner), key, TiedLinearHead(embedding, head.bias))
    num_parameters = len([*hf_model.parameters()])
    if len([*hf_model.named_parameters(remove_duplicate=False)]) != num_parameters:
        reason = "ties other weights than the head to the embedding"
        raise ConfigError.for_key(KEY, path, reason, f"choose another model{LIKE}")


def _weight_census(module: CausalLMModule) -> Iterator[Weight]:
    for name, parameter in module.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
        yield Weight(name, tuple(parameter.shape), _module_role(name, parameter, module), layer)


def _module_role(name: str, parameter: nn.Parameter, module: CausalLMModule) -> str:
    if parameter.dim() == 1 or name.endswith("_bias"):
        return "bias" if name.endswith("bias") else "norm"
    if parameter.dim() > 2 and name.startswith("blocks.") and not name.endswith(".weight"):
        return "experts"
    layer = module.get_submodule(name.rpartition(".")[0])
    if name.startswith("head.") and isinstance(layer, nn.Linear):
        return "head"
    if isinstance(layer, nn.Embedding):
        return "embedding" if parameter is module.find_input_embedding().weight else "position"
    if not name.endswith(".weight"):
        return "position"  # such as the patch positions and the queries of a Q-Former
    return "attention" if "att" in name.lower() else "feedforward"


def _tied_names(module: CausalLMModule) -> frozenset[str]:
    if _find_tied_head(module) is None:
        return frozenset()
    embedding = module.find_input_embedding().weight
    return frozenset(name for name, each in module.named_parameters() if each is embedding)


def _find_tied_head(module: CausalLMModule) -> str | None:
    return next(
        (name for name, each in module.named_modules() if isinstance(each, TiedLinearHead)), None
    )


def _tensor_parallel_plan(
    module: CausalLMModule, config: PretrainedConfig
) -> Iterator[tuple[str, str]]:
    start = f"{module.blocks_name}.*."
    for name, style in (getattr(config, "base_model_tp_plan", None) or {}).items():
        if name.startswith(start):
            yield name.removeprefix(start), style
