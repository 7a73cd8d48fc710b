"""What a run has trained: one of its checkpoints, and the specs that it was trained by."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalewise import inputs
from scalewise.adapters import AdapterConfig
from scalewise.checkpoints import store
from scalewise.config import registry
from scalewise.config.renamed_targets import RENAMED_TARGETS, rename_targets
from scalewise.console import print_lines
from scalewise.data import run_tokenizer
from scalewise.data.base import DataConfig, DataSplits
from scalewise.errors import CheckpointError, ConfigError
from scalewise.models.base import ModelConfig, StageSlice, Weight
from scalewise.objectives import ObjectiveConfig
from scalewise.optimizers import OptimizerConfig
from scalewise.precision import Precision
from scalewise.quantization import NoQuantizationConfig, QuantizationConfig
from scalewise.tracking.run_files import RecordError, load_yaml
from scalewise.trainer_config import TrainerConfig

SPECS = (
    "model",
    "data",
    "objective",
    "precision",
    "optimizer",
    "adapter",
    "trainer",
    "quantization",
)
"""The groups that a trained model goes by, as ``Trained`` has them."""
PREFIX = "model."
"""What a checkpoint's names begin with."""
UNPACKED = {"_target_": registry.target_name(NoQuantizationConfig)}
BEGINNING = "0"
"""The step of the model as it was before it was trained."""


@dataclass(frozen=True)
class TrainedRun:
    """A checkpoint of a run, and the specs that it was trained by; None: as the run began."""

    folder: Path
    checkpoint: Path | None
    seed: int
    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig
    precision: Precision
    optimizer: OptimizerConfig
    adapter: AdapterConfig
    trainer: TrainerConfig
    quantization: QuantizationConfig

    @property
    def step(self) -> int:
        """Returns the optimizer steps that the checkpoint has seen."""
        return store.step_of(self.checkpoint) if self.checkpoint else 0

    @property
    def is_averaged(self) -> bool:
        """Returns whether the weights to give away are a moving average of those trained."""
        return self.checkpoint is not None and store.has_tensors(self.checkpoint, store.AVERAGE)

    @property
    def tensor_folders(self) -> tuple[str, ...]:
        """Returns the folders of a checkpoint that hold the weights to give away."""
        weights = ("model", store.AVERAGE)
        return (*weights, "optimizer") if self.optimizer.averages_weights else weights

    def load_splits(self) -> DataSplits:
        """Returns the rows that the run read; raises ``DataError`` where they are others."""
        found = self.data.prepare(self.model.vocabulary, self.seed)
        run_tokenizer.check_tokenizer(found, self.folder)
        inputs.check_data(self.data, self.folder)
        return found

    def find_tokenizer(self) -> Path | None:
        """Returns the tokenizer.json that reads the run's ids; None where they were never text."""
        own = self.folder / run_tokenizer.NAME
        if not own.is_file():
            return self.load_splits().tokenizer
        run_tokenizer.load_tokenizer(own)
        return own

    def read_state_dict(self, *, unquantized: bool = False) -> dict[str, Tensor]:
        """Returns the weights to give away, whole and unpacked, by the model's own names.

        ``unquantized``: with the matrices that were packed as they had been before.
        """
        if self.checkpoint is None:
            began = self._initial_state_dict()
            return began if unquantized else self.quantization.round_state_dict(began, self.model)
        held = store.released_weights(self.checkpoint)
        with checkpoint_errors(self.checkpoint):
            if self.optimizer.averages_weights:
                held = self.optimizer.average_weights(
                    held, store.full_tensors(self.checkpoint, "optimizer")
                )
            state = {name.removeprefix(PREFIX): tensor for name, tensor in held.items()}
            state = self.quantization.unpack_state_dict(state, self.model)
        if unquantized and self.packed_weights:
            began = self.model.build(self.seed).state_dict()
            state |= {weight.name: began[weight.name] for weight in self.packed_weights}
        return state

    def read_merged_state_dict(self, *, unquantized: bool = False) -> dict[str, Tensor]:
        """Returns the same with what an adapter has learnt added to the model's own."""
        if self.checkpoint is None and self.adapter.resume is None:
            return self.read_state_dict(unquantized=unquantized)
        with checkpoint_errors(self.checkpoint):
            merged = self.adapter.merge_weights(
                self.read_state_dict(unquantized=unquantized), self.model
            )
        if self.adapter.merges:
            self._check_shapes(merged)
        return merged

    def _check_shapes(self, state: Mapping[str, Tensor]) -> None:
        """Raises ``CheckpointError`` for weights that are missing or of another shape."""
        whole = self.model.build_meta(StageSlice(range(self.model.layers))).state_dict()
        for name, weight in whole.items():
            if name not in state:
                raise _other_model_error(self.checkpoint, f"lacks {name}")
            if state[name].shape != weight.shape:
                sizes = f"{tuple(state[name].shape)}, the model has {tuple(weight.shape)}"
                raise _other_model_error(self.checkpoint, f"holds {name} of shape {sizes}")

    def _initial_state_dict(self) -> dict[str, Tensor]:
        """Returns the weights that training began with; of an adapter, those it began with."""
        if self.adapter.resume is None and self.adapter.merges:
            return dict(self.model.build(self.seed).state_dict())
        module = self.model.build_meta(StageSlice(range(self.model.layers)))
        self.adapter.apply(module, self.model)
        module.to_empty(device=torch.get_default_device())
        self.model.init_weights(module, self.seed)
        self.adapter.init_or_load_weights(module, self.model, self.seed)
        held = module.state_dict().items()
        return {name.replace(".base_layer.", "."): tensor for name, tensor in held}

    @property
    def packed_weights(self) -> list[Weight]:
        """Returns the matrices that were packed."""
        census, packs = self.model.weight_census(), self.quantization.is_packed
        return [weight for weight in census if packs(weight, self.model)]

    @property
    def quantized_bytes(self) -> tuple[int, int]:
        """Returns the bytes of these as integers with their scales, and as they are held."""
        held = self.precision.parameters.bytes
        parts = [
            part
            for weight in self.fake_quantized_weights
            for part in self.quantization.packed_parts(weight)
        ]
        return sum(part.shard_bytes(held) for part in parts), sum(
            weight.shard_bytes(held) for weight in self.fake_quantized_weights
        )

    @property
    def fake_quantized_weights(self) -> list[Weight]:
        """Returns the matrices that were rounded for each product."""
        census, rounds = self.model.weight_census(), self.quantization.is_fake_quantized
        return [weight for weight in census if rounds(weight, self.model)]


