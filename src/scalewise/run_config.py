"""A Run: one spec per group, the arithmetic of its world, and the rules across groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from math import ceil, isfinite
from pathlib import Path

from scalewise.activation_checkpointing import ActivationCheckpointing
from scalewise.adapters.config import AdapterConfig
from scalewise.checkpoints.config import CheckpointConfig
from scalewise.config.registry import target_name
from scalewise.data.base import DataConfig
from scalewise.errors import ConfigIssue
from scalewise.hardware import (
    DeviceKind,
    Hardware,
    launched_world_size,
    resolve_for_machine,
    this_machine,
)
from scalewise.launch.config import Launch
from scalewise.lr_schedules import ScheduleConfig
from scalewise.models.base import ModelConfig, Weight
from scalewise.objectives import ObjectiveConfig
from scalewise.objectives.module import misplaced_issues
from scalewise.optimizers import OptimizerConfig
from scalewise.parallelism.base import ParallelismConfig
from scalewise.planner.config import PlanConfig
from scalewise.precision import Precision
from scalewise.quantization.config import (
    NoQuantizationConfig,
    QuantizationConfig,
    weight_census,
    weight_census_by_kind,
)
from scalewise.torch_compile import Compile
from scalewise.tracking.config import WandbConfig
from scalewise.trainer_config import TrainerConfig
from scalewise.units import GIB, MAX_NUMBER
from scalewise.validation import compatibility, trusted_imports

NAME_PATTERN = re.compile(r"[^/\\\x00-\x1f\x7f]{1,128}")
"""What a run may be called: W&B takes no more, and it becomes the name of a folder."""
SECONDS_FIELDS = ("launch.timeout", "launch.grace")
MAX_NAME_LENGTH = 10**9
"""Seconds that are waited for at most, 30 years: clocks of the kernel take no more than 290."""
MAX_LAYERS = 10_000
MAX_RANKS = 2**20
"""Of ranks along one axis, and of layers, plans count each."""


@dataclass(frozen=True)
class RunConfig:
    """Everything a job is, with nothing left to look up. Immutable and picklable."""

    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig
    parallelism: ParallelismConfig
    precision: Precision
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    adapter: AdapterConfig
    memory: ActivationCheckpointing
    compile: Compile
    trainer: TrainerConfig
    checkpoint: CheckpointConfig
    tracking: WandbConfig
    launch: Launch
    hardware: Hardware
    quantization: QuantizationConfig = field(default_factory=NoQuantizationConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    name: str = "run"
    """Folder and W&B name: its parts and its learning rate."""
    seed: int = 1
    """Seed of the weights, of the order of the rows and of dropout."""
    question: str = ""
    """What the run is to find out; heads its report."""
    resume: str | None = None
    """A checkpoint or a run's folder, ``last``, ``auto``, or None: start anew."""
    callbacks: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Lightning callbacks by a name of their own: ``_target_`` and its arguments."""
    trusted_packages: tuple[str, ...] = ()
    """Further packages whose callables ``callbacks`` and modules of the user's may name."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """The option chosen in each group."""
    overrides: tuple[str, ...] = ()
    """What the user typed."""

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return self.parallelism.world_size

    @property
    def global_batch(self) -> int:
        """Returns the rows of one optimizer step over all ranks."""
        return self.trainer.global_batch or self.rows_per_pass

    @property
    def micro_batch(self) -> int:
        """Returns the rows in one forward pass on one rank; all of a step until one is chosen."""
        rows = self.trainer.micro_batch
        if isinstance(rows, int):
            return rows
        return ceil((self.trainer.global_batch or 1) / self.parallelism.data_parallel_size)

    @property
    def rows_per_pass(self) -> int:
        """Returns the rows that one forward pass of all ranks sees."""
        return self.micro_batch * self.parallelism.data_parallel_size

    @property
    def accumulation(self) -> int:
        """Returns how many micro batches each rank sums into one optimizer step."""
        return ceil(self.global_batch / self.rows_per_pass)

    @property
    def sequences_per_row(self) -> int:
        """Returns how many sequences a row of the data holds."""
        return 2 if self.objective.pairs else max(1, self.objective.answers_per_row)

    @property
    def sequences_per_pass(self) -> int:
        """Returns the sequences that one forward pass of one rank sees."""
        return self.micro_batch * self.sequences_per_row

    @property
    def rows_text(self) -> str:
        """Returns what one optimizer step reads, in words."""
        answered = f"prompts answered {self.objective.answers_per_row} times in"
        what = "pairs of twice" if self.objective.pairs else "rows of"
        what = answered if self.objective.answers_per_row else what
        return f"{self.global_batch} {what} {self.data.sequence} tokens"

    @property
    def asks_each_pass(self) -> bool:
        """Returns whether each pass asks the reference first: the model with its adapter off.

        Where that is another than the one that training began with, what it said is kept.
        """
        adapter = self.adapter
        began_off = adapter.turns_off and not (adapter.trained or adapter.resume)
        return self.objective.reference is not None and began_off

    @property
    def passes_asked(self) -> int:
        """Returns the passes forward alone that each pass begins with.

        One for each token that the model writes, all read again, and one of a reference.
        """
        written = self.data.answer if self.objective.answers_per_row else 0
        return written + self.asks_each_pass

    @property
    def tokens_per_step(self) -> int:
        """Returns the tokens of one optimizer step over all ranks."""
        return self.global_batch * self.sequences_per_row * self.data.sequence

    @property
    def flops_per_token(self) -> float:
        """Returns the flops of a token's forward and backward, nothing computed twice.

        A pass forward, of a reference or to write a token, is one third of a model's both ways.
        """
        sequence = self.data.sequence
        asked = self.model.flops(sequence) / 3 * self.passes_asked
        return self.adapter.flops(self.model, sequence, self.data.target_length) + asked

    @property
    def flops_per_step(self) -> float:
        """Returns the model's flops of one optimizer step over all ranks."""
        return self.flops_per_token * self.tokens_per_step

    def census(self) -> tuple[Weight, ...]:
        """Returns every tensor that is held of the model, with what an adapter adds."""
        return weight_census(self.quantization, self.adapter, self.model)

    def census_by_kind(self) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Returns the weights of one block, all blocks being alike, and those outside of blocks."""
        return weight_census_by_kind(self.quantization, self.adapter, self.model)

    @property
    def trained(self) -> int:
        """Returns the numbers that are trained of the model and of what an adapter adds."""
        return sum(weight.count for weight in self.census() if weight.trainable)

    @property
    def is_frozen(self) -> bool:
        """Returns whether an adapter is trained in place of most of the model's own weights."""
        block, rest = self.census_by_kind()
        return not all(weight.trainable for weight in (*block, *rest))

    @property
    def imports(self) -> tuple[str, ...]:
        """Returns the modules that a fork server may import before the ranks are born.

        None on CUDA: libraries that ask for its devices as they are imported spoil it for forks.
        """
        if self.hardware.device is not DeviceKind.cpu:
            return ()
        return (*self.adapter.imports, *self.model.imports)

    def steps(self, rows: int) -> int:
        """Returns the optimizer steps of this run over a training split of ``rows`` rows."""
        return self.trainer.steps(self.tokens_per_step, self.global_batch, rows)

    def settled(self) -> RunConfig:
        """Returns the run with what this machine decides: hardware, layout, newest checkpoint."""
        hardware = resolve_for_machine(self.hardware)
        on_cuda = hardware.device is DeviceKind.cuda
        present = max(1, len(this_machine().gpus)) if on_cuda else None
        devices = launched_world_size() or hardware.devices or present
        layout, adapter = self.parallelism.settle(devices), self.adapter.settled()
        return replace(self, hardware=hardware, parallelism=layout, adapter=adapter)

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields everything that is wrong: in each spec, then between them."""
        of_specs = list(self._of_specs())
        yield from of_specs
        found = list(misplaced_issues(self))
        yield from found
        if self.objective.of_user:
            yield from self.objective.complaints_with(self)
        elif not (found or of_specs):
            yield from self.model.complaints_with(self)
            yield from self.adapter.complaints_with(self.model)
            yield from self.adapter.complaints_of(self)
            yield from self.quantization.complaints_with(self)
            yield from self.precision.complaints_with(self)
            yield from self.objective.complaints_with(self)
            yield from self.optimizer.complaints_with(self)
            yield from self.memory.complaints_with(self)
            yield from self.parallelism.complaints_with(self)
            yield from self.trainer.complaints_with(self)
        if not (found or self.objective.of_user):
            yield from compatibility.schedule_issues(self)
            if not any(complaint.key in ("model.path", "model.depth") for complaint in of_specs):
                yield from compatibility.token_issues(self)
        yield from trusted_imports.module_issues(self)
        yield from compatibility.format_issues(self)
        yield from trusted_imports.callback_issues(self)
        if not NAME_PATTERN.fullmatch(self.name) or self.name.startswith("."):
            reason = "names a folder: 1 to 128 printable characters, no / or \\, no dot in front"
            yield ConfigIssue("name", self.name, reason, "set name=my-run")
        if self.resume == "":
            yield ConfigIssue("resume", "", "names no checkpoint", "give a path, or resume=null")
        if not 0 <= self.seed < 2**32:
            yield ConfigIssue("seed", self.seed, "must be in [0, 2**32)")

    def machine_complaints(self) -> Iterator[ConfigIssue]:
        """Yields what the present machine cannot run; a plan for another machine skips these."""
        yield from compatibility.device_issues(self)
        yield from compatibility.fp16_issues(self)
        if (
            self.resume not in (None, "last", "auto")
            and not Path(self.resume).expanduser().exists()
        ):
            reason = "there is no such checkpoint folder"
            yield ConfigIssue("resume", self.resume, reason, "give a path, or resume=null")
        if not any(self._of_specs()):
            yield from self.adapter.machine_complaints(self)
        yield from self.optimizer.machine_complaints()
        yield from self.quantization.machine_complaints()
        yield from self.precision.machine_complaints()
        yield from self.tracking.machine_complaints()
        yield from self.parallelism.machine_complaints(self)

    def as_dict(self) -> dict[str, object]:
        """Returns the run as plain nested containers, each spec with its ``_target_``."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return {key: value for key, value in plain.items() if key != "_target_"}

    def _of_specs(self) -> Iterator[ConfigIssue]:
        for part in fields(self):
            yield from config_issues(part.name, getattr(self, part.name))


