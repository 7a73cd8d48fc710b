"""Rules between the parallelism strategy and the other parts of a run."""

from __future__ import annotations

import ctypes.util
import importlib.util
from collections.abc import Iterator
from functools import singledispatch

from scalewise.errors import ConfigIssue
from scalewise.optimizers import AdamWConfig
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.ddp import CommHook, DDPConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig, OffloadTarget
from scalewise.parallelism.mesh import MeshConfig
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope
from scalewise.validation.mesh_rules import mesh_issues


@singledispatch
def parallelism_issues(parallelism: ParallelismConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for each part of ``run`` that the strategy does not support."""
    yield from _optimizer_issues(parallelism, run)


@parallelism_issues.register(DDPConfig)
def _ddp_issues(parallelism: DDPConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for hooks that the device or the optimizer does not support."""
    yield from _optimizer_issues(parallelism, run)
    yield from parallelism.validate_on_device(run.hardware.device)
    hook = parallelism.comm_hook
    if hook is CommHook.post_local_sgd and run.optimizer.shard:
        yield ConfigIssue(
            "optimizer.shard",
            True,
            "post_local_sgd would update each parameter from the samples of one rank only",
            "set optimizer.shard=false, or another parallelism.comm_hook",
        )
    if parallelism.static_graph and run.accumulation > 1:
        yield ConfigIssue(
            "parallelism.static_graph",
            True,
            f"fails with {run.accumulation} micro-batches per step in torch's DDP",
            "set parallelism.static_graph=false, or "
            f"trainer.global_batch={run.samples_per_forward}",
        )


@parallelism_issues.register(DeepSpeedConfig)
def _deepspeed_issues(parallelism: DeepSpeedConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for each part of ``run`` that DeepSpeed does not support."""
    yield from _optimizer_issues(parallelism, run)
    if parallelism.stage == 3 and run.compile.scope is not CompileScope.none:
        yield ConfigIssue(
            "compile.scope",
            run.compile.scope.value,
            "is not supported with stage 3: torch cannot trace its parameter hooks",
            "set compile=none, or parallelism=fsdp or deepspeed_zero2",
        )
    if run.precision.compute is FloatFormat.fp16:
        yield ConfigIssue(
            "precision",
            run.option("precision"),
            "is not supported: DeepSpeed's loss scale is not part of a checkpoint",
            "set precision=bf16_mixed, or parallelism=ddp",
        )
    offloaded = parallelism.offload_optimizer
    steps_elsewhere = run.optimizer.elementwise and not isinstance(run.optimizer, AdamWConfig)
    if offloaded is not OffloadTarget.none and steps_elsewhere:
        yield ConfigIssue(
            "optimizer",
            run.option("optimizer"),
            f"is not supported with offload_optimizer={offloaded}, which uses DeepSpeedCPUAdam",
            "set optimizer=adamw, or parallelism.offload_optimizer=none",
        )
    yield from parallelism.validate_on_device(run.hardware.device)


@parallelism_issues.register(MeshConfig)
def _mesh_issues(parallelism: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for sizes that do not divide the model or the data, and for axes."""
    yield from _optimizer_issues(parallelism, run)
    yield from mesh_issues(parallelism, run)


def _optimizer_issues(parallelism: ParallelismConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for each option of the optimizer that the strategy does not support."""
    if run.optimizer.in_backward and parallelism.reduces_after_backward:
        reason = "requires complete gradients in backward; this strategy reduces them later"
        fix = "set optimizer.in_backward=false, or parallelism=fsdp"
        yield ConfigIssue("optimizer.in_backward", True, reason, fix)
    if run.optimizer.shard and not parallelism.supports_optimizer_sharding:
        reason = "requires replicas that partition optimizer state; this strategy has none"
        fix = "set optimizer.shard=false, or parallelism=ddp"
        yield ConfigIssue("optimizer.shard", True, reason, fix)
    if run.optimizer.offload and not parallelism.supports_optimizer_offload:
        reason = "requires unsharded parameters; this strategy has its own offload option"
        option = "offload_optimizer=cpu" if parallelism.flattens_parameters else "cpu_offload=true"
        fix = f"set optimizer.offload=false parallelism.{option}"
        yield ConfigIssue("optimizer.offload", True, reason, fix)
    gathered = run.optimizer.gathers_shards and parallelism.has_gatherable_shards
    needs_unsharded = (
        run.optimizer.uses_whole_weights and parallelism.shards_parameters and not gathered
    )
    if needs_unsharded or (parallelism.flattens_parameters and not run.optimizer.elementwise):
        chosen = run.option("optimizer")
        reason = "requires unsharded parameters; this strategy shards them"
        if not needs_unsharded:
            reason = "requires separate parameters; this strategy updates one flat vector"
        better = "fsdp" if run.optimizer.gathers_shards else "ddp"
        fix = f"set optimizer=adamw, or parallelism={better}"
        yield ConfigIssue("optimizer", chosen, reason, fix)


@singledispatch
def parallelism_machine_issues(
    parallelism: ParallelismConfig, run: RunConfig
) -> Iterator[ConfigIssue]:
    """Yield an issue for each requirement of the strategy that this machine does not meet."""
    yield from ()


@parallelism_machine_issues.register(DeepSpeedConfig)
def _deepspeed_machine_issues(
    parallelism: DeepSpeedConfig, run: RunConfig
) -> Iterator[ConfigIssue]:
    """Yield an issue for each package or library that is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        chosen = run.option("parallelism")
        fix = "pip install 'scalewise[deepspeed]'"
        yield ConfigIssue("parallelism", chosen, "deepspeed is not installed", fix)
    if "async_io" in parallelism.native_extensions and ctypes.util.find_library("aio") is None:
        key = "offload_optimizer"
        if parallelism.offload_optimizer is not OffloadTarget.nvme:
            key = "offload_parameters"
        fix = f"apt-get install libaio-dev, or set parallelism.{key}=cpu"
        yield ConfigIssue(f"parallelism.{key}", "nvme", "requires libaio", fix)
