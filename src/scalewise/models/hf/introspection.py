"""A configuration of transformers, and the module that it describes, without memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from scalewise.errors import CheckpointError, ConfigError, ConfigIssue
from scalewise.models.base import StageSlice, Weight
from scalewise.models.hf import encoder_decoder, hub, vision_language
from scalewise.models.hf.causal_lm import CausalLMModule, TiedLinearHead, conv1d_as_linear
from scalewise.models.hf.config_reader import (
    IMAGE_TEXT,
    KEY,
    LIKE,
    auto_class,
    first_line,
    read_config,
)
from scalewise.models.hf.encoder_decoder import EncoderDecoderModule
from scalewise.models.hf.model_info import ModelInfo
from scalewise.models.hf.multi_stack import MultiStackModule
from scalewise.models.hf.pretrained import PretrainedTensors
from scalewise.models.hf.vision_language import VisionLanguageModule
from scalewise.models.safetensors_files import SafetensorsFiles, weight_files

OTHER_ROPE = "set another rope_type in its config.json: default, linear, yarn or llama3"

UNLIMITED = 2**31 - 1
"""The context of a model whose configuration names none."""
EMBEDDINGS = ("embedding", "position")
TRIED = (8, 4)
"""Tokens of the rows of a trial: of those, and of the answers that a decoder writes."""


def build_meta_module(path: str, depth: int | None, stage: StageSlice) -> CausalLMModule:
    """Returns a module of its own on the meta device, with the weights of a part.

    They have torch's default format.
    """
    # Of blocks such as OPT's, which nobody changes in place.
    warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
    with unset_fake_temporarily():
        made = copy.deepcopy(_cached_module(path, depth)).to(torch.get_default_dtype())
    for layer in {*range(len(made.blocks))} - {*stage.layers}:
        del made.blocks[str(layer)]
    outside = [
        weight for weight in read_model_info(path, depth).weight_census if weight.layer is None
    ]
    for weight in outside:
        before = weight.role in EMBEDDINGS
        if not (stage.is_first if before else stage.is_last):
            holder, _, key = weight.name.rpartition(".")
            del made.get_submodule(holder)._parameters[key]
    return made


@lru_cache(maxsize=16)
def read_model_info(path: str, depth: int | None) -> ModelInfo:
    """Returns what a configuration says; raises ``ConfigError`` where it cannot be read."""
    whole, config = _cached_module(path, depth), read_config(path, depth)
    starts = whole.stack_starts if isinstance(whole, MultiStackModule) else (0,)
    linears = {
        name: (layer.out_features, layer.in_features)
        for block in starts
        for name, layer in whole.layers()[block].named_modules()
        if type(layer) is nn.Linear
    }
    text = config.get_text_config()
    heads = text.num_attention_heads
    context = getattr(text, "max_position_embeddings", None) or UNLIMITED
    dropping, picture = [text], None
    if isinstance(whole, VisionLanguageModule):
        dropping += [config.vision_config, config.qformer_config]
        picture = vision_language.vision_info(config, whole.tokens_by_layer)
        context -= picture.decoder_tokens
    return ModelInfo(
        vocabulary=text.vocab_size,
        context=context,
        layers=whole.num_layers,
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        width=text.hidden_size,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        weight_census=tuple(_weight_census(whole)),
        tied_weights=_tied_names(whole),
        model_type=config.model_type if picture else text.model_type,
        linear_layers=tuple(linears.items()),
        buffer_bytes=sum(buffer.nbytes for buffer in whole.original_buffers.values()),
        dropout=max((share for each in dropping for share in _shares_weight(each)), default=0.0),
        layer_order=tuple(whole.layer_order),
        tied_head=_make_tied_head(whole),
        hf_tp_plan=tuple(_tensor_parallel_plan(whole, text)) if len(starts) == 1 else (),
        stack_starts=starts,
        source_layers=frozenset(whole.source_layers)
        if isinstance(whole, EncoderDecoderModule)
        else frozenset(),
        vision=picture,
    )


def default_lora_targets(info: ModelInfo, adapter: str) -> tuple[str, ...]:
    """Returns the linear layers of a block that PEFT changes by default, by name within it.

    ``adapter``: ``LORA`` or ``IA3``. Where PEFT has no choice, all of them.
    """
    from peft.utils import constants  # takes seconds, of which few runs have need

    table = getattr(constants, f"TRANSFORMERS_MODELS_TO_{adapter}_TARGET_MODULES_MAPPING")
    ends, names = table.get(info.model_type, ()), tuple(name for name, _ in info.linear_layers)
    found = (name for name in names if any(f".{name}".endswith(f".{end}") for end in ends))
    return tuple(found) or names


@lru_cache(maxsize=16)
@unset_fake_temporarily()  # it outlives whoever asks
def build_original(path: str, depth: int | None) -> PreTrainedModel:
    """Returns the model as transformers builds it, weights on the meta device; not to be changed.

    Raises ``ConfigError`` as ``facts``.
    """
    config = read_config(path, depth)
    try:
        with _MetaWeights():
            model: PreTrainedModel = auto_class(config).from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = f"transformers cannot build it ({first_line(error)})"
        raise ConfigError.for_key(KEY, path, reason, "mend its config.json") from error
    return model


@lru_cache(maxsize=16)
@unset_fake_temporarily()  # it outlives whoever asks
def _cached_module(path: str, depth: int | None) -> CausalLMModule:
    """Returns the module that all others are copies of; raises ``ConfigError`` as ``facts``."""
    config, model = read_config(path, depth), copy.deepcopy(build_original(path, depth))
    _untie_head(model, path)
    made = _build_any(model, config, path)
    for owner in made.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.device.type != "meta":
                owner._parameters[name] = nn.Parameter(parameter.detach().to("meta"))
    if issues := list(_block_issues(made, path)) or list(_forward_issues(made, path)):
        raise ConfigError(issues)
    return made


def _build_any(model: PreTrainedModel, config: PretrainedConfig, path: str) -> CausalLMModule:
    """Returns the module of a model of any kind."""
    if config.model_type in IMAGE_TEXT:
        return _build_vision_language(model, path)
    return (
        _build_encoder_decoder(model, path)
        if config.is_encoder_decoder
        else _build_causal(model, path)
    )


def _build_causal(hf_model: PreTrainedModel, path: str) -> CausalLMModule:
    """Returns the module of a causal language model."""
    hf_model.config.pad_token_id = None  # else each pass looks for it among the tokens
    stem, stack = _find_block_list(
        hf_model, hf_model.config.get_text_config().num_hidden_layers, path
    )
    transposed = frozenset(_replace_conv1d(hf_model))
    _tie_to_embedding(hf_model, path)
    return CausalLMModule(hf_model, stem, stack, transposed)


def _build_encoder_decoder(model: PreTrainedModel, path: str) -> EncoderDecoderModule:
    """Returns the module of an encoder with a decoder."""
    try:
        encoder_decoder.tie_embeddings(model)
        return EncoderDecoderModule(model, encoder_decoder.find_stacks(model))
    except ValueError as error:
        raise ConfigError.for_key(KEY, path, str(error), "choose one as T5") from error


def _build_vision_language(model: PreTrainedModel, path: str) -> VisionLanguageModule:
    """Returns the module of a model that reads pictures."""
    writer = cast(Any, model).language_model
    try:
        if writer.config.is_encoder_decoder:
            encoder_decoder.tie_embeddings(writer)
        else:
            _tie_to_embedding(writer, path)
        return VisionLanguageModule(model)
    except ValueError as error:
        raise ConfigError.for_key(KEY, path, str(error), "choose one as BLIP-2") from error


def _untie_head(model: PreTrainedModel, path: str) -> None:
    """Gives the head a matrix of its own where the weights hold one that is not the embedding's.

    So does transformers, whatever ``tie_word_embeddings`` says. Without weights the configuration
    decides.
    """
    head = cast(Any, model).get_output_embeddings()
    name = next((f"{name}.weight" for name, it in model.named_modules() if it is head), None)
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    if name not in tied or head.weight is not model.get_parameter(tied[name]):
        return
    folder = hub.model_folder(path, hub.CONFIGURATION)
    try:
        files = SafetensorsFiles(weight_files(folder, KEY, path, ""), KEY, path)
    except CheckpointError:
        return  # reported by those who read the weights
    tensors = PretrainedTensors(files, model)
    held = tensors.find_tied_names(tied[name])
    if name in held and not all(tensors.is_equal(name, other) for other in held):
        head.weight = nn.Parameter(head.weight.detach().clone())


class _MetaWeights(TorchFunctionMode):
    """Has ``torch.empty``, which weights are made by, make nothing; buffers are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _find_block_list(hf_model: PreTrainedModel, layers: int, path: str) -> tuple[str, str]:
    """Returns the name of the module that goes through the blocks, and theirs in it."""
    kinds = {*(hf_model._no_split_modules or ())}
    lists = [
        (name, {type(block).__name__ for block in found})
        for name, found in hf_model.named_modules()
        if isinstance(found, nn.ModuleList) and len(found) == layers
    ]
    alike = [name for name, held in lists if len(held) == 1]
    named = [name for name, held in lists if len(held) == 1 and held <= kinds]
    found = named if len(named) == 1 else alike
    if len(found) != 1:
        reason = f"has no list of {layers} blocks of one kind"
        raise ConfigError.for_key(KEY, path, reason, f"choose one{LIKE}")
    stem, _, stack = found[0].rpartition(".")
    return stem, stack


