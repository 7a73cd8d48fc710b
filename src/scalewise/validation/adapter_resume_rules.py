"""Rules between a run and the trained adapter from which it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalewise import registry, regular_files
from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.checkpoints import manifest, peft_import
from scalewise.checkpoints.initial_parameters import KEY, parse_config, resolved_config
from scalewise.errors import ConfigError, ConfigIssue, format_value
from scalewise.models.base import ModelConfig
from scalewise.models.decoder.config import DecoderConfig
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override
from scalewise.validation.adapter_rules import TrainedAdapter, resume_issues

OR_NULL = f"or {KEY}=null"


@resume_issues.register(TrainedAdapter)
def _resume_issues(trained_adapter: TrainedAdapter, run: RunConfig) -> Iterator[ConfigIssue]:
    path, current_adapter = Path(trained_adapter.path), run.adapter
    if not path.exists():
        yield ConfigIssue(
            KEY, trained_adapter.path, "is not an existing folder", f"give a path, {OR_NULL}"
        )
        return
    try:
        if not (path / peft_import.CONFIG).is_file():
            manifest.verify_checkpoint(path)
            yield from _base_model_issues(run, path, resolved_config(path))
            yield from _difference_issues(
                current_adapter, _adapter_of_run(path), run.model, run.option("adapter")
            )
        elif not isinstance(run.model, DecoderConfig):
            reason = "is a PEFT folder, which is supported for decoder models only"
            yield ConfigIssue(
                KEY, trained_adapter.path, reason, f"give the folder of a run, {OR_NULL}"
            )
        else:
            recorded_adapter = peft_import.infer_config(path, run.model, current_adapter)
            issues = list(
                _difference_issues(
                    current_adapter, recorded_adapter, run.model, run.option("adapter")
                )
            )
            yield from issues or peft_import.shape_issues(path, current_adapter, run.model)
    except ConfigError as error:
        for issue in error.issues:
            yield ConfigIssue(KEY, trained_adapter.path, issue.reason, issue.fix)


def _adapter_of_run(checkpoint: Path) -> AdapterConfig:
    """Adapter config of a run; raises ``ConfigError`` if it has no adapter."""
    adapter: AdapterConfig = parse_config(resolved_config(checkpoint)["adapter"])
    if isinstance(adapter, NoAdapterConfig):
        reason = "belongs to a run without adapter"
        raise ConfigError.for_key(
            KEY, checkpoint, reason, f"set model.weights to an export, {OR_NULL}"
        )
    return adapter


def _base_model_issues(
    run: RunConfig, checkpoint: Path, recorded_config: Mapping[str, Any]
) -> Iterator[ConfigIssue]:
    """Yield an issue for each field by which the frozen weights differ; data types may differ."""
    current_config = run.as_dict()
    for key, recorded in recorded_config["model"].items():
        current = current_config["model"].get(key)  # type: ignore[attr-defined]  # plain containers
        if key == "weights" and recorded is not None and current is not None:
            recorded, current = (
                str(regular_files.expand_home(path).absolute()) for path in (recorded, current)
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
