"""Run configuration: one config per group, derived sizes, and validation across groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from math import ceil, isfinite
from pathlib import Path

from scalewise.activation_checkpointing import ActivationCheckpointing
from scalewise.adapters.config import AdapterConfig
from scalewise.checkpoint_config import CheckpointConfig
from scalewise.data.base import DataConfig
from scalewise.errors import ConfigIssue
from scalewise.hardware import (
    DeviceKind,
    Hardware,
    launched_world_size,
    resolve_for_machine,
    this_machine,
)
from scalewise.launch_config import Launch
from scalewise.lr_schedules import ScheduleConfig
from scalewise.models.base import ModelConfig, Weight
from scalewise.objectives import ObjectiveConfig
from scalewise.objectives.module import misplaced_issues
from scalewise.optimizers import OptimizerConfig
from scalewise.parallelism.base import ParallelismConfig
from scalewise.plan_config import PlanConfig
from scalewise.precision import Precision
from scalewise.quantization.config import (
    NoQuantizationConfig,
    QuantizationConfig,
    weight_census,
    weight_census_by_kind,
)
from scalewise.registry import target_name
from scalewise.torch_compile import Compile
from scalewise.tracking_config import WandbConfig
from scalewise.trainer_config import TrainerConfig
from scalewise.units import GIB, MAX_NUMBER
from scalewise.validation import compatibility, trusted_imports

NAME_PATTERN = re.compile(r"[^/\\\x00-\x1f\x7f]{1,128}")
"""Pattern of valid run names: limits of W&B and of folder names."""
SECONDS_FIELDS = ("launch.timeout", "launch.grace")
"""Fields in seconds."""
MAX_WAIT_SECONDS = 10**9
"""Maximum of ``SECONDS_FIELDS``: 30 years, below the 290 years of kernel timers."""
MAX_LAYERS = 10_000
"""Maximum number of layers, because plans enumerate layers."""
MAX_RANKS = 2**20
"""Maximum number of ranks along one mesh dimension, because plans enumerate ranks."""


@dataclass(frozen=True)
class RunConfig:
    """Configuration of one job: one config per group. Immutable and picklable."""

    model: ModelConfig
    """Architecture and initial weights."""
    data: DataConfig
    """Training and validation data, and their tokenization."""
    objective: ObjectiveConfig
    """Training loss."""
    parallelism: ParallelismConfig
    """How parameters, activations and data are sharded over ranks."""
    precision: Precision
    """Data types of parameters and matmuls."""
    optimizer: OptimizerConfig
    """Optimizer, learning rate and weight decay."""
    schedule: ScheduleConfig
    """Learning rate schedule."""
    adapter: AdapterConfig
    """Parameter-efficient fine-tuning (PEFT): LoRA and others."""
    memory: ActivationCheckpointing
    """Activation checkpointing and activation offload."""
    compile: Compile
    """Compilation by torch.compile."""
    trainer: TrainerConfig
    """Training length, batch sizes, clipping and validation."""
    checkpoint: CheckpointConfig
    """When checkpoints are written and which are kept."""
    tracking: WandbConfig
    """Weights & Biases: mode, project and uploads."""
    launch: Launch
    """Processes, timeouts, restarts and memory limits."""
    hardware: Hardware
    """Devices that a run is planned for and runs on."""
    quantization: QuantizationConfig = field(default_factory=NoQuantizationConfig)
    """Bit width of frozen weights, or quantization-aware training."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Memory prediction, and search for a better configuration."""
    name: str = "run"
    """Name of the run: its folder below runs/ and its W&B name; by default composed from the
    overrides."""
    seed: int = 1
    """Seed of initial weights, data order and dropout."""
    question: str = ""
    """Question that the run answers; the title of its report."""
    resume: str | None = None
    """Checkpoint or run folder to resume from, ``last`` or ``auto``; null: from scratch."""
    callbacks: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Lightning callbacks by name, each with a ``_target_``."""
    trusted_packages: tuple[str, ...] = ()
    """Packages from which ``callbacks`` and user-defined modules may be imported."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """Option chosen in each group; recorded by scalewise."""
    overrides: tuple[str, ...] = ()
    """Overrides of the command line; recorded by scalewise."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.parallelism.world_size

    @property
    def global_batch(self) -> int:
        """Global batch size: samples of one optimizer step over all ranks."""
        return self.trainer.global_batch or self.samples_per_forward

    @property
    def micro_batch(self) -> int:
        """Micro-batch size: samples of one forward pass on one rank.

        With ``trainer.micro_batch=auto``, the whole batch of a rank until a size is chosen.
        """
        size = self.trainer.micro_batch
        if isinstance(size, int):
            return size
        return ceil((self.trainer.global_batch or 1) / self.parallelism.data_parallel_size)

    @property
    def samples_per_forward(self) -> int:
        """Samples of one forward pass over all ranks."""
        return self.micro_batch * self.parallelism.data_parallel_size

    @property
    def accumulation(self) -> int:
        """Number of micro-batches that each rank accumulates in one optimizer step."""
        return ceil(self.global_batch / self.samples_per_forward)

    @property
    def sequences_per_sample(self) -> int:
        """Sequences per sample: 2 for preference pairs, the sampled answers for GRPO, else 1."""
        return 2 if self.objective.pairs else max(1, self.objective.rollouts_per_sample)

    @property
    def sequences_per_forward(self) -> int:
        """Sequences of one forward pass on one rank."""
        return self.micro_batch * self.sequences_per_sample

    @property
    def batch_description(self) -> str:
        """Batch of one optimizer step, in words."""
        rollout_text = f"prompts with {self.objective.rollouts_per_sample} answers each in"
        samples = "pairs of 2 x" if self.objective.pairs else "sequences of"
        samples = rollout_text if self.objective.rollouts_per_sample else samples
        return f"{self.global_batch} {samples} {self.data.sequence} tokens"

    @property
    def runs_reference_forward(self) -> bool:
        """Whether each forward pass first evaluates the reference model, with the adapter off.

        If training started from another model, its log-probabilities are stored instead.
        """
        adapter = self.adapter
        starts_from_base = adapter.can_disable and not (adapter.trained or adapter.resume)
        return self.objective.reference_objective is not None and starts_from_base

    @property
    def extra_forward_passes(self) -> int:
        """Number of forward-only passes before each forward and backward pass.

        One per generated token, without a KV cache, and one of the reference model.
        """
        generated = self.data.answer_length if self.objective.rollouts_per_sample else 0
        return generated + self.runs_reference_forward

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.global_batch * self.sequences_per_sample * self.data.sequence

    @property
    def flops_per_token(self) -> float:
        """FLOPs of one token's forward and backward pass, without recomputation.

        A forward-only pass counts as a third of the model's FLOPs.
        """
        sequence = self.data.sequence
        forward_only = self.model.flops(sequence) / 3 * self.extra_forward_passes
        return self.adapter.flops(self.model, sequence, self.data.target_length) + forward_only

    @property
    def flops_per_step(self) -> float:
        """FLOPs of one optimizer step over all ranks, without recomputation."""
        return self.flops_per_token * self.tokens_per_step

    def weight_census(self) -> tuple[Weight, ...]:
        """All parameter tensors of the model and its adapter."""
        return weight_census(self.quantization, self.adapter, self.model)

    def weight_census_by_kind(self) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Parameter tensors of one block, and those outside of blocks."""
        return weight_census_by_kind(self.quantization, self.adapter, self.model)

    @property
    def trainable_parameters(self) -> int:
        """Number of trained parameters, those of the adapter included."""
        return sum(weight.numel for weight in self.weight_census() if weight.trainable)

    @property
    def has_frozen_weights(self) -> bool:
        """Whether most parameters of the model are frozen and an adapter is trained instead."""
        block, other = self.weight_census_by_kind()
        return not all(weight.trainable for weight in (*block, *other))

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that a forkserver may import before the ranks start.

        None on CUDA: a library that queries CUDA devices on import breaks forked processes.
        """
        if self.hardware.device is not DeviceKind.cpu:
            return ()
        return (*self.adapter.imports, *self.model.imports)

    def num_steps(self, samples: int) -> int:
        """Optimizer steps of this run over a training split of ``samples`` samples."""
        return self.trainer.num_steps(self.tokens_per_step, self.global_batch, samples)

    def resolve(self) -> RunConfig:
        """Resolve hardware, mesh sizes and adapter checkpoint for this machine."""
        hardware = resolve_for_machine(self.hardware)
        on_cuda = hardware.device is DeviceKind.cuda
        present = max(1, len(this_machine().gpus)) if on_cuda else None
        devices = launched_world_size() or hardware.total_devices or present
        parallelism, adapter = self.parallelism.resolve(devices), self.adapter.resolve()
        return replace(self, hardware=hardware, parallelism=parallelism, adapter=adapter)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield every config issue: of each group by itself, then between groups."""
        group_issues = list(self._group_issues())
        yield from group_issues
        misplaced = list(misplaced_issues(self))
        yield from misplaced
        if self.objective.is_user_defined:
            yield from self.objective.validate_with(self)
        elif not (misplaced or group_issues):
            yield from self.model.validate_with(self)
            yield from self.adapter.validate_with(self.model)
            yield from self.adapter.validate_with_run(self)
            yield from self.quantization.validate_with(self)
            yield from self.precision.validate_with(self)
            yield from self.objective.validate_with(self)
            yield from self.optimizer.validate_with(self)
            yield from self.memory.validate_with(self)
            yield from self.parallelism.validate_with(self)
            yield from self.trainer.validate_with(self)
        if not (misplaced or self.objective.is_user_defined):
            yield from compatibility.schedule_issues(self)
            if not any(issue.key in ("model.path", "model.depth") for issue in group_issues):
                yield from compatibility.token_issues(self)
        yield from trusted_imports.module_issues(self)
        yield from compatibility.format_issues(self)
        yield from trusted_imports.callback_issues(self)
        if not NAME_PATTERN.fullmatch(self.name) or self.name.startswith("."):
            reason = (
                "must be 1 to 128 printable characters without / and \\ and without a leading dot"
            )
            yield ConfigIssue("name", self.name, reason, "set name=my-run")
        if self.resume == "":
            yield ConfigIssue("resume", "", "is not a checkpoint", "set a path, or resume=null")
        if not 0 <= self.seed < 2**32:
            yield ConfigIssue("seed", self.seed, "must be in [0, 2**32)")

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yield config issues of this machine; skipped for plans of other machines."""
        yield from compatibility.device_issues(self)
        yield from compatibility.fp16_issues(self)
        if (
            self.resume not in (None, "last", "auto")
            and not Path(self.resume).expanduser().exists()
        ):
            reason = "no such checkpoint folder"
            yield ConfigIssue("resume", self.resume, reason, "set a path, or resume=null")
        if not any(self._group_issues()):
            yield from self.adapter.validate_machine(self)
        yield from self.optimizer.validate_machine()
        yield from self.quantization.validate_machine()
        yield from self.precision.validate_machine()
        yield from self.tracking.validate_machine()
        yield from self.parallelism.validate_machine(self)

    def as_dict(self) -> dict[str, object]:
        """Convert the run to nested dicts and lists, each config with its ``_target_``."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return {key: value for key, value in plain.items() if key != "_target_"}

    def _group_issues(self) -> Iterator[ConfigIssue]:
        for part in fields(self):
            yield from config_issues(part.name, getattr(self, part.name))


def config_issues(group: str, config: object) -> Iterator[ConfigIssue]:
    """Yield the issues of one config by itself."""
    if not hasattr(config, "validate"):
        return
    if out_of_range := list(_out_of_range_issues(group, config)):
        yield from out_of_range
        return
    issues = list(config.validate())
    yield from issues
    reported_keys = {issue.key for issue in issues}
    for entry in fields(config):  # type: ignore[arg-type]  # a config is a dataclass
        key, value = f"{group}.{entry.name}", getattr(config, entry.name)
        if isinstance(value, float) and not isfinite(value) and key not in reported_keys:
            yield ConfigIssue(key, value, "must be a finite number")


def _out_of_range_issues(group: str, config: object) -> Iterator[ConfigIssue]:
    """Yield issues for numbers beyond int64 and beyond the limits of this module."""
    for entry in fields(config):  # type: ignore[arg-type]  # a config is a dataclass
        key, value = f"{group}.{entry.name}", getattr(config, entry.name)
        if not isinstance(value, int | float) or not isfinite(value):
            continue
        if abs(value) > MAX_NUMBER:
            yield ConfigIssue(key, value, "exceeds the 64-bit maximum, 2**63 - 1")
        elif abs(value) > (maximum := _field_maximum(key)):
            yield ConfigIssue(key, value, f"must be at most {maximum:,}", f"set {key}={maximum}")


def _field_maximum(key: str) -> int:
    """Maximum value of a numeric field."""
    if key.endswith("_gib"):
        return MAX_NUMBER // GIB
    if key in SECONDS_FIELDS:
        return MAX_WAIT_SECONDS
    if key == "model.layers":
        return MAX_LAYERS
    return MAX_RANKS if key.startswith("parallelism.") else MAX_NUMBER


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        entries = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return {"_target_": target_name(type(value)), **entries}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value
