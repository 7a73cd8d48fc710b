"""Collectives of one rank in one optimizer step, by parallelism strategy.

Tests compare them with the collectives of real steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch

from scalewise.models.base import Weight
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.collective import Collective, CollectiveKind
from scalewise.parallelism.ddp import CommHook, DDPConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.planner.mesh_communication import mesh_collectives
from scalewise.run_config import RunConfig


@singledispatch
def list_collectives(
    config: ParallelismConfig, run: RunConfig, rank: int = 0
) -> tuple[Collective, ...]:
    """Return the collectives of a rank in one optimizer step; without registration, none.

    Args:
        config: Parallelism strategy of ``run``; a strategy registers a function for its config.
        run: Run to train.
        rank: Global rank.
    """
    return ()


list_collectives.register(MeshConfig, mesh_collectives)


@list_collectives.register
def ddp_collectives(config: DDPConfig, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
    """Return the gradient all-reduce of a step, or that of PowerSGD factors.

    PowerSGD counts as after its lossless steps, post-local SGD as before their end.
    """
    if config.world_size == 1:
        return ()
    half = config.comm_hook in (CommHook.fp16, CommHook.bf16, CommHook.fp16_powersgd)
    element_bytes = 2 if half else run.precision.parameters.bytes
    trained = [weight for weight in run.weight_census() if weight.trainable]
    elements = {"gradients": sum(weight.numel for weight in trained)}
    if config.comm_hook.is_powersgd:
        elements = _powersgd_numel(config, trained)
    return tuple(
        Collective(
            CollectiveKind.all_reduce,
            ("replicate",),
            count * element_bytes,
            1,
            name,
            overlaps=True,
        )
        for name, count in elements.items()
        if count
    )


def _powersgd_numel(config: DDPConfig, weights: Iterable[Weight]) -> dict[str, int]:
    """Return the elements that PowerSGD reduces: n x m becomes n x rank and rank x m.

    Parameters that would shrink to no less than half are not compressed (Vogels et al.,
    2019, section 3).
    """
    uncompressed = left = right = 0
    for weight in weights:
        n, m = weight.shape[0], weight.numel // weight.shape[0]
        rank = min(n, m, config.powersgd_rank)
        if 2 * (n + m) * rank < n * m:
            left, right = left + n * rank, right + m * rank
        else:
            uncompressed += weight.numel
    return {"gradients": uncompressed, "left factors": left, "right factors": right}


@list_collectives.register
def deepspeed_collectives(
    config: DeepSpeedConfig, run: RunConfig, rank: int = 0
) -> tuple[Collective, ...]:
    """Return the gradient reduction and the parameter gathering of a step.

    Stage 1 reduces once per step, stages 2 and 3 once per micro-batch. Stage 3 gathers
    parameters before each forward and backward, stages 1 and 2 once per step (Rajbhandari et
    al., 2020, section 7).
    """
    if config.world_size == 1:
        return ()
    passes, precision = run.accumulation, run.precision
    num_trained = num_parameters = run.trainable_parameters
    if config.stage == 3:
        num_parameters = sum(weight.numel for weight in run.weight_census())
    reduced_bytes = num_trained * precision.parameters.bytes
    if config.quantized_gradients:
        reduced_bytes = num_trained // 2  # int4
    gathered_bytes = num_parameters * (1 if config.quantized_weights else precision.compute.bytes)
    num_reductions = passes if config.stage > 1 else 1
    num_gathers = 2 * passes if config.stage == 3 else 1
    axes, gathers_overlap = ("replicate",), config.stage == 3
    return (
        Collective(
            CollectiveKind.reduce_scatter,
            axes,
            reduced_bytes,
            num_reductions,
            "gradients",
            overlaps=config.overlap_comm,
        ),
        Collective(
            CollectiveKind.all_gather,
            axes,
            gathered_bytes,
            num_gathers,
            "weights",
            overlaps=gathers_overlap,
        ),
    )
