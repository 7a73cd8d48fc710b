"""Rules between a user-defined LightningModule and the other parts of a run."""

from __future__ import annotations

from collections.abc import Iterator

from scalewise.adapters.config import NoAdapterConfig
from scalewise.errors import ConfigIssue
from scalewise.models.op_graph import Recompute
from scalewise.objectives.config import ModuleDecides
from scalewise.precision import FloatFormat
from scalewise.quantization.config import NoQuantizationConfig
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope
from scalewise.trainer_config import TrainerConfig
from scalewise.validation.compatibility import planning_issues

DEFAULT_OPTIONS = {
    "model": "decoder_nano",
    "data": "corpus",
    "optimizer": "adamw",
    "schedule": "cosine",
}
"""Config groups that a user-defined module replaces, with the option to use without one."""
MODEL_AXES = ("pipeline", "context", "tensor")
"""Mesh axes that partition the computation of a model, instead of its batch or parameters."""


def misplaced_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for ``GROUP=module`` without objective=module, and for other options with it."""
    for group, default in DEFAULT_OPTIONS.items():
        config = getattr(run, group)
        is_module = config.is_user_defined if group == "data" else isinstance(config, ModuleDecides)
        chosen = run.option(group)
        if is_module and not run.objective.is_user_defined:
            fix = f"set objective=module, or {group}={default}"
            yield ConfigIssue(group, chosen, "requires objective=module", fix)
        elif run.objective.is_user_defined and not is_module:
            reason = f"is not supported with objective=module: the module defines its own {group}"
            yield ConfigIssue(group, chosen, reason, f"leave it out, or set {group}=module")


def user_module_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for options without effect on the module, and for incompatible strategies."""
    yield from _group_issues(run)
    yield from _trainer_issues(run.trainer)
    yield from _parallelism_issues(run)
    yield from planning_issues(run, "user-defined modules")


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
            yield ConfigIssue(group, run.option(group), reason, f"set {group}=none")


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
        chosen = run.option("precision")
        reason = "requires gradient scaling, which this parallelism strategy does not support"
        yield ConfigIssue("precision", chosen, reason, "set precision=bf16_mixed")
