"""Initial parameters of a model and its adapter, which may be a trained one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalewise import registry
from scalewise.adapters.build import init_adapter
from scalewise.adapters.config import AdapterConfig
from scalewise.checkpoints import peft_import, store
from scalewise.errors import ConfigError
from scalewise.models import init
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule
from scalewise.models.build import init_weights
from scalewise.optimizers.build import average_weights
from scalewise.renamed_targets import RENAMED_TARGETS, rename_targets
from scalewise.run_files import load_yaml

KEY = "adapter.resume"


@torch.no_grad()
def init_parameters(
    module: ModelModule, model: ModelConfig, adapter: AdapterConfig, seed: int
) -> None:
    """Initialize a materialized module with its adapter, sharded or not, or load their weights."""
    init_weights(model, module, seed)
    init_adapter(adapter, module, seed)
    if adapter.resume is None:
        return
    parameters = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for name, tensor in load_tensors(Path(adapter.resume), parameters, model).items():
        init.copy_into(parameters[name], tensor)


def load_tensors(path: Path, names: Iterable[str], model: ModelConfig) -> dict[str, Tensor]:
    """Unsharded tensors of an adapter by their names in the module.

    Raises ``ConfigError`` if one is missing or invalid.
    """
    if (path / peft_import.CONFIG).is_file():
        return peft_import.load_tensors(path, names, model)
    full_names = [f"model.{name}" for name in names]
    optimizer = parse_config(resolved_config(path)["optimizer"])
    tensors = store.released_weights(path, full_names)
    if optimizer.averages_weights:
        tensors = average_weights(optimizer, tensors, store.full_tensors(path, "optimizer"))
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def resolved_config(checkpoint: Path) -> Mapping[str, Any]:
    """Config of the run that wrote a checkpoint; raises ``ConfigError`` if it is damaged."""
    values = load_yaml(checkpoint.parents[1] / "resolved.yaml")
    if not values:
        raise ConfigError.for_key(KEY, checkpoint, "belongs to a run without resolved.yaml")
    if not {"model", "adapter", "optimizer"} <= values.keys():
        raise ConfigError.for_key(
            KEY, checkpoint, "belongs to a run whose resolved.yaml is damaged"
        )
    return rename_targets(values, RENAMED_TARGETS)


def parse_config(values: Mapping[str, Any]) -> Any:
    """Config from its recorded values; fields that no longer exist are ignored."""
    registry.import_options()
    config_class = registry.registered_targets().get(str(values.get("_target_")))
    if config_class is None:
        raise ConfigError.for_key(KEY, values.get("_target_"), "is not a registered option class")
    field_names = {entry.name for entry in fields(config_class)} & values.keys()
    arguments = {name: values[name] for name in field_names}
    return config_class(
        **{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in arguments.items()
        }
    )
