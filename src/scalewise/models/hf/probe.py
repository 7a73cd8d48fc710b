"""Probe of a Hugging Face model: a forward pass on the meta device, and what is not supported."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from scalewise.compat.torch import registered_parameters
from scalewise.errors import ConfigIssue
from scalewise.models.hf import vision_language
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.hf.config_reader import KEY, LIKE, first_line, rope_type
from scalewise.models.hf.encoder_decoder import EncoderDecoderModule, MultiStackModule
from scalewise.models.hf.vision_language import VisionLanguageModule

ROPE_FIX = "set another rope_type in its config.json: default, linear, yarn or llama3"
PROBE_TOKENS = (8, 4)
"""Source tokens and target tokens of the probe forward pass."""


def block_issues(module: CausalLMModule, path: str) -> Iterator[ConfigIssue]:
    """Yield config issues of blocks that the planner and the strategies do not support."""
    fix = f"choose another model{LIKE}"
    layers = {type(layer) for block in module.layers() for layer in block.modules()}
    if any(issubclass(layer, nn.Conv1d) for layer in layers):
        reason = f"has convolutions over tokens ({module.head.config.model_type})"
        reason += ", which would mix packed texts and whose initial weights are not known"
        yield ConfigIssue(KEY, path, reason, fix)
    if any(buffer.device.type == "meta" for buffer in module.buffers()):
        yield ConfigIssue(KEY, path, "has buffers without values on the meta device", fix)


def distinct_blocks(module: CausalLMModule) -> dict[frozenset[object], nn.Module]:
    """Return the first block of each kind, by the names and shapes of its weights."""
    kinds: dict[frozenset[object], nn.Module] = {}
    for block in module.layers():
        shapes = ((name, *parameter.shape) for name, parameter in block.named_parameters())
        kinds.setdefault(frozenset((type(block), *shapes)), block)
    return kinds


def forward_issues(module: CausalLMModule, path: str) -> Iterator[ConfigIssue]:
    """Yield config issues of a probe forward pass, and record facts about layers in the module."""
    probe = copy.deepcopy(module).to("meta")
    outputs: set[str] = set()
    fix = f"choose another model{LIKE}"
    tokens, labels = (torch.zeros((2, n), dtype=torch.long, device="meta") for n in PROBE_TOKENS)
    if isinstance(module, VisionLanguageModule):
        side = module.head.config.vision_config.image_size
        labels = labels.new_zeros((2, vision_language.probe_token_counts(module.head.config)[1]))
        tokens = torch.zeros((2, 3, side, side), dtype=torch.uint8, device="meta")
    for block in probe.layers():
        block.register_forward_hook(lambda _, __, out: outputs.add(type(out).__name__))
    for name, layer in probe.named_modules():
        if any(each.dim() > 2 for each in layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(partial(_record_experts, module, name))
    for name, layer in probe.named_modules():
        if isinstance(module, MultiStackModule) and isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(partial(_record_positions, module, name))
    for name, layer in probe.layers()[0].named_modules():
        if registered_parameters(layer):
            layer.register_forward_hook(lambda *_, name=name: module.layer_order.append(name))
    scaling = rope_type(module.head.config)
    try:
        probe(tokens, labels)
    except Exception as error:  # the code of a model may raise anything
        if scaling == "dynamic":
            reason = "rope_type=dynamic computes its frequencies from the positions"
            reason += ", which have no values on the meta device"
            yield ConfigIssue(KEY, path, reason, ROPE_FIX)
            return
        reason = "fails in a forward pass on the meta device, which has no values of tensors"
        reason += f" ({type(error).__name__}: {first_line(error)})"
        yield ConfigIssue(KEY, path, reason, fix)
        return
    module.returns_tuples = bool(outputs & {"tuple", "list"})
    if others := outputs - {"Tensor", "tuple", "list"}:
        reason = f"has blocks that do not return a tensor ({max(others)})"
        yield ConfigIssue(KEY, path, reason, fix)


def _record_experts(
    module: CausalLMModule, name: str, layer: nn.Module, inputs: tuple[object, ...]
) -> None:
    """Record the fraction of the experts of a layer that process one token."""
    counts = [
        each.shape[-1]
        for each in inputs
        if isinstance(each, Tensor) and not each.is_floating_point()
    ]
    experts = next(len(each) for each in layer.parameters(recurse=False) if each.dim() > 2)
    module.expert_fractions[name] = counts[0] / experts if counts else 1.0


def _record_positions(
    module: MultiStackModule,
    name: str,
    layer: nn.Linear | nn.Conv2d,
    inputs: object,
    output: Tensor,
) -> None:
    """Record layers that read source tokens or an image, with the positions they are applied to."""
    positions = output.numel() // (2 * len(layer.weight))
    if isinstance(module, EncoderDecoderModule) and positions == PROBE_TOKENS[0]:
        module.source_layers.add(name)
    if isinstance(module, VisionLanguageModule) and (
        not module.is_language_layer(name)
        or positions == vision_language.probe_token_counts(module.head.config)[0]
    ):
        # Pixels need no gradient, which is a third of the FLOPs of a layer.
        is_patch_layer = isinstance(layer, nn.Conv2d)
        module.tokens_by_layer[name] = positions * 2 / 3 if is_patch_layer else positions
