"""Small runs that are compared: the strategy of a command line, and one device with its samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from scalewise.callback_config import STATE_RECORDER
from scalewise.checkpoint_config import CheckpointConfig
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import DeviceKind, this_machine
from scalewise.lr_schedules import ConstantConfig
from scalewise.memory_config import AutoCheckpointing, FixedCheckpointing
from scalewise.optimizers import SGDConfig
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.parallelism.single import SingleConfig
from scalewise.plan_config import PlanConfig
from scalewise.precision import FloatFormat, Precision
from scalewise.registry import with_fields
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope
from scalewise.tracking_config import WandbConfig, WandbMode
from scalewise.trainer_config import TrainerConfig
from scalewise.validation.run_issues import iter_issues, iter_machine_issues

GRACE_SECONDS = 2.0
"""Grace period after a signal; a comparison has nothing to save."""
WEIGHT_DECAY = 0.01


def reduce_run(run: RunConfig) -> RunConfig:
    """Small run of the strategy with SGD, on the devices of the run or else on CPU ranks.

    Raises:
        ConfigError: the small run is not valid; with every config issue.
    """
    on_cuda = run.hardware.device is DeviceKind.cuda
    gpus = len(this_machine().gpus)
    if on_cuda and not gpus:
        run = replace(run, hardware=replace(run.hardware, device=DeviceKind.cpu))
    on_cuda = run.hardware.device is DeviceKind.cuda
    parallelism = run.parallelism
    if parallelism.world_size > (gpus if on_cuda else this_machine().max_cpu_ranks):
        parallelism = parallelism.shrink()
    run = replace(run, parallelism=parallelism)
    if not run.objective.is_user_defined:
        run = _reduce_model(run)
    small = replace(
        run,
        trainer=_reduce_trainer(run),
        checkpoint=CheckpointConfig(best=False, at_end=False),
        tracking=WandbConfig(mode=WandbMode.disabled),
        launch=replace(
            run.launch, max_restarts=0, refuse_unfit=False, grace=GRACE_SECONDS, gc_every=None
        ),
        plan=PlanConfig(),
        resume=None,
    )
    issues = [*_approximation_issues(run), *iter_issues(small), *iter_machine_issues(small)]
    if issues:
        raise ConfigError(issues)
    return small


def _approximation_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for a strategy that is not meant to equal one device."""
    if isinstance(run.parallelism, DDPConfig) and run.parallelism.comm_hook.changes_updates:
        hook = run.parallelism.comm_hook.value
        reason = "is not equal to one device once its lossless steps are over"
        fix = "set parallelism.comm_hook=none"
        yield ConfigIssue("parallelism.comm_hook", hook, reason, fix)


def reference_run(small: RunConfig) -> RunConfig:
    """The same steps on one device, in one micro-batch, without memory savings and compilation."""
    run = replace(small, parallelism=SingleConfig())
    if small.objective.is_user_defined:
        return run
    return replace(
        run,
        objective=replace(small.objective, loss_chunk=None),
        memory=FixedCheckpointing(),
        compile=replace(small.compile, scope=CompileScope.none),
        optimizer=replace(small.optimizer, shard=False),
        trainer=replace(small.trainer, micro_batch=small.global_batch),
    )


def contribution_run(small: RunConfig) -> RunConfig:
    """The first step on one device, in the micro-batches of all ranks one after another."""
    run = reference_run(small)
    trainer = replace(small.trainer, max_steps=1, validate_every=None)
    return replace(run, trainer=trainer)


def in_fp32(run: RunConfig) -> RunConfig:
    """The run in fp32."""
    return replace(run, precision=Precision())


def with_recorder(
    run: RunConfig, perturbation: float, batches_per_step: int, *, contributions: bool = False
) -> RunConfig:
    """The run with the callback that records its state; the arguments are those of the callback."""
    recorder = {
        "_target_": STATE_RECORDER,
        "perturbation": perturbation,
        "batches_per_step": batches_per_step,
        "contributions": contributions,
    }
    return replace(run, callbacks={**run.callbacks, "state_recorder": recorder})


def is_fp32(run: RunConfig) -> bool:
    """Whether the run computes in fp32."""
    return type(run.precision) is Precision and run.precision.compute is FloatFormat.fp32


def _reduce_model(run: RunConfig) -> RunConfig:
    """Reduce model and sequence, and replace the optimizer by SGD."""
    options, parallelism, data = run.verify, run.parallelism, run.data
    if isinstance(parallelism, MeshConfig) and parallelism.sizes["pipeline"] > 1:
        # One pipeline micro-batch per stage is the default.
        parallelism = replace(parallelism, pipeline_micro_batches=None)
    stages = parallelism.num_stages if isinstance(parallelism, MeshConfig) else 1
    sequence = data.sequence
    if options.sequence is not None and not data.target_length:
        sequence = min(sequence, options.sequence)
    memory = FixedCheckpointing() if isinstance(run.memory, AutoCheckpointing) else run.memory
    optimizer = SGDConfig(
        lr=options.learning_rate,
        weight_decay=WEIGHT_DECAY,
        shard=run.optimizer.shard,
        lr_factors=run.optimizer.lr_factors,
        no_decay=run.optimizer.no_decay,
        lr_transfer=run.optimizer.lr_transfer,
    )
    adapter = run.adapter if run.adapter.resume is None else with_fields(run.adapter, resume=None)
    return replace(
        run,
        parallelism=parallelism,
        model=run.model.shrink(max(options.layers, stages), options.width),
        data=with_fields(data, sequence=sequence),
        adapter=adapter,
        memory=memory,
        optimizer=optimizer,
        schedule=ConstantConfig(),
    )


def _reduce_trainer(run: RunConfig) -> TrainerConfig:
    """Reduce steps and batch sizes; a global batch that ranks share unevenly stays uneven."""
    options, trainer, parallelism = run.verify, run.trainer, run.parallelism
    steps = options.steps
    every = None if trainer.validate_every is None else steps
    trainer = replace(
        trainer,
        max_steps=steps,
        max_tokens=None,
        max_epochs=None,
        batch_warmup={},
        sequence_warmup={},
        validate_every=every,
        validate_first=False,
        log_every=steps + 1,
    )
    if run.objective.is_user_defined:
        return trainer
    size = min(run.micro_batch, options.micro_batch)
    if isinstance(parallelism, MeshConfig) and parallelism.sizes["pipeline"] > 1:
        chunks = parallelism.num_pipeline_micro_batches
        size = ceil(size / chunks) * chunks
    accumulation = min(run.accumulation, options.accumulation)
    samples = size * parallelism.data_parallel_size * accumulation
    is_uneven = run.global_batch != run.accumulation * run.samples_per_forward
    return replace(
        trainer,
        micro_batch=size,
        global_batch=samples - is_uneven,
        validation_rows=min(trainer.validation_rows, samples + 1),
    )
