"""A run's folder to a folder that transformers, or PEFT, loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from scalewise.adapters import Adapter, Lora
from scalewise.adapters.low_rank import Pissa
from scalewise.checkpoints import store
from scalewise.data.base import Data
from scalewise.errors import ConfigError, DataError
from scalewise.exports import Form
from scalewise.exports.card import card
from scalewise.models.decoder import weights
from scalewise.models.decoder.spec import Decoder
from scalewise.tracking.files import read_json, write_json

SPECS = ("model", "adapter", "data")
"""The groups that an export goes by."""

PREFIX = "model."
"""What a checkpoint's names begin with."""


@dataclass(frozen=True)
class Exported:
    """A checkpoint of a run, and the specs that it was trained by."""

    folder: Path
    checkpoint: Path
    model: Decoder
    adapter: Adapter
    data: Data
    seed: int

    def state(self) -> dict[str, Tensor]:
        """Returns the checkpoint's weights, whole, by the model's own names."""
        held = store.whole(self.checkpoint)
        return {name.removeprefix(PREFIX): tensor for name, tensor in held.items()}


def resolved(folder: Path) -> Mapping[str, Any]:
    """Returns the groups of a run's ``resolved.yaml``; raises ``ConfigError`` where it has none."""
    try:
        values = yaml.safe_load((folder / "resolved.yaml").read_text("utf-8"))
    except (OSError, yaml.YAMLError):
        values = None
    if not isinstance(values, Mapping) or not {*SPECS, "seed"} <= set(values):
        reason = f"{folder} is no folder of a run: it has no readable resolved.yaml"
        raise ConfigError.one("", "", reason, "scalewise export runs/NAME/TIMESTAMP")
    return values


def checkpoint(folder: Path, step: str) -> Path:
    """Returns the ``last`` checkpoint of a run, its ``best``, or a step's; all of it is there."""
    checkpoints = folder / "checkpoints"
    known = store.steps(checkpoints)
    if step == "best":
        best = store.best_of(checkpoints)
        found = known.get(best[0]) if best else None
    elif step == "last":
        found = store.latest(checkpoints)
    else:
        found = known.get(int(step)) if step.isdecimal() else None
    if found is None:
        cure = f"choose one of step={', '.join(map(str, (*known, 'last')))}" if known else ""
        raise ConfigError.one("step", step, f"{folder} has no such checkpoint", cure)
    store.verify(found)
    return found


def write(told: Exported, to: Path, form: Form) -> list[str]:
    """Writes the folder ``to``: weights, configuration, tokenizer, card; returns what it lacks.

    Raises ``ConfigError`` where the format has no place for it, before anything is written.
    """
    model, adapter, state = told.model, told.adapter, told.state()
    if form is Form.alone:
        _write_alone(model, adapter, state, to)
    elif isinstance(adapter, Lora):
        from scalewise.adapters import lora

        weights.export(lora.merged(state, adapter, model), model, to)
    else:
        weights.export(state, model, to)
    status, summary = (read_json(told.folder / f"{name}.json") for name in ("status", "summary"))
    library = "peft" if form is Form.alone else "transformers"
    step = store.verify(told.checkpoint)
    (to / "README.md").write_text(card(status, summary, step, library), "utf-8")
    return _write_tokenizer(told, to)


def _write_alone(model: Decoder, adapter: Adapter, state: dict[str, Tensor], to: Path) -> None:
    if not isinstance(adapter, Lora) or isinstance(adapter, Pissa):
        reason = "the run has trained no adapter"
        if isinstance(adapter, Pissa):
            reason = "PiSSA has changed the matrices that its products belong to"
        raise ConfigError.one("adapter", Form.alone, reason, "set adapter=merged")
    from scalewise.adapters import exported

    base = model.weights or str(to / "base")
    exported.export(state, adapter, model, to, base)
    if model.weights is None:  # drawn from a seed: nobody else has it
        own = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
        weights.export(own, model, to / "base")


def _write_tokenizer(told: Exported, to: Path) -> list[str]:
    """Copies the tokenizer beside the weights; returns why there is none."""
    try:
        file = told.data.prepare(told.model.vocabulary, told.seed).tokenizer
    except (DataError, OSError) as error:
        return [f"no tokenizer: {error}"]
    if file is None:
        return ["no tokenizer: the data were token ids"]
    shutil.copyfile(file, to / "tokenizer.json")
    special = [it["content"] for it in json.loads(file.read_text("utf-8"))["added_tokens"]]
    ends = {"eos_token": special[0]} if len(special) == 1 else {}
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": told.model.context}
    write_json(to / "tokenizer_config.json", {**facts, **ends})
    return []
