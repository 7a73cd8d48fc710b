"""Application and initialization of adapters, dispatched on the adapter config."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.models.base import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.base_module import ModelModule


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
