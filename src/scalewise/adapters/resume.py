"""An adapter that was trained before: what it was, and its weights into any layout's module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scalewise.adapters import peft_import
from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.checkpoints import store
from scalewise.config import registry
from scalewise.config.renamed_targets import RENAMED_TARGETS, rename_targets
from scalewise.errors import ConfigError, ConfigIssue, format_value
from scalewise.models import init
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule
from scalewise.models.decoder.config import DecoderConfig
from scalewise.tracking.run_files import load_yaml
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

KEY = "adapter.resume"
NONE = f"or {KEY}=null"


def resume_issues(current_adapter: AdapterConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields all that keeps a run from beginning with the adapter at ``now.resume``."""
    path = Path(str(current_adapter.resume))
    if not path.exists():
        yield ConfigIssue(
            KEY, current_adapter.resume, "there is no such folder", f"give a path, {NONE}"
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
            reason = "is a folder of PEFT's, which goes into the suite's own decoder alone"
            yield ConfigIssue(
                KEY, current_adapter.resume, reason, f"give the folder of a run, {NONE}"
            )
        else:
            then = peft_import.infer_config(path, run.model, current_adapter)
            wrong = list(
                _difference_issues(current_adapter, then, run.model, run.choices.get("adapter"))
            )
            yield from wrong or peft_import.shape_issues(path, current_adapter, run.model)
    except ConfigError as error:
        for found in error.issues:
            yield ConfigIssue(KEY, current_adapter.resume, found.reason, found.fix)


@torch.no_grad()
def load_adapter(module: ModelModule, resume: str, model: ModelConfig) -> None:
    """Gives what is trained of a module, sharded or not, the values at ``resume``."""
    held = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for name, tensor in load_tensors(Path(resume), held, model).items():
        init.copy_into(held[name], tensor)


def load_tensors(path: Path, names: Iterable[str], model: ModelConfig) -> dict[str, Tensor]:
    """Returns whole tensors of an adapter by their names in the module.

    Raises ``ConfigError`` for what cannot be read.
    """
    if (path / peft_import.CONFIG).is_file():
        return peft_import.load_tensors(path, names, model)
    kept = [f"model.{name}" for name in names]
    optimizer = _parse_config(_resolved_config(path)["optimizer"])
    held = store.released_weights(path, kept)
    if optimizer.averages_weights:
        held = optimizer.average_weights(held, store.full_tensors(path, "optimizer"))
    return {name.removeprefix("model."): tensor for name, tensor in held.items()}


def _resolved_config(checkpoint: Path) -> Mapping[str, Any]:
    values = load_yaml(checkpoint.parents[1] / "resolved.yaml")
    if not values:
        raise ConfigError.for_key(KEY, checkpoint, "is of a run without a resolved.yaml")
    if not {"model", "adapter", "optimizer"} <= values.keys():
        raise ConfigError.for_key(KEY, checkpoint, "is of a run whose resolved.yaml is damaged")
    return rename_targets(values, RENAMED_TARGETS)


def _adapter_of_run(checkpoint: Path) -> AdapterConfig:
    """Returns the adapter of a run; raises ``ConfigError`` where it has none."""
    found: AdapterConfig = _parse_config(_resolved_config(checkpoint)["adapter"])
    if isinstance(found, NoAdapterConfig):
        reason = "is of a run that trained no adapter"
        raise ConfigError.for_key(
            KEY, checkpoint, reason, f"set model.weights to an export, {NONE}"
        )
    return found


def _parse_config(values: Mapping[str, Any]) -> Any:
    """Returns a spec as it was recorded, by fields that it still has."""
    registry.import_options()
    kind = registry.registered_targets().get(str(values.get("_target_")))
    if kind is None:
        raise ConfigError.for_key(
            KEY, values.get("_target_"), "is of a spec that is not known here"
        )
    known = {entry.name for entry in fields(kind)} & values.keys()
    given = {name: values[name] for name in known}
    return kind(**{key: tuple(it) if isinstance(it, list) else it for key, it in given.items()})


def _base_model_issues(
    run: RunConfig, checkpoint: Path, recorded_config: Mapping[str, Any]
) -> Iterator[ConfigIssue]:
    """Yields how the frozen weights were others, but for formats."""
    now = run.as_dict()
    for key, before in recorded_config["model"].items():
        after = now["model"].get(key)  # type: ignore[attr-defined]  # plain containers
        if key == "weights" and before is not None and after is not None:
            before, after = (str(Path(path).expanduser().absolute()) for path in (before, after))
        if before != after and key != "dropout":
            yield _field_issue(f"model.{key}", after, before, checkpoint)
    if recorded_config["model"].get("weights") is None and recorded_config.get("seed") != run.seed:
        yield _field_issue("seed", run.seed, recorded_config.get("seed"), checkpoint)


def _difference_issues(
    current_adapter: AdapterConfig,
    recorded_adapter: AdapterConfig,
    model: ModelConfig,
    option: str | None,
) -> Iterator[ConfigIssue]:
    """Yields what the two train differently, with the overrides that mend it."""
    names = {kind: name for name, kind in registry.OPTIONS["adapter"].items()}
    if type(current_adapter) is not type(recorded_adapter):
        yield _field_issue("adapter", option, names[type(recorded_adapter)], current_adapter.resume)
    for key in ("rank", "alpha", "tokens"):
        before, after = (vars(spec).get(key) for spec in (recorded_adapter, current_adapter))
        if None not in (before, after) and before != after:
            yield _field_issue(f"adapter.{key}", after, before, current_adapter.resume)
    layers = [
        {*spec.adapted_layers(model), *spec.scaled_layers(model)}
        for spec in (current_adapter, recorded_adapter)
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
        key, current_value, reason, f"set {format_override(key, recorded_value)}, {NONE}"
    )
