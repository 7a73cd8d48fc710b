"""An adapter that was trained before: what it was, and its weights into any layout's module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor

from scalewise import bounded_yaml, regular_files
from scalewise.adapters import peft_folder
from scalewise.adapters.spec import Adapter, NoAdapter
from scalewise.checkpoints import store
from scalewise.config import registry
from scalewise.errors import Complaint, ConfigError, as_typed
from scalewise.models import initial
from scalewise.models.base import Model
from scalewise.models.decoder.spec import Decoder
from scalewise.models.module import ModelModule
from scalewise.typed_override import typed

if TYPE_CHECKING:
    from scalewise.run import Run

KEY = "adapter.resume"
NONE = f"or {KEY}=null"


def complaints(now: Adapter, run: Run) -> Iterator[Complaint]:
    """Yields all that keeps a run from beginning with the adapter at ``now.resume``."""
    path = Path(str(now.resume))
    if not path.exists():
        yield Complaint(KEY, now.resume, "there is no such folder", f"give a path, {NONE}")
        return
    try:
        if not (path / peft_folder.CONFIG).is_file():
            store.verify(path)
            yield from _of_another_model(run, path, _resolved(path))
            yield from _differences(now, _trained(path), run.model, run.choices.get("adapter"))
        elif not isinstance(run.model, Decoder):
            reason = "is a folder of PEFT's, which goes into the suite's own decoder alone"
            yield Complaint(KEY, now.resume, reason, f"give the folder of a run, {NONE}")
        else:
            then = peft_folder.spec(path, run.model, now)
            wrong = list(_differences(now, then, run.model, run.choices.get("adapter")))
            yield from wrong or peft_folder.misfits(path, now, run.model)
    except ConfigError as error:
        for found in error.complaints:
            yield Complaint(KEY, now.resume, found.reason, found.cure)


@torch.no_grad()
def load(module: ModelModule, resume: str, model: Model) -> None:
    """Gives what is trained of a module, sharded or not, the values at ``resume``."""
    held = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for name, tensor in tensors(Path(resume), held, model).items():
        initial.put(held[name], tensor)


def tensors(path: Path, names: Iterable[str], model: Model) -> dict[str, Tensor]:
    """Returns whole tensors of an adapter by their names in the module.

    Raises ``ConfigError`` for what cannot be read.
    """
    if (path / peft_folder.CONFIG).is_file():
        return peft_folder.tensors(path, names, model)
    kept = [f"model.{name}" for name in names]
    optimizer = _spec(_resolved(path)["optimizer"])
    held = store.given_away(path, kept)
    if optimizer.averages:
        held = optimizer.averaged(held, store.whole(path, "optimizer"))
    return {name.removeprefix("model."): tensor for name, tensor in held.items()}


def _resolved(checkpoint: Path) -> Mapping[str, Any]:
    try:
        values = bounded_yaml.load(regular_files.read_text(checkpoint.parents[1] / "resolved.yaml"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError.one(KEY, checkpoint, "is of a run without a resolved.yaml") from error
    if not isinstance(values, Mapping) or not {"model", "adapter", "optimizer"} <= values.keys():
        raise ConfigError.one(KEY, checkpoint, "is of a run whose resolved.yaml is damaged")
    return values


def _trained(checkpoint: Path) -> Adapter:
    """Returns the adapter of a run; raises ``ConfigError`` where it has none."""
    found: Adapter = _spec(_resolved(checkpoint)["adapter"])
    if isinstance(found, NoAdapter):
        reason = "is of a run that trained no adapter"
        raise ConfigError.one(KEY, checkpoint, reason, f"set model.weights to an export, {NONE}")
    return found


def _spec(values: Mapping[str, Any]) -> Any:
    """Returns a spec as it was recorded, by fields that it still has."""
    registry.discover()
    kind = registry.targets().get(str(values.get("_target_")))
    if kind is None:
        raise ConfigError.one(KEY, values.get("_target_"), "is of a spec that is not known here")
    known = {entry.name for entry in fields(kind)} & values.keys()
    given = {name: values[name] for name in known}
    return kind(**{key: tuple(it) if isinstance(it, list) else it for key, it in given.items()})


def _of_another_model(run: Run, checkpoint: Path, then: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yields how the frozen weights were others, but for formats."""
    now = run.as_dict()
    for key, before in then["model"].items():
        after = now["model"].get(key)  # type: ignore[attr-defined]  # plain containers
        if key == "weights" and before is not None and after is not None:
            before, after = (str(Path(path).expanduser().absolute()) for path in (before, after))
        if before != after and key != "dropout":
            yield _difference(f"model.{key}", after, before, checkpoint)
    if then["model"].get("weights") is None and then.get("seed") != run.seed:
        yield _difference("seed", run.seed, then.get("seed"), checkpoint)


def _differences(
    now: Adapter, then: Adapter, model: Model, chosen: str | None
) -> Iterator[Complaint]:
    """Yields what the two train differently, with the overrides that mend it."""
    names = {kind: name for name, kind in registry.OPTIONS["adapter"].items()}
    if type(now) is not type(then):
        yield _difference("adapter", chosen, names[type(then)], now.resume)
    for key in ("rank", "alpha", "tokens"):
        before, after = (vars(spec).get(key) for spec in (then, now))
        if None not in (before, after) and before != after:
            yield _difference(f"adapter.{key}", after, before, now.resume)
    layers = [{*spec.adapted(model), *spec.scaled(model)} for spec in (now, then)]
    if layers[0] != layers[1] and now.targets != then.targets:
        yield _difference("adapter.targets", now.targets, then.targets, now.resume)
    if now.whole(model) != then.whole(model):
        yield _difference("adapter.trained", now.trained, then.trained, now.resume)


def _difference(key: str, now: object, then: object, where: object) -> Complaint:
    reason = f"the adapter at {where} was trained with {as_typed(then)}"
    return Complaint(key, now, reason, f"set {typed(key, then)}, {NONE}")
