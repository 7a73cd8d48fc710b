"""Rules between the training loop or activation checkpointing and the other parts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from math import ceil

from scalewise.activation_checkpointing import (
    ActivationCheckpointing,
    AutoCheckpointing,
    FixedCheckpointing,
)
from scalewise.errors import ConfigIssue
from scalewise.plan_config import PlanSearch
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope
from scalewise.trainer_config import AUTO, SIZE


@singledispatch
def memory_issues(memory: ActivationCheckpointing, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of activation checkpointing with other parts of the run: none."""
    yield from ()


@memory_issues.register(FixedCheckpointing)
def _fixed_checkpointing_issues(
    memory: FixedCheckpointing, run: RunConfig
) -> Iterator[ConfigIssue]:
    """Yield an issue if blocks are compiled: their saved tensors cannot be offloaded."""
    if memory.offload and run.compile.scope is not CompileScope.none:
        reason = "is not supported with compiled blocks"
        yield ConfigIssue("memory.offload", True, reason, "set compile=none")


@memory_issues.register(AutoCheckpointing)
def _auto_checkpointing_issues(memory: AutoCheckpointing, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue with ``plan.search``, which chooses activation checkpointing as well."""
    if run.plan.search is not PlanSearch.none:
        reason, fix = "conflicts with plan.search, which chooses memory itself", "leave it out"
        yield ConfigIssue("memory", "auto", reason, fix)


def trainer_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of ``micro_batch=auto`` with the global batch size and with other groups."""
    if run.trainer.micro_batch != AUTO:
        return
    global_batch, ranks = run.trainer.global_batch, run.parallelism.data_parallel_size
    if global_batch is None:
        reason = "requires trainer.global_batch: otherwise training depends on the device"
        yield ConfigIssue(SIZE, AUTO, reason, "set trainer.global_batch=64")
    elif global_batch % ranks:
        reason = f"is not divisible by {ranks} data-parallel ranks, as {SIZE}=auto requires"
        fix = f"set trainer.global_batch={ceil(global_batch / ranks) * ranks}"
        yield ConfigIssue("trainer.global_batch", global_batch, reason, fix)
    if run.plan.search is not PlanSearch.none:
        reason = "is not supported with plan.search, which chooses it"
        yield ConfigIssue(SIZE, AUTO, reason, "remove it")
    if isinstance(run.memory, AutoCheckpointing):
        reason = "is not supported with memory=auto, which requires a fixed micro-batch size"
        search = f"plan.search=memory plan.fit=auto memory=none {SIZE}=1"
        fix = f"set {SIZE}=8, or search both with {search}"
        yield ConfigIssue(SIZE, AUTO, reason, fix)
