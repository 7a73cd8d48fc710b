"""The order: context, packing, adapter, tensor, recompute, compile, shard; then the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.strategies import context_parallel, tensor_parallel

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig
    from scalewise.strategies.context_parallel import SequenceSharding
    from scalewise.strategies.nd_parallel import MeshStrategy


def build_sharded(
    run: RunConfig, stage: StageSlice, strategy: MeshStrategy, sharding: SequenceSharding | None
) -> ModelModule:
    """Returns this rank's shards of a part of the model, on its device."""
    spec = strategy.spec
    with torch.device("meta"):
        module = run.model.build_meta(stage)
    if sharding is not None:
        module.replace_attention(
            partial(context_parallel.build_attention, spec.attention, sharding)
        )
    run.quantization.apply(module, run.model)
    run.precision.apply(module, run.model, run.hardware.device)
    run.adapter.apply(module, run.model)
    tensor_mesh = strategy.axis_mesh("tensor")
    if tensor_mesh is not None:
        tensor_parallel.apply_tensor_parallel(
            module, run.adapter.tensor_parallel_styles(run.model), tensor_mesh, spec
        )
    run.objective.apply(module, in_forward=run.objective.takes_gradients_in_forward(run))
    run.memory.apply(module, stage)
    run.compile.apply(module)
    if max(spec.sizes[axis] for axis in ("replicate", "shards", "context")) > 1:
        shard_blocks(module, module.layers(), run, strategy)
    module.to_empty(device=torch.device("cpu") if spec.cpu_offload else strategy.root_device)
    run.model.init_weights(module, run.seed)
    run.adapter.init_or_load_weights(module, run.model, run.seed)
    for name, buffer in module.named_buffers():  # not offloaded: FSDP moves parameters alone
        holder, _, key = name.rpartition(".")
        setattr(module.get_submodule(holder), key, buffer.to(strategy.root_device))
    row = run.adapter.ahead + run.data.sequence
    places_T = torch.arange(row) if sharding is None else sharding.places_T
    module.set_position_ids(places_T.to(strategy.root_device))
    return module


def shard_user_module(module: LightningModule, run: RunConfig, strategy: MeshStrategy) -> None:
    """Shards a user's module: the children that repeat, and the rest as the root.

    Its steps count as forward passes of the root, which gathers what they read by themselves.
    """
    shard_blocks(module, repeated_blocks(module), run, strategy)
    for step in ("training_step", "validation_step"):
        if is_overridden(step, module):
            register_fsdp_forward_method(module, step)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost children that stand in a list with others of their class."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        holding = [child for child in module if next(child.parameters(), None) is not None]
        kinds = Counter(map(type, holding))
        if alike := [child for child in holding if kinds[type(child)] > 1]:
            return alike
    return [block for child in module.children() for block in repeated_blocks(child)]


def shard_blocks(
    module: nn.Module, blocks: Sequence[nn.Module], run: RunConfig, strategy: MeshStrategy
) -> None:
    """Shards each block, and the rest as the root, over the axes of shards and context."""
    spec, mesh = strategy.spec, strategy.device_mesh
    over = mesh["replicate", "shards"] if spec.sizes["replicate"] > 1 else mesh["shards"]
    parameters, compute = run.precision.parameters.bytes, run.precision.compute
    mixed = compute.bytes < parameters
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[compute.value])
        if mixed
        else None,
        reduce_dtype=torch.float32 if mixed else None,
        cast_forward_inputs=False,
    )
    pinned = strategy.root_device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if spec.cpu_offload else OffloadPolicy()
    for block in blocks:
        fully_shard(
            block,
            mesh=over,
            reshard_after_forward=spec.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )
    fully_shard(module, mesh=over, mp_policy=policy, offload_policy=offload)
    _set_prefetch([block for block in blocks if isinstance(block, FSDPModule)], spec.prefetch)


def _set_prefetch(blocks: list[FSDPModule], depth: int) -> None:
    """Sets how many blocks are gathered ahead; one is what FSDP2 does by itself."""
    if depth == 1:
        return
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, place - depth) : place][::-1])
