"""Rules between optimizer, schedule, training loop or activation checkpointing and other parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import singledispatch
from math import ceil

from scalewise.errors import ConfigIssue
from scalewise.memory_config import ActivationCheckpointing, AutoCheckpointing, FixedCheckpointing
from scalewise.objectives import CausalLM
from scalewise.optimizers import OptimizerConfig
from scalewise.optimizers.config import ScheduleFreeConfig
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.plan_config import PlanSearch
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.trainer_config import AUTO, MICRO_BATCH_KEY
from scalewise.typed_override import format_override


@singledispatch
def optimizer_issues(optimizer: OptimizerConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of the optimizer with other parts of the run."""
    yield from _parameter_issues(optimizer, run)


@optimizer_issues.register(ScheduleFreeConfig)
def _schedule_free_issues(optimizer: ScheduleFreeConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for a decaying schedule and for sharded state."""
    yield from _parameter_issues(optimizer, run)
    if run.schedule.decays:
        option = run.option("schedule")
        reason = "decays the learning rate, which optimizer=schedule_free requires to be constant"
        yield ConfigIssue("schedule", option, reason, "set schedule=constant")
    if optimizer.shard:
        reason = "is not supported with optimizers that average weights"
        yield ConfigIssue("optimizer.shard", True, reason, "set optimizer.shard=false")
    if isinstance(run.parallelism, DDPConfig) and not run.parallelism.averages_gradients:
        reason = "keeps a second copy of the weights, which local SGD does not average over ranks"
        fix = "set optimizer=adamw, or parallelism.comm_hook=none"
        yield ConfigIssue("optimizer", run.option("optimizer"), reason, fix)


def _parameter_issues(optimizer: OptimizerConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for patterns without a trained parameter, and for ``in_backward``.

    ``parallelism_issues`` checks whether the strategy reduces gradients by then.
    """
    if optimizer.in_backward:
        yield from _in_backward_issues(optimizer, run)
    names = [weight.name for weight in run.weight_census() if weight.trainable]
    for key, patterns in (("lr_factors", optimizer.lr_factors), ("no_decay", optimizer.no_decay)):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in names):
                reason = "matches no name of a trained parameter"
                fix = f"trained parameters include {', '.join(names[:3])}" if names else ""
                yield ConfigIssue(f"optimizer.{key}", pattern, reason, fix)


