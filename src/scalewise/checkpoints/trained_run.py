"""Trained model of a run: a checkpoint, and the configs and tokenizer that it was trained with."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from scalewise import inputs, registry
from scalewise.adapters import AdapterConfig
from scalewise.adapters.build import apply_adapter, merge_adapter
from scalewise.checkpoints import initial_parameters, manifest, store
from scalewise.data.base import DataConfig
from scalewise.data.prepare import DataSplits, prepare_splits
from scalewise.errors import CheckpointError, ConfigError, DataError
from scalewise.hardware import DeviceKind
from scalewise.models.base import ModelConfig, StageSlice, Weight
from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_meta, build_model
from scalewise.objectives import ObjectiveConfig
from scalewise.optimizers import OptimizerConfig
from scalewise.optimizers.build import average_weights
from scalewise.path_lock import PathLock
from scalewise.precision import FloatFormat, Precision
from scalewise.precision.build import apply_precision
from scalewise.quantization import NoQuantizationConfig, QuantizationConfig
from scalewise.quantization.build import apply_quantization, round_state_dict, unpack_state_dict
from scalewise.renamed_targets import RENAMED_TARGETS, rename_targets
from scalewise.run_files import RecordError, copy_file, load_json, load_yaml
from scalewise.trainer_config import TrainerConfig

logger = logging.getLogger(__name__)

CONFIG_GROUPS = (
    "model",
    "data",
    "objective",
    "precision",
    "optimizer",
    "adapter",
    "trainer",
    "quantization",
)
"""Config groups of a run that its trained model depends on; fields of ``TrainedRun``."""
PREFIX = "model."
"""Prefix of parameter names in a checkpoint."""
NO_QUANTIZATION = {"_target_": registry.target_name(NoQuantizationConfig)}
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class TrainedRun:
    """Checkpoint of a run, and the configs that it was trained with."""

    folder: Path
    """Run folder."""
    checkpoint: Path | None
    """Checkpoint folder; None: the initial, untrained model."""
    seed: int
    """Seed of the run."""
    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig
    precision: Precision
    optimizer: OptimizerConfig
    adapter: AdapterConfig
    trainer: TrainerConfig
    quantization: QuantizationConfig
    lock: PathLock | None = None
    """Lock on the checkpoint, which keeps a running run from removing it."""

    @property
    def step(self) -> int:
        """Optimizer step of the checkpoint."""
        return manifest.step_of(self.checkpoint) if self.checkpoint else 0

    @property
    def is_averaged(self) -> bool:
        """Whether the released weights are a moving average of the trained weights."""
        return self.checkpoint is not None and store.has_tensors(self.checkpoint, store.AVERAGE)

    @property
    def tensor_folders(self) -> tuple[str, ...]:
        """Folders of a checkpoint that the released weights are read from."""
        weights = ("model", store.AVERAGE)
        return (*weights, "optimizer") if self.optimizer.averages_weights else weights

    def load_splits(self) -> DataSplits:
        """Prepare the data of the run; raise ``DataError`` if they have changed."""
        splits = prepare_splits(self.data, self.model.vocabulary, self.seed)
        check_tokenizer(splits, self.folder)
        inputs.check_data(self.data, self.folder)
        return splits

    def find_tokenizer(self) -> Path | None:
        """Path of the tokenizer.json of the run; None: the data were token ids."""
        run_file = self.folder / TOKENIZER_FILE
        if not run_file.is_file():
            return self.load_splits().tokenizer
        load_tokenizer(run_file)
        return run_file

    def read_state_dict(self, *, unquantized: bool = False) -> dict[str, Tensor]:
        """Load the released weights, unsharded and dequantized, by the names of the model.

        Args:
            unquantized: Whether to restore quantized weights from before quantization.
        """
        if self.checkpoint is None:
            initial = self._initial_state_dict()
            if unquantized:
                return initial
            return round_state_dict(self.quantization, initial, self.model)
        weights = store.released_weights(self.checkpoint)
        with checkpoint_errors(self.checkpoint):
            if self.optimizer.averages_weights:
                weights = average_weights(
                    self.optimizer, weights, store.full_tensors(self.checkpoint, "optimizer")
                )
            state = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
            state = unpack_state_dict(self.quantization, state, self.model)
        if unquantized and self.packed_weights:
            initial = build_model(self.model, self.seed).state_dict()
            state |= {weight.name: initial[weight.name] for weight in self.packed_weights}
        return state

    def read_merged_state_dict(self, *, unquantized: bool = False) -> dict[str, Tensor]:
        """Load the released weights with the adapter merged into them, if it can be merged."""
        if self.checkpoint is None and self.adapter.resume is None:
            return self.read_state_dict(unquantized=unquantized)
        with checkpoint_errors(self.checkpoint):
            merged = merge_adapter(
                self.adapter, self.read_state_dict(unquantized=unquantized), self.model
            )
        if self.adapter.can_merge:
            self._check_shapes(merged)
        return merged

    def _check_shapes(self, state: Mapping[str, Tensor]) -> None:
        """Raise ``CheckpointError`` if a weight is missing or has another shape."""
        expected = build_meta(self.model, StageSlice(range(self.model.layers))).state_dict()
        for name, weight in expected.items():
            if name not in state:
                raise _other_model_error(self.checkpoint, f"lacks {name}")
            if state[name].shape != weight.shape:
                shapes = f"{tuple(state[name].shape)}, the model has {tuple(weight.shape)}"
                raise _other_model_error(self.checkpoint, f"{name} has shape {shapes}")

    def _initial_state_dict(self) -> dict[str, Tensor]:
        """Initial weights of the model and its adapter."""
        if self.adapter.resume is None and self.adapter.can_merge:
            return dict(build_model(self.model, self.seed).state_dict())
        module = build_meta(self.model, StageSlice(range(self.model.layers)))
        apply_adapter(self.adapter, module, self.model)
        module.to_empty(device=torch.get_default_device())
        initial_parameters.init_parameters(module, self.model, self.adapter, self.seed)
        tensors = module.state_dict().items()
        return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors}

    @property
    def packed_weights(self) -> list[Weight]:
        """Weights that the run has stored in a quantized format."""
        census, packs = self.model.weight_census(), self.quantization.is_packed
        return [weight for weight in census if packs(weight, self.model)]

    @property
    def quantized_bytes(self) -> tuple[int, int]:
        """Bytes of the fake-quantized weights: as integers with scales, and as stored."""
        element_bytes = self.precision.parameters.bytes
        parts = [
            part
            for weight in self.fake_quantized_weights
            for part in self.quantization.packed_parts(weight)
        ]
        return sum(part.shard_bytes(element_bytes) for part in parts), sum(
            weight.shard_bytes(element_bytes) for weight in self.fake_quantized_weights
        )

    @property
    def fake_quantized_weights(self) -> list[Weight]:
        """Weights that were fake-quantized during training."""
        census, rounds = self.model.weight_census(), self.quantization.is_fake_quantized
        return [weight for weight in census if rounds(weight, self.model)]


@contextmanager
def checkpoint_errors(checkpoint: Path | None) -> Iterator[None]:
    """Raise ``CheckpointError`` for errors that an incomplete checkpoint causes."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (KeyError, RuntimeError, ValueError, TypeError) as error:
        if checkpoint is None:
            raise
        raise _other_model_error(checkpoint, " ".join(str(error).split())[:200]) from error