@contextmanager
def checkpoint_errors(checkpoint: Path | None) -> Iterator[None]:
    """Turns what an incomplete checkpoint makes of a model into a ``CheckpointError``."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (KeyError, RuntimeError, ValueError, TypeError) as error:
        if checkpoint is None:
            raise
        raise _other_model_error(checkpoint, " ".join(str(error).split())[:200]) from error


def _other_model_error(checkpoint: Path | None, reason: str) -> CheckpointError:
    fix = "choose another step, or put a copy of the run's resolved.yaml back"
    text = f"{checkpoint} does not fit the model of its run: {reason}"
    return CheckpointError.for_key("", "", text, fix)


def read_resolved(folder: Path) -> Mapping[str, Any]:
    """Returns the groups of a run's ``resolved.yaml``; raises ``ConfigError`` where it has none."""
    file = folder / "resolved.yaml"
    if not file.exists():
        reason = f"{folder} is no folder of a run: it has no resolved.yaml"
        raise ConfigError.for_key("", "", reason, "give the folder of a run: runs/NAME/TIMESTAMP")
    # Quantization was no group at first.
    values: dict[str, Any] = {
        "quantization": UNPACKED,
        **rename_targets(load_yaml(file), RENAMED_TARGETS),
    }
    if missing := [key for key in (*SPECS, "seed") if key not in values]:
        raise RecordError.for_file(file, f"is damaged: it has no {missing[0]}")
    inputs.add_missing(values)
    return values


def choose_checkpoint(folder: Path, step: str, parts: Collection[str]) -> Path:
    """Returns the ``last`` checkpoint of a run, its ``best``, or a step's, with ``parts`` whole.

    ``parts``: the folders of tensors that are read. Of damage to the rest a note is printed.
    """
    checkpoints = folder / "checkpoints"
    known = store.list_checkpoints(checkpoints)
    best = store.best_checkpoint(checkpoints)
    if step == "last":
        numbers = [*reversed(known)]
    elif step == "best":
        numbers = [best[0]] if best else []
    else:
        numbers = [int(step)] if step.isdecimal() else []
    damages: list[str] = []
    for number in numbers:
        if (path := known.get(number)) is None:
            continue
        if damage := _damage(path, parts):
            damages.append(f"step {number} {damage}")
            continue
        if damages:
            print_lines(f"{damages[0]}; step {number} in its place")
        return path
    if damages:
        reason = f"no checkpoint of {folder} is whole: " if step == "last" else f"{folder}: "
        fix = "train anew, or copy one from a backup"
        if len(known) > len(damages):
            fix = "choose another step, or copy this one from a backup"
        raise CheckpointError.for_key("step", step, reason + ", ".join(damages), fix)
    names = [*map(str, known), "last", *(["best"] if best else [])]
    fix = f"choose one of step={', '.join(names)}" if known else "give the folder of another run"
    raise ConfigError.for_key("step", step, f"{folder} has no such checkpoint", fix)


def _damage(path: Path, parts: Collection[str]) -> str:
    """Returns why ``parts`` of a checkpoint cannot be read; notes damage to the rest alone."""
    try:
        damaged = {name: f"is damaged ({name}: {why})" for name, why in store.damaged_files(path)}
    except CheckpointError as error:
        return error.issues[0].reason
    needed = [text for name, text in damaged.items() if name.partition("/")[0] in parts]
    if needed:
        return needed[0]
    for text in [*damaged.values()][:1]:
        print_lines(f"note: the training state of {path} {text}; no run can resume from it")
    return ""