def _replace_conv1d(hf_model: PreTrainedModel) -> Iterator[str]:
    """Puts linear layers in the place of ``Conv1D``; yields the names of their matrices."""
    for name, layer in [*hf_model.named_modules()]:
        if isinstance(layer, Conv1D):
            holder, _, key = name.rpartition(".")
            setattr(hf_model.get_submodule(holder), key, conv1d_as_linear(layer))
            yield f"{name}.weight"


def _tie_to_embedding(hf_model: PreTrainedModel, path: str) -> None:
    """Leaves a tied matrix to the embedding; raises ``ConfigError`` for other ties."""
    model = cast(Any, hf_model)  # of which transformers annotates little
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight is embedding.weight:
        name = next(name for name, layer in hf_model.named_modules() if layer is head)
        holder, _, key = name.rpartition(".")
        setattr(hf_model.get_submodule(holder), key, TiedLinearHead(embedding, head.bias))
    once = len([*hf_model.parameters()])
    if len([*hf_model.named_parameters(remove_duplicate=False)]) != once:
        reason = "ties more weights than the head to the embedding"
        raise ConfigError.for_key(KEY, path, reason, f"choose one{LIKE}")


def _block_issues(module: CausalLMModule, path: str) -> Iterator[ConfigIssue]:
    """Yields what plans and layouts do not reckon with: all blocks are alike, and dense."""
    first, *others = (
        {name: (*parameter.shape,) for name, parameter in block.named_parameters()}
        for block in module.layers()
    )
    fix = f"choose a model of which they are{LIKE}"
    if not isinstance(module, MultiStackModule) and any(other != first for other in others):
        yield ConfigIssue(KEY, path, "its blocks are not alike", fix)
    if any(len(shape) > 2 for block in (first, *others) for shape in block.values()):
        yield ConfigIssue(KEY, path, "its blocks are not dense (experts)", fix)
    if any(buffer.device.type == "meta" for buffer in module.buffers()):
        yield ConfigIssue(KEY, path, "it has buffers of unknown numbers", fix)