def _in_backward_issues(optimizer: OptimizerConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for an update of each parameter during the backward pass."""
    key = "optimizer.in_backward"
    if run.accumulation > 1:
        reason = f"steps before the gradients of {run.accumulation} micro-batches are accumulated"
        fix = f"set trainer.global_batch={run.samples_per_forward}"
        yield ConfigIssue(key, True, reason, fix)
    if run.trainer.clip_norm is not None:
        reason = "steps before the gradient norm is known"
        yield ConfigIssue(key, True, reason, "set trainer.clip_norm=null")
    for option in _statistics_options(run):
        reason = f"steps before the gradient norm is known, which trainer.{option} compares"
        yield ConfigIssue(key, True, reason, f"set trainer.{option}=null")
    if run.precision.compute is FloatFormat.fp16:
        reason = "steps before a scaled gradient is known to be finite"
        yield ConfigIssue(key, True, reason, "set precision=bf16_mixed")
    if optimizer.averages_weights:
        reason = "is not supported with optimizers that average weights"
        yield ConfigIssue(key, True, reason, "set optimizer=adamw")


@singledispatch
def memory_issues(memory: ActivationCheckpointing, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of activation checkpointing with other parts of the run: none."""
    yield from ()


@memory_issues.register(FixedCheckpointing)
def _fixed_checkpointing_issues(
    memory: FixedCheckpointing, run: RunConfig
) -> Iterator[ConfigIssue]:
    """Yield an issue if blocks are compiled: their saved tensors cannot be offloaded."""
    if run.is_compiled and not memory.supports_compile:
        reason = "is not supported with compiled blocks"
        yield ConfigIssue("memory.offload", True, reason, "set compile=none")


@memory_issues.register(AutoCheckpointing)
def _auto_checkpointing_issues(memory: AutoCheckpointing, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue with ``plan.search``, which chooses activation checkpointing as well."""
    if run.plan.search is not PlanSearch.none:
        reason, fix = "conflicts with plan.search, which chooses memory itself", "leave it out"
        yield ConfigIssue("memory", "auto", reason, fix)


def trainer_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of rolling statistics and of ``micro_batch=auto`` with other groups."""
    for option in _statistics_options(run):
        reason, fix = _statistics_conflict(run)
        if reason:
            value = getattr(run.trainer, option)
            yield ConfigIssue(
                f"trainer.{option}", value, reason, fix or f"set trainer.{option}=null"
            )
    yield from _batch_warmup_issues(run)
    yield from _sequence_warmup_issues(run)
    if run.trainer.micro_batch != AUTO:
        return
    global_batch, ranks = run.trainer.global_batch, run.parallelism.data_parallel_size
    if global_batch is None:
        reason = "requires trainer.global_batch: otherwise training depends on the device"
        yield ConfigIssue(MICRO_BATCH_KEY, AUTO, reason, "set trainer.global_batch=64")
    elif global_batch % ranks:
        reason = (
            f"is not divisible by {ranks} data-parallel ranks, as {MICRO_BATCH_KEY}=auto requires"
        )
        fix = f"set trainer.global_batch={ceil(global_batch / ranks) * ranks}"
        yield ConfigIssue("trainer.global_batch", global_batch, reason, fix)
    if run.plan.search is not PlanSearch.none:
        reason = "is not supported with plan.search, which chooses it"
        yield ConfigIssue(MICRO_BATCH_KEY, AUTO, reason, "remove it")
    if isinstance(run.memory, AutoCheckpointing):
        reason = "is not supported with memory=auto, which requires a fixed micro-batch size"
        search = f"plan.search=memory plan.fit=auto memory=none {MICRO_BATCH_KEY}=1"
        fix = f"set {MICRO_BATCH_KEY}=8, or search both with {search}"
        yield ConfigIssue(MICRO_BATCH_KEY, AUTO, reason, fix)


def _batch_warmup_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of stages that no whole micro-batches fill, and of a run that ends in one."""
    trainer, ranks = run.trainer, run.parallelism.data_parallel_size
    if not trainer.batch_warmup:
        return
    unit = ranks if trainer.micro_batch == AUTO else run.samples_per_forward
    parts = f"{ranks} data-parallel rank{'s' * (ranks > 1)}"
    if trainer.micro_batch != AUTO:
        parts = f"{MICRO_BATCH_KEY}={run.micro_batch} x {parts}"
    keys = {
        f"trainer.batch_warmup.{name}.global_batch": stage.global_batch
        for name, stage in trainer.sorted_batch_stages
    }
    for key, samples in {**keys, "trainer.global_batch": run.global_batch}.items():
        if samples % unit:
            reason = f"is not a multiple of {unit}: {parts}, as trainer.batch_warmup requires"
            yield ConfigIssue(key, samples, reason, f"set {key}={ceil(samples / unit) * unit}")
    name, last = trainer.sorted_batch_stages[-1]
    key = f"trainer.batch_warmup.{name}"
    yield from _last_stage_issues(
        run, key, last.until_step, f"trainer.global_batch={run.global_batch}"
    )


def _sequence_warmup_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of samples that cannot be truncated, and of a run that ends in a stage."""
    trainer, length = run.trainer, run.data.sequence
    if not trainer.sequence_warmup:
        return
    option, names = "trainer.sequence_warmup", [*trainer.sequence_warmup]
    without = f"set {format_override(option, {})}"
    if type(run.objective) is not CausalLM:  # its subclasses have labels at the end of a sample
        chosen = run.option("objective")
        reason = f"truncates samples, which objective={chosen} reads as a whole"
        yield ConfigIssue(option, names, reason, f"{without}, or objective=causal_lm")
    elif not run.data.is_continuous_text:
        chosen = run.option("data")
        reason = f"truncates samples, and the labels of data={chosen} are at their end"
        yield ConfigIssue(option, names, reason, f"{without}, or data=text")
    name, last = trainer.sorted_sequence_stages[-1]
    if last.sequence >= length:
        key = f"{option}.{name}.sequence"
        reason = f"must be below that of the steps after it, data.sequence={length}"
        fix = f"set {key}={max(1, length // 2)}, or a larger data.sequence"
        yield ConfigIssue(key, last.sequence, reason, fix)
    yield from _last_stage_issues(
        run, f"{option}.{name}", last.until_step, f"data.sequence={length}"
    )


def _last_stage_issues(
    run: RunConfig, key: str, until_step: int, setting: str
) -> Iterator[ConfigIssue]:
    """Yield an issue if a run ends within the last stage of a warm-up.

    Args:
        run: Config of the run.
        key: Key of the stage.
        until_step: Last step of the stage.
        setting: Override that applies after it.
    """
    if run.trainer.max_epochs is not None:
        return  # the steps of an epoch depend on the data
    steps = run.num_steps(samples=0)
    if until_step >= steps:
        reason = (
            f"must be below the {steps} steps of the run, so that its last steps have {setting}"
        )
        fix = f"set {key}.until_step={max(1, steps // 10)}, or train for longer"
        yield ConfigIssue(f"{key}.until_step", until_step, reason, fix)


def _statistics_options(run: RunConfig) -> Iterator[str]:
    """Options of rolling statistics of gradient norms that are set."""
    for option in ("clip_percentile", "skip_sigma"):
        if getattr(run.trainer, option) is not None:
            yield option


def _statistics_conflict(run: RunConfig) -> tuple[str, str]:
    """Reason why rolling statistics are not supported, and the fix; empty: they are."""
    if isinstance(run.parallelism, DeepSpeedConfig):
        reason = "is not supported with DeepSpeed, which measures the gradient norm in its step"
        return reason, "set parallelism=fsdp"
    if run.objective.is_user_defined:
        return "is not supported with objective=module", ""
    if isinstance(run.parallelism, DDPConfig) and not run.parallelism.averages_gradients:
        reason = "requires gradients that are equal on every rank, unlike those of local SGD"
        return reason, "set parallelism.comm_hook=none"
    return "", ""


def schedule_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for a warmup that is as long as training."""
    trainer = run.trainer
    if run.world_size < 1 or run.micro_batch < 1 or (trainer.global_batch or 1) < 1:
        return
    if any("_warmup" in issue.key for issue in trainer.validate()):
        return
    if run.data.sequence < 1 or (trainer.max_steps is None and trainer.max_tokens is None):
        return  # the steps of an epoch depend on the data
    warmup, steps = run.schedule.warmup_steps, run.num_steps(samples=0)
    if warmup >= steps > 0:
        length = f"trainer.max_steps={steps}"
        if trainer.max_steps is None:
            length = f"the {steps} steps of trainer.max_tokens={trainer.max_tokens}"
        yield ConfigIssue(
            "schedule.warmup_steps",
            warmup,
            f"must be below {length}",
            f"set schedule.warmup_steps={steps // 10}",
        )
