"""Trained parameters of prompt tuning and prefix tuning in a module."""

from __future__ import annotations

from scalewise.adapters.build import apply_adapter, init_adapter
from scalewise.adapters.prompt_tuning import (
    PrefixAdapterConfig,
    PromptAdapterConfig,
    VirtualTokenAdapterConfig,
)
from scalewise.models import init
from scalewise.models.base import ModelConfig, is_adapter_weight
from scalewise.models.base_module import ModelModule


@apply_adapter.register(PromptAdapterConfig)
def _add_prompt(config: PromptAdapterConfig, module: ModelModule, model: ModelConfig) -> None:
    module.requires_grad_(False)
    module.add_prompt_tokens(config.tokens)


@apply_adapter.register(PrefixAdapterConfig)
def _add_prefix(config: PrefixAdapterConfig, module: ModelModule, model: ModelConfig) -> None:
    module.requires_grad_(False)
    module.add_prefix_kv(config.tokens)


@init_adapter.register(VirtualTokenAdapterConfig)
def _init_vectors(config: VirtualTokenAdapterConfig, module: ModelModule, seed: int) -> None:
    """Draw the trained vectors from a standard normal distribution."""
    for name, parameter in module.named_parameters():
        if is_adapter_weight(name):
            init.init_normal(name, parameter, seed, 1.0)
