"""Names: of the linear layers that an adapter is put on, and of what is added to them."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from scalewise.config.suggestions import did_you_mean
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, TPStyle, Weight
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    from scalewise.models.base_module import ModelModule

AUTO = "auto"
KEY = "adapter.targets"
TRAINED = "adapter.trained"
ADDED = (".lora_", ".ia3_l.", "prompt.weight", ".mix.prefix_")
"""What names of added weights have in them: PEFT's, and of what stands before a text."""


def linear_layers(model: ModelConfig) -> tuple[str, ...]:
    """Returns the linear layers of a block, by name within it."""
    return tuple(
        name.removeprefix("blocks.*.")
        for name, how in model.tensor_parallel_styles().items()
        if name.startswith("blocks.*.") and how in (TPStyle.column, TPStyle.row)
    )


@lru_cache(maxsize=64)
def match_targets(
    targets: tuple[str, ...], model: ModelConfig, default_targets: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Returns the linear layers that targets describe, ``default_targets`` ones by ``auto``.

    A search asks a thousand times.
    """
    named = set(default_targets) if AUTO in targets else set()
    patterns = [re.compile(target) for target in targets if target != AUTO]
    return tuple(
        name
        for name in linear_layers(model)
        if name in named or any(pattern.fullmatch(name) for pattern in patterns)
    )


def layer_name(weight: Weight) -> str:
    """Returns the name, within its block, of the layer that a matrix is of."""
    return weight.name.removeprefix(f"blocks.{weight.layer}.").removesuffix(".weight")


def module_name(name: str) -> str:
    """Returns the name, within its block, of the module that a weight is of."""
    return re.sub(r"^blocks\.\d+\.", "", name).rpartition(".")[0]


@lru_cache(maxsize=64)
def match_modules(patterns: tuple[str, ...], model: ModelConfig) -> tuple[str, ...]:
    """Returns the modules with weights, of blocks and outside, whose whole name is described."""
    known = dict.fromkeys(module_name(weight.name) for weight in model.weight_census())
    compiled = [re.compile(pattern) for pattern in patterns]
    return tuple(name for name in known if any(each.fullmatch(name) for each in compiled))


def unfreeze_modules(module: ModelModule, names: Container[str]) -> None:
    """Has the model's own weights trained that are of these modules."""
    for name, parameter in module.named_parameters():
        if module_name(name) in names:
            parameter.requires_grad_(True)


def is_adapter_weight(name: str) -> bool:
    """Returns whether a weight is an adapter's, and not the model's own."""
    return any(mark in name for mark in ADDED)


def target_issues(targets: tuple[str, ...], trained: tuple[str, ...]) -> Iterator[ConfigIssue]:
    """Yields what are no patterns, and that there are no targets."""
    if not targets:
        yield ConfigIssue(KEY, [], "names no layer", f"set {format_override(KEY, [AUTO])}")
    for key, patterns in ((KEY, targets), (TRAINED, trained)):
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield ConfigIssue(key, pattern, f"is no pattern: {error}")


def unmatched_target_issues(
    targets: tuple[str, ...],
    trained: tuple[str, ...],
    adapted_layers: tuple[str, ...],
    model: ModelConfig,
) -> Iterator[ConfigIssue]:
    """Yields targets that describe no linear layer of the model's blocks.

    And what is to be trained whole but is not there, or is ``adapted_layers`` by the adapter.
    """
    for target in targets:
        if target != AUTO and not match_targets((target,), model):
            reason = "is no linear layer of the model's blocks"
            yield ConfigIssue(KEY, target, reason, did_you_mean(target, linear_layers(model)))
    for pattern in trained:
        found = match_modules((pattern,), model)
        if not found:
            reason = "is no module of the model that has weights"
            yield ConfigIssue(
                TRAINED, pattern, reason, did_you_mean(pattern, match_modules((".*",), model))
            )
        elif both := [name for name in found if name in adapted_layers]:
            reason = f"describes {both[0]}, which {KEY} describes as well"
            yield ConfigIssue(TRAINED, pattern, reason, "leave it out of one of them")