def rope_type(config: Any) -> str | None:
    """Returns how a configuration of transformers scales rotary wavelengths."""
    table = getattr(config, "rope_parameters", None) or {}
    return table.get("rope_type") if isinstance(table, dict) else None


def _forward_issues(module: CausalLMModule, path: str) -> Iterator[ConfigIssue]:
    """Yields what keeps a pass from its end, or makes its blocks give more than one tensor."""
    trial = copy.deepcopy(module).to("meta")
    passed: set[str] = set()
    tokens, answered = (torch.zeros((2, n), dtype=torch.long, device="meta") for n in TRIED)
    if isinstance(module, VisionLanguageModule):
        side = module.head.config.vision_config.image_size
        answered = answered.new_zeros(
            (2, vision_language.probe_token_counts(module.head.config)[1])
        )
        tokens = torch.zeros((2, 3, side, side), dtype=torch.uint8, device="meta")
    for block in trial.layers():
        block.register_forward_hook(lambda _, __, out: passed.add(type(out).__name__))
    for name, layer in trial.named_modules():
        if isinstance(module, MultiStackModule) and isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(partial(_note_reads, module, name))
    for name, layer in trial.layers()[0].named_modules():
        if layer._parameters:
            layer.register_forward_hook(lambda *_, name=name: module.layer_order.append(name))
    scaling = rope_type(module.head.config)
    try:
        trial(tokens, answered)
    except Exception as error:  # whatever anybody's model raises
        if scaling == "dynamic":
            reason = "rope_type=dynamic recomputes its frequencies from the positions it reads"
            yield ConfigIssue(KEY, path, f"{reason}, and a plan has none", OTHER_ROPE)
            return
        passed.add(f"{type(error).__name__}: {first_line(error)}")
    if others := passed - {"Tensor", *(["tuple"] if isinstance(module, MultiStackModule) else [])}:
        reason = f"its blocks do not pass one tensor on ({max(others)})"
        yield ConfigIssue(KEY, path, reason, f"choose a model of which they do{LIKE}")


