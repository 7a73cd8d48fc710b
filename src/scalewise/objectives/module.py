"""Training of a user-defined LightningModule, and the options that are incompatible with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from scalewise.activation_checkpointing import Recompute
from scalewise.adapters.config import NoAdapterConfig
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.objectives.base import ObjectiveConfig
from scalewise.precision import FloatFormat
from scalewise.quantization.config import NoQuantizationConfig
from scalewise.registry import option_name, register_option
from scalewise.torch_compile import CompileScope
from scalewise.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.run_config import RunConfig

DEFAULT_OPTIONS = {
    "model": "decoder_nano",
    "data": "corpus",
    "optimizer": "adamw",
    "schedule": "cosine",
}
"""Config groups that a user-defined module replaces, with the option to use without one."""
MODEL_AXES = ("pipeline", "context", "tensor")
"""Mesh axes that partition the computation of a model, instead of its batch or parameters."""


@register_option("objective", "module")
@dataclass(frozen=True)
class UserModule(ObjectiveConfig):
    """A user-defined LightningModule with its own steps, loss, optimizer and schedule."""

    target: str = ""
    """Import path of the class, ``package.module.Class``; its package must be in
    ``trusted_packages``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    held_out: str = "val_loss"
    """Name under which the module logs its validation loss."""

    is_user_defined = True
    trace_only = True

    def validate(self) -> Iterator[ConfigIssue]:
        """Issue of a chunked loss: the module computes the loss itself."""
        if self.loss_chunk is not None:
            reason = "is not supported: a user-defined module computes its own loss"
            fix = "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, fix)

    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Raise ``NotImplementedError``: the module computes the loss itself."""
        raise NotImplementedError

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Issues of options without effect on the module, and of incompatible strategies."""
        yield from _group_issues(run)
        yield from _trainer_issues(run.trainer)
        yield from _parallelism_issues(run)
        yield from self.validate_planning(run, "user-defined modules")


@register_option("model", "module")
@register_option("optimizer", "module")
@register_option("schedule", "module")
@dataclass(frozen=True)
class ModuleDecides:
    """Placeholder for a group that a user-defined LightningModule decides itself.

    The analytic planner rejects it with a ``ConfigError``; use plan.method=trace.
    """

    imports: ClassVar[tuple[str, ...]] = ()
    """Packages that the option imports; those of the module are imported in its ranks."""

    def validate(self) -> Iterator[ConfigIssue]:
        """No issues: the option has no fields."""
        yield from ()

    validate_machine = validate

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # pickle and copy look up optional methods
            raise AttributeError(name)
        reason = "does not cover user-defined modules"
        raise ConfigError.for_key("plan.method", "ledger", reason, "set plan.method=trace")


def misplaced_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Issues of ``GROUP=module`` without a user-defined module, and of other options with one."""
    for group, default in DEFAULT_OPTIONS.items():
        config = getattr(run, group)
        is_module = config.is_user_defined if group == "data" else isinstance(config, ModuleDecides)
        chosen = run.choices.get(group, option_name(config))
        if is_module and not run.objective.is_user_defined:
            fix = f"set objective=module, or {group}={default}"
            yield ConfigIssue(group, chosen, "requires objective=module", fix)
        elif run.objective.is_user_defined and not is_module:
            reason = f"is not supported with objective=module: the module defines its own {group}"
            yield ConfigIssue(group, chosen, reason, f"leave it out, or set {group}=module")


def _group_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    recompute = getattr(run.memory, "recompute", None)
    for group, is_set in (
        ("adapter", not isinstance(run.adapter, NoAdapterConfig)),
        ("quantization", not isinstance(run.quantization, NoQuantizationConfig)),
        ("memory", recompute is not Recompute.nothing or run.memory.offload),
        ("compile", run.compile.scope is not CompileScope.none),
    ):
        if is_set:
            reason = "is not supported with a user-defined module, which scalewise does not modify"
            yield ConfigIssue(group, run.choices.get(group, ""), reason, f"set {group}=none")


def _trainer_issues(trainer: TrainerConfig) -> Iterator[ConfigIssue]:
    defaults = TrainerConfig()
    if trainer.micro_batch != defaults.micro_batch:
        reason = "is not supported: a user-defined data loader sets the batch size"
        fix = f"set trainer.micro_batch={defaults.micro_batch}, and the batch size in "
        fix += "data.arguments"
        yield ConfigIssue("trainer.micro_batch", trainer.micro_batch, reason, fix)
    if trainer.global_batch is not None:
        reason = "is not supported: a user-defined module takes one step per batch of its loader"
        fix = "set trainer.global_batch=null"
        yield ConfigIssue("trainer.global_batch", trainer.global_batch, reason, fix)
    if trainer.max_tokens is not None:
        reason = "is not supported: a user-defined module does not report its tokens"
        fix = "set trainer.max_steps"
        yield ConfigIssue("trainer.max_tokens", trainer.max_tokens, reason, fix)
    if trainer.validation_rows != defaults.validation_rows:
        reason = "is not supported: a user-defined module validates on its whole data loader"
        fix = f"set trainer.validation_rows={defaults.validation_rows}"
        yield ConfigIssue("trainer.validation_rows", trainer.validation_rows, reason, fix)
    epochs = trainer.max_epochs
    if epochs is not None and epochs % 1:
        fix = f"set trainer.max_epochs={max(1, round(epochs))}"
        yield ConfigIssue("trainer.max_epochs", epochs, "is not a whole number of epochs", fix)


def _parallelism_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    parallelism = run.parallelism
    yield from parallelism.validate_on_device(run.hardware.device)
    sizes = getattr(parallelism, "sizes", {})
    for axis in MODEL_AXES:
        if sizes.get(axis, 1) > 1:
            reason = "cannot partition a user-defined module: only data parallelism and sharding "
            reason += "of parameters are supported"
            fix = "set parallelism=fsdp, hsdp, ddp or deepspeed_zero3"
            yield ConfigIssue(f"parallelism.{axis}", sizes[axis], reason, fix)
    for key in ("cpu_offload", "offload_optimizer", "offload_parameters"):
        if (value := getattr(parallelism, key, "none")) not in (False, "none"):
            reason = "does not offload a user-defined module"
            fix = f"set parallelism.{key}={'false' if value is True else 'none'}"
            yield ConfigIssue(f"parallelism.{key}", value, reason, fix)
    is_fp16 = run.precision.compute is FloatFormat.fp16
    if is_fp16 and (sizes or parallelism.flattens_parameters):
        chosen = run.choices.get("precision", "fp16")
        reason = "requires gradient scaling, which this parallelism strategy does not support"
        yield ConfigIssue("precision", chosen, reason, "set precision=bf16_mixed")
