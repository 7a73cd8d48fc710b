"""Application and initialization of adapters; those of prompt tuning and prefix tuning."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.adapters.prompt_config import (
    PrefixAdapterConfig,
    PromptAdapterConfig,
    VirtualTokenAdapterConfig,
)
from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.models import init
from scalewise.models.base import ModelConfig, is_adapter_weight
from scalewise.models.base_module import ModelModule

if TYPE_CHECKING:
    from torch import Tensor


@lazy_dispatch
def apply_adapter(config: AdapterConfig, module: ModelModule, model: ModelConfig) -> None:
    """Freeze and add parameters in a model or stage on the meta device, in place."""
    raise not_registered(apply_adapter, config)


@lazy_dispatch
def init_adapter(config: AdapterConfig, module: ModelModule, seed: int) -> None:
    """Initialize the added parameters of a materialized module, sharded or not."""
    raise not_registered(init_adapter, config)


@lazy_dispatch
def disable_adapter(config: AdapterConfig, module: ModelModule) -> AbstractContextManager[None]:
    """Context in which a module computes without adapter."""
    raise not_registered(disable_adapter, config)


@lazy_dispatch
def merge_adapter(
    config: AdapterConfig, state: Mapping[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    """Weights of the model without adapter that compute the same function."""
    return dict(state)


@apply_adapter.register(NoAdapterConfig)
def _apply_none(config: NoAdapterConfig, module: ModelModule, model: ModelConfig) -> None:
    """Leave all parameters trainable."""


@init_adapter.register(NoAdapterConfig)
def _init_none(config: NoAdapterConfig, module: ModelModule, seed: int) -> None:
    """Initialize nothing: no parameter is added."""


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