def _note_reads(
    module: MultiStackModule,
    name: str,
    layer: nn.Linear | nn.Conv2d,
    inputs: object,
    output: Tensor,
) -> None:
    """Notes what a layer reads of a row that is no part of the text that a decoder writes."""
    places = output.numel() // (2 * len(layer.weight))
    if isinstance(module, EncoderDecoderModule) and places == TRIED[0]:
        module.source_layers.add(name)
    if isinstance(module, VisionLanguageModule) and (
        not module.is_language_layer(name)
        or places == vision_language.probe_token_counts(module.head.config)[0]
    ):
        # pixels have no gradient, which is a third of what a layer computes
        module.tokens_by_layer[name] = places * 2 / 3 if isinstance(layer, nn.Conv2d) else places


def _weight_census(module: CausalLMModule) -> Iterator[Weight]:
    for name, parameter in module.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
        yield Weight(name, tuple(parameter.shape), _module_role(name, parameter, module), layer)


def _module_role(name: str, parameter: nn.Parameter, module: CausalLMModule) -> str:
    if parameter.dim() == 1:
        return "bias" if name.endswith("bias") else "norm"
    layer = module.get_submodule(name.rpartition(".")[0])
    if name.startswith("head.") and isinstance(layer, nn.Linear):
        return "head"
    if isinstance(layer, nn.Embedding):
        return "embedding" if parameter is module.find_input_embedding().weight else "position"
    if not name.endswith(".weight"):
        return "position"  # such as those of a picture's places, and what asks about it
    return "attention" if "att" in name.lower() else "feedforward"


def _tied_names(module: CausalLMModule) -> frozenset[str]:
    if _make_tied_head(module) is None:
        return frozenset()
    held = module.find_input_embedding().weight
    return frozenset(name for name, each in module.named_parameters() if each is held)


def _make_tied_head(module: CausalLMModule) -> str | None:
    return next(
        (name for name, it in module.named_modules() if isinstance(it, TiedLinearHead)), None
    )


def _tensor_parallel_plan(
    module: CausalLMModule, config: PretrainedConfig
) -> Iterator[tuple[str, str]]:
    start = f"{module.blocks_name}.*."
    for name, how in (getattr(config, "base_model_tp_plan", None) or {}).items():
        if name.startswith(start):
            yield name.removeprefix(start), how


def _shares_weight(config: PretrainedConfig) -> Iterator[float]:
    for key, value in config.to_dict().items():
        elsewhere = key.startswith(("summary", "classifier"))  # heads that are not built
        if (
            key.endswith(("dropout", "pdrop", "dropout_rate", "dropout_prob"))
            and isinstance(value, float)
            and not elsewhere
        ):
            yield value