def _other_model_error(checkpoint: Path | None, reason: str) -> CheckpointError:
    fix = "choose another step, or restore the run's resolved.yaml from a copy"
    text = f"{checkpoint} does not match the model of its run: {reason}"
    return CheckpointError.for_key("", "", text, fix)


def read_resolved(folder: Path) -> Mapping[str, Any]:
    """Read the config groups of a run from its ``resolved.yaml``.

    Raises:
        ConfigError: the folder has no ``resolved.yaml``.
        RecordError: the file lacks a group.
    """
    file = folder / "resolved.yaml"
    if not file.exists():
        reason = f"{folder} is not a run folder: it has no resolved.yaml"
        raise ConfigError.for_key("", "", reason, "choose a run folder: runs/NAME/TIMESTAMP")
    # Early runs have no quantization group.
    values: dict[str, Any] = {
        "quantization": NO_QUANTIZATION,
        **rename_targets(load_yaml(file), RENAMED_TARGETS),
    }
    if missing := [key for key in (*CONFIG_GROUPS, "seed") if key not in values]:
        raise RecordError.for_file(file, f"is damaged: it lacks {missing[0]}")
    inputs.add_missing(values)
    return values


def choose_checkpoint(folder: Path, step: str, parts: Collection[str]) -> tuple[Path, PathLock]:
    """Choose a checkpoint of a run, which may be running, and lock it.

    A running run removes no locked checkpoint. A note is printed if a damaged checkpoint is
    skipped, or if other files of it are damaged.

    Args:
        folder: Run folder.
        step: Optimizer step, ``last`` for the newest undamaged one, or ``best``.
        parts: Folders of tensors that must be undamaged.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: there is no such checkpoint.
    """
    checkpoints = folder / "checkpoints"
    locks = manifest.lock_checkpoints(checkpoints)
    best = manifest.best_checkpoint(checkpoints)
    if step == "last":
        steps = [*reversed(locks)]
    elif step == "best":
        steps = [best[0]] if best else []
    else:
        steps = [int(step)] if step.isdecimal() else []
    damages: list[str] = []
    for number in steps:
        if number not in locks:
            continue
        path = locks[number].path
        if damage := _damage(path, parts):
            damages.append(f"step {number} {damage}")
            continue
        if damages:
            logger.info(f"{damages[0]}; using step {number} instead")
        return path, locks[number]
    if damages:
        reason = f"all checkpoints of {folder} are damaged: "
        reason = reason if step == "last" else f"{folder}: "
        fix = "train again, or restore one from a backup"
        if len(locks) > len(damages):
            fix = "choose another step, or restore this one from a backup"
        raise CheckpointError.for_key("step", step, reason + ", ".join(damages), fix)
    names = [*map(str, locks), "last", *(["best"] if best else [])]
    fix = f"choose one of step={', '.join(names)}" if locks else "choose another run folder"
    raise ConfigError.for_key("step", step, f"{folder} has no such checkpoint", fix)


