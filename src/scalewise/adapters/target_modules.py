"""Names of modules: those that an adapter targets, and those that it adds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, TPStyle, Weight
from scalewise.typed_override import format_override

AUTO = "auto"
DEFAULT = "default"
"""PEFT's default adapter name."""
TARGETS_KEY = "adapter.targets"
TRAINED_KEY = "adapter.trained"
LINEAR_STYLES = (TPStyle.column, TPStyle.row, TPStyle.partial_row)


@lru_cache(maxsize=64)
def linear_layers(model: ModelConfig) -> tuple[str, ...]:
    """Names, within a block, of its linear layers. Cached for rules that match each weight."""
    return tuple(
        name.removeprefix("blocks.*.")
        for name, tp_style in model.tensor_parallel_styles().items()
        if name.startswith("blocks.*.") and tp_style in LINEAR_STYLES
    )


@lru_cache(maxsize=64)
def match_targets(
    targets: tuple[str, ...],
    model: ModelConfig,
    default_targets: tuple[str, ...] = (),
    *,
    with_experts: bool = False,
) -> tuple[str, ...]:
    """Names, within a block, of the linear layers that ``targets`` match.

    ``default_targets``: layers that ``auto`` selects. ``with_experts``: whether matrices of routed
    experts are among the layers. Cached for the planner's search.
    """
    default_names = set(default_targets) if AUTO in targets else set()
    patterns = [re.compile(target) for target in targets if target != AUTO]
    return tuple(
        name
        for name in (*linear_layers(model), *(model.expert_layers if with_experts else ()))
        if name in default_names or any(pattern.fullmatch(name) for pattern in patterns)
    )


def layer_name(weight: Weight) -> str:
    """Name, within its block, of the layer of a matrix."""
    return weight.name.removeprefix(f"blocks.{weight.layer}.").removesuffix(".weight")


def module_name(name: str) -> str:
    """Name, within its block, of the module of a weight."""
    return re.sub(r"^blocks\.\d+\.", "", name).rpartition(".")[0]


@lru_cache(maxsize=64)
def match_modules(patterns: tuple[str, ...], model: ModelConfig) -> tuple[str, ...]:
    """Names of the modules with weights, in blocks and outside, that ``patterns`` match."""
    names = dict.fromkeys(module_name(weight.name) for weight in model.weight_census())
    compiled = [re.compile(pattern) for pattern in patterns]
    return tuple(name for name in names if any(regex.fullmatch(name) for regex in compiled))


def target_issues(targets: tuple[str, ...], trained: tuple[str, ...]) -> Iterator[ConfigIssue]:
    """Yield an issue for each invalid pattern, and for an empty list of targets."""
    if not targets:
        yield ConfigIssue(
            TARGETS_KEY, [], "is empty", f"set {format_override(TARGETS_KEY, [AUTO])}"
        )
    for key, patterns in ((TARGETS_KEY, targets), (TRAINED_KEY, trained)):
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield ConfigIssue(key, pattern, f"is not a valid regular expression: {error}")
