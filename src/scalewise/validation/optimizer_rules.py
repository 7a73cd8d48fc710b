"""Rules between the optimizer and the other parts of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import singledispatch

from scalewise.errors import ConfigIssue
from scalewise.optimizers import OptimizerConfig
from scalewise.optimizers.config import ScheduleFreeConfig
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig


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
    if run.precision.compute is FloatFormat.fp16:
        reason = "steps before a scaled gradient is known to be finite"
        yield ConfigIssue(key, True, reason, "set precision=bf16_mixed")
    if optimizer.averages_weights:
        reason = "is not supported with optimizers that average weights"
        yield ConfigIssue(key, True, reason, "set optimizer=adamw")