def _damage(path: Path, parts: Collection[str]) -> str:
    """Damage of ``parts`` of a checkpoint, or an empty text; logs other damage."""
    try:
        damaged = {
            name: f"is damaged ({name}: {reason})" for name, reason in manifest.damaged_files(path)
        }
    except CheckpointError as error:
        return error.issues[0].reason
    relevant = [text for name, text in damaged.items() if name.partition("/")[0] in parts]
    if relevant:
        return relevant[0]
    for text in [*damaged.values()][:1]:
        logger.info(f"note: the training state of {path} {text}; no run can resume from it")
    return ""


def load_model(
    trained_run: TrainedRun, device: torch.device, *, unquantized: bool = False
) -> ModelModule:
    """Load the unsharded model of a run for inference, with its adapter merged if possible.

    Args:
        trained_run: Run and checkpoint.
        device: Device of the model.
        unquantized: Whether to restore quantized weights from before quantization, and to disable
            fake quantization and fp8.
    """
    module = build_meta(trained_run.model, StageSlice(range(trained_run.model.layers)))
    if not trained_run.adapter.can_merge:
        apply_adapter(trained_run.adapter, module, trained_run.model)
    if not unquantized:
        apply_precision(trained_run.precision, module, trained_run.model, DeviceKind(device.type))
    if trained_run.fake_quantized_weights and not unquantized:
        apply_quantization(trained_run.quantization, module, trained_run.model)
    module.to_empty(device=device)
    module.init_buffers()
    state = trained_run.read_merged_state_dict(unquantized=unquantized)
    with checkpoint_errors(trained_run.checkpoint):
        module.load_state_dict(state)
    is_bf16 = trained_run.precision.parameters is FloatFormat.bf16
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    return module.to(dtype).eval().requires_grad_(False)


def autocast_context(
    trained_run: TrainedRun, device: torch.device
) -> AbstractContextManager[object]:
    """Autocast context with the compute precision of a run."""
    dtypes = {FloatFormat.bf16: torch.bfloat16, FloatFormat.fp16: torch.float16}
    compute = trained_run.precision.compute
    is_mixed = compute is not trained_run.precision.parameters
    return torch.autocast(device.type, dtypes.get(compute), enabled=is_mixed)


def save_tokenizer(splits: DataSplits, folder: Path) -> None:
    """Copy the tokenizer of the run's data, if there is one, into the run folder."""
    if splits.tokenizer is not None:
        copy_file(splits.tokenizer, folder / TOKENIZER_FILE)


def check_tokenizer(splits: DataSplits, folder: Path) -> None:
    """Raise ``DataError`` if the data have another tokenizer than the run in ``folder``."""
    saved_file = folder / TOKENIZER_FILE
    if splits.tokenizer is None or not saved_file.is_file():
        return  # token ids, or a run of an earlier version
    # Contents are compared, because the formatting of the JSON may differ.
    if load_tokenizer(splits.tokenizer) != load_tokenizer(saved_file):
        reason = (
            f"has another tokenizer than {saved_file}, which the run was trained with: "
            "the text that the tokenizer is trained on has changed"
        )
        fix = "restore the data, or start a new run"
        raise DataError.for_key("data", splits.tokenizer, reason, fix)


def load_tokenizer(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json; raises ``RecordError`` for a damaged file."""
    content = load_json(file)
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other class
        raise RecordError.for_file(file, f"is not a tokenizer: {error}") from None
    return content
