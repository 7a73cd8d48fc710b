"""A LightningModule of the user's own: what it decides by itself, and what that rules out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from scalewise.activation_checkpointing import Recompute
from scalewise.adapters.config import NoAdapterConfig
from scalewise.config.registry import option_name, register_option
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.objectives.base import ObjectiveConfig
from scalewise.precision import FloatFormat
from scalewise.quantization.config import NoQuantizationConfig
from scalewise.torch_compile import CompileScope
from scalewise.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.run_config import RunConfig

USUAL = {"model": "decoder_nano", "data": "corpus", "optimizer": "adamw", "schedule": "cosine"}
"""Groups that a module of the user's decides about, with what each is without one."""
LENGTHS = ("pipeline", "context", "tensor")
"""Axes of a mesh that cut a model, and not its rows or weights."""


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
        """Yields a loss in pieces: a module takes its own."""
        if self.loss_chunk is not None:
            reason, fix = "a module of yours takes its own loss", "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, fix)

    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Raises ``NotImplementedError``: a module takes its own loss."""
        raise NotImplementedError

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what would pass the module by, and the layouts that it cannot be laid over."""
        yield from _group_issues(run)
        yield from _trainer_issues(run.trainer)
        yield from _parallelism_issues(run)
        yield from self.validate_planning(run, "a module of yours")


@register_option("model", "module")
@register_option("optimizer", "module")
@register_option("schedule", "module")
@dataclass(frozen=True)
class ModuleDecides:
    """Placeholder for a group that a user-defined LightningModule decides itself.

    The analytic planner rejects it with a ``ConfigError``; use plan.method=trace.
    """

    imports: ClassVar[tuple[str, ...]] = ()
    """None that is known: its own packages are imported in its ranks."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields nothing: there is nothing to set."""
        yield from ()

    validate_machine = validate

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # pickle and copy ask whether there is such a method
            raise AttributeError(name)
        reason = "knows nothing of a module of yours, which is planned only by trace"
        raise ConfigError.for_key("plan.method", "ledger", reason, "set plan.method=trace")


def misplaced_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yields options of the suite beside a module of the user's, and ``module`` without one."""
    for group, usual in USUAL.items():
        spec = getattr(run, group)
        decided = spec.is_user_defined if group == "data" else isinstance(spec, ModuleDecides)
        chosen = run.choices.get(group, option_name(spec))
        if decided and not run.objective.is_user_defined:
            fix = f"set objective=module, or {group}={usual}"
            yield ConfigIssue(group, chosen, "goes with a module of yours alone", fix)
        elif run.objective.is_user_defined and not decided:
            reason = f"is not read by objective=module: a module of yours has its own {group}"
            yield ConfigIssue(group, chosen, reason, f"leave it out, or set {group}=module")


def _group_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    recompute = getattr(run.memory, "recompute", None)
    for group, used in (
        ("adapter", not isinstance(run.adapter, NoAdapterConfig)),
        ("quantization", not isinstance(run.quantization, NoQuantizationConfig)),
        ("memory", recompute is not Recompute.nothing or run.memory.offload),
        ("compile", run.compile.scope is not CompileScope.none),
    ):
        if used:
            reason = "changes the suite's own models; a module of yours does as it is written"
            yield ConfigIssue(group, run.choices.get(group, ""), reason, f"set {group}=none")


def _trainer_issues(trainer: TrainerConfig) -> Iterator[ConfigIssue]:
    usual = TrainerConfig()
    if trainer.micro_batch != usual.micro_batch:
        reason = "the loader of a data module of yours decides how many rows a batch has"
        fix = f"set trainer.micro_batch={usual.micro_batch}, and what data.arguments say of batches"
        yield ConfigIssue("trainer.micro_batch", trainer.micro_batch, reason, fix)
    if trainer.global_batch is not None:
        reason = "a module of yours takes a step with each batch that its loader gives"
        fix = "set trainer.global_batch=null"
        yield ConfigIssue("trainer.global_batch", trainer.global_batch, reason, fix)
    if trainer.max_tokens is not None:
        reason, fix = "a module of yours has no tokens to count", "set trainer.max_steps"
        yield ConfigIssue("trainer.max_tokens", trainer.max_tokens, reason, fix)
    if trainer.validation_rows != usual.validation_rows:
        reason = "a module of yours validates on all that its loader gives"
        fix = f"set trainer.validation_rows={usual.validation_rows}"
        yield ConfigIssue("trainer.validation_rows", trainer.validation_rows, reason, fix)
    epochs = trainer.max_epochs
    if epochs is not None and epochs % 1:
        fix = f"set trainer.max_epochs={max(1, round(epochs))}"
        yield ConfigIssue("trainer.max_epochs", epochs, "is no whole number of epochs", fix)


def _parallelism_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    layout = run.parallelism
    yield from layout.validate_on_device(run.hardware.device)
    sizes = getattr(layout, "sizes", {})
    for axis in LENGTHS:
        if sizes.get(axis, 1) > 1:
            reason = "does not cut a module of yours: only rows and weights are shared out"
            fix = "set parallelism=fsdp, hsdp, ddp or deepspeed_zero3"
            yield ConfigIssue(f"parallelism.{axis}", sizes[axis], reason, fix)
    for key in ("cpu_offload", "offload_optimizer", "offload_parameters"):
        if (value := getattr(layout, key, "none")) not in (False, "none"):
            reason = "does not offload a module of yours"
            fix = f"set parallelism.{key}={'false' if value is True else 'none'}"
            yield ConfigIssue(f"parallelism.{key}", value, reason, fix)
    scales = run.precision.compute is not FloatFormat.fp16
    if not scales and (sizes or layout.flattens_parameters):
        chosen = run.choices.get("precision", "fp16")
        reason = "no gradients are scaled in this layout"
        yield ConfigIssue("precision", chosen, reason, "set precision=bf16_mixed")
