"""Initial parameters of a model and its adapter, which may be a trained one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scalewise import registry
from scalewise.adapters.build import init_adapter
from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.checkpoints import peft_import, store
from scalewise.errors import ConfigError, ConfigIssue, format_value
from scalewise.models import init
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule
from scalewise.models.build import init_weights
from scalewise.models.decoder.config import DecoderConfig
from scalewise.optimizers.build import average_weights
from scalewise.renamed_targets import RENAMED_TARGETS, rename_targets
from scalewise.tracking.run_files import load_yaml
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

KEY = "adapter.resume"
OR_NULL = f"or {KEY}=null"


def resume_issues(current_adapter: AdapterConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield each reason why a run cannot start from the adapter at ``current_adapter.resume``."""
    path = Path(str(current_adapter.resume))
    if not path.exists():
        yield ConfigIssue(
            KEY, current_adapter.resume, "is not an existing folder", f"give a path, {OR_NULL}"
        )
        return
    try:
        if not (path / peft_import.CONFIG).is_file():
            store.verify_checkpoint(path)
            yield from _base_model_issues(run, path, _resolved_config(path))
            yield from _difference_issues(
                current_adapter, _adapter_of_run(path), run.model, run.choices.get("adapter")
            )
        elif not isinstance(run.model, DecoderConfig):
            reason = "is a PEFT folder, which is supported for decoder models only"
            yield ConfigIssue(
                KEY, current_adapter.resume, reason, f"give the folder of a run, {OR_NULL}"
            )
        else:
            recorded_adapter = peft_import.infer_config(path, run.model, current_adapter)
            issues = list(
                _difference_issues(
                    current_adapter, recorded_adapter, run.model, run.choices.get("adapter")
                )
            )
            yield from issues or peft_import.shape_issues(path, current_adapter, run.model)
    except ConfigError as error:
        for issue in error.issues:
            yield ConfigIssue(KEY, current_adapter.resume, issue.reason, issue.fix)


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
    optimizer = _parse_config(_resolved_config(path)["optimizer"])
    tensors = store.released_weights(path, full_names)
    if optimizer.averages_weights:
        tensors = average_weights(optimizer, tensors, store.full_tensors(path, "optimizer"))
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _resolved_config(checkpoint: Path) -> Mapping[str, Any]:
    values = load_yaml(checkpoint.parents[1] / "resolved.yaml")
    if not values:
        raise ConfigError.for_key(KEY, checkpoint, "belongs to a run without resolved.yaml")
    if not {"model", "adapter", "optimizer"} <= values.keys():
        raise ConfigError.for_key(
            KEY, checkpoint, "belongs to a run whose resolved.yaml is damaged"
        )
    return rename_targets(values, RENAMED_TARGETS)


def _adapter_of_run(checkpoint: Path) -> AdapterConfig:
    """Adapter config of a run; raises ``ConfigError`` if it has no adapter."""
    adapter: AdapterConfig = _parse_config(_resolved_config(checkpoint)["adapter"])
    if isinstance(adapter, NoAdapterConfig):
        reason = "belongs to a run without adapter"
        raise ConfigError.for_key(
            KEY, checkpoint, reason, f"set model.weights to an export, {OR_NULL}"
        )
    return adapter


def _parse_config(values: Mapping[str, Any]) -> Any:
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


def _base_model_issues(
    run: RunConfig, checkpoint: Path, recorded_config: Mapping[str, Any]
) -> Iterator[ConfigIssue]:
    """Yield an issue for each field by which the frozen weights differ; data types may differ."""
    current_config = run.as_dict()
    for key, recorded in recorded_config["model"].items():
        current = current_config["model"].get(key)  # type: ignore[attr-defined]  # plain containers
        if key == "weights" and recorded is not None and current is not None:
            recorded, current = (
                str(Path(path).expanduser().absolute()) for path in (recorded, current)
            )
        if recorded != current and key != "dropout":
            yield _field_issue(f"model.{key}", current, recorded, checkpoint)
    if recorded_config["model"].get("weights") is None and recorded_config.get("seed") != run.seed:
        yield _field_issue("seed", run.seed, recorded_config.get("seed"), checkpoint)


def _difference_issues(
    current_adapter: AdapterConfig,
    recorded_adapter: AdapterConfig,
    model: ModelConfig,
    option: str | None,
) -> Iterator[ConfigIssue]:
    """Yield an issue for each field that both adapters train differently, with the override."""
    option_names = {
        adapter_class: name for name, adapter_class in registry.OPTIONS["adapter"].items()
    }
    if type(current_adapter) is not type(recorded_adapter):
        yield _field_issue(
            "adapter", option, option_names[type(recorded_adapter)], current_adapter.resume
        )
    for key in ("rank", "alpha", "tokens"):
        recorded, current = (
            vars(adapter).get(key) for adapter in (recorded_adapter, current_adapter)
        )
        if None not in (recorded, current) and recorded != current:
            yield _field_issue(f"adapter.{key}", current, recorded, current_adapter.resume)
    layers = [
        {*adapter.adapted_layers(model), *adapter.scaled_layers(model)}
        for adapter in (current_adapter, recorded_adapter)
    ]
    if layers[0] != layers[1] and current_adapter.targets != recorded_adapter.targets:
        yield _field_issue(
            "adapter.targets",
            current_adapter.targets,
            recorded_adapter.targets,
            current_adapter.resume,
        )
    if current_adapter.fully_trained_modules(model) != recorded_adapter.fully_trained_modules(
        model
    ):
        yield _field_issue(
            "adapter.trained",
            current_adapter.trained,
            recorded_adapter.trained,
            current_adapter.resume,
        )


def _field_issue(
    key: str, current_value: object, recorded_value: object, source: object
) -> ConfigIssue:
    reason = f"the adapter at {source} was trained with {format_value(recorded_value)}"
    return ConfigIssue(
        key, current_value, reason, f"set {format_override(key, recorded_value)}, {OR_NULL}"
    )