def config_issues(group: str, spec: object) -> Iterator[ConfigIssue]:
    """Yields what is wrong with one spec by itself."""
    if not hasattr(spec, "complaints"):
        return
    if absurd := list(_out_of_range_issues(group, spec)):
        yield from absurd
        return
    found = list(spec.complaints())
    yield from found
    known = {complaint.key for complaint in found}
    for entry in fields(spec):  # type: ignore[arg-type]  # a spec is a dataclass
        key, value = f"{group}.{entry.name}", getattr(spec, entry.name)
        if isinstance(value, float) and not isfinite(value) and key not in known:
            yield ConfigIssue(key, value, "must be a finite number")


def _out_of_range_issues(group: str, spec: object) -> Iterator[ConfigIssue]:
    """Yields the numbers of a spec that no machine counts in, or no clock waits for."""
    for entry in fields(spec):  # type: ignore[arg-type]  # a spec is a dataclass
        key, value = f"{group}.{entry.name}", getattr(spec, entry.name)
        if not isinstance(value, int | float) or not isfinite(value):
            continue
        if abs(value) > MAX_NUMBER:
            yield ConfigIssue(key, value, "is beyond what 64 bits hold, 2**63 - 1")
        elif abs(value) > (most := _field_maximum(key)):
            yield ConfigIssue(key, value, f"must be at most {most:,}", f"set {key}={most}")


def _field_maximum(key: str) -> int:
    """Returns the largest number that a field can have."""
    if key.endswith("_gib"):
        return MAX_NUMBER // GIB
    if key in SECONDS_FIELDS:
        return MAX_NAME_LENGTH
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
