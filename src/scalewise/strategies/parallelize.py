"""Transforms that parallelize a model: their order for scalewise's models, FSDP for other modules.

Parameters stay on the meta device until all transforms are applied, so that no rank ever stores the
full model.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from scalewise.adapters.build import apply_adapter
from scalewise.checkpoints import initial_parameters
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_meta
from scalewise.objectives.losses import set_chunked_loss
from scalewise.parallelism.mesh import MeshConfig
from scalewise.precision.build import apply_precision
from scalewise.quantization.build import apply_quantization
from scalewise.strategies import (
    context_parallel,
    expert_parallel,
    tensor_parallel,
    tensor_parallel_experts,
)
from scalewise.strategies.activation_checkpointing import apply_checkpointing, compile_module

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig
    from scalewise.strategies.context_parallel import SequenceSharding


class RankMesh(Protocol):
    """Mesh and device of this rank, as ``MeshStrategy`` has them after ``setup_environment``."""

    spec: MeshConfig

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""

    @property
    def device_mesh(self) -> DeviceMesh:
        """Mesh whose axis ``shards`` includes the context ranks."""

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """Mesh with an axis of expert ranks; None: each rank computes all experts."""

    def axis_mesh(self, name: str) -> DeviceMesh | None:
        """One-dimensional submesh of this rank along an axis; None: the axis has size 1."""


def build_sharded(
    run: RunConfig, stage: StageSlice, rank_mesh: RankMesh, sharding: SequenceSharding | None
) -> ModelModule:
    """Build one pipeline stage and shard it over the mesh of ``rank_mesh``.

    ``sharding``: assignment of tokens to context ranks; None: no context parallelism. Parameters
    lie on the rank's device, or in host memory with CPU offload.
    """
    spec = rank_mesh.spec
    with torch.device("meta"):
        module = build_meta(run.model, stage)
    module.set_sequence_weight(run.sequence_loss_weight)

    if sharding is not None:
        module.replace_attention(
            partial(context_parallel.build_attention, spec.attention, sharding)
        )

    # Before the adapter: its layers wrap the quantized ones as their base layers.
    apply_quantization(run.quantization, module, run.model)
    apply_precision(run.precision, module, run.model, run.hardware.device)
    apply_adapter(run.adapter, module, run.model)

    # After the adapter, whose parameters are sharded as well; before FSDP, which shards DTensors.
    tensor_mesh, expert_mesh = rank_mesh.axis_mesh("tensor"), rank_mesh.expert_mesh
    if tensor_mesh is not None:
        tensor_parallel.apply_tensor_parallel(
            module,
            run.adapter.tensor_parallel_styles(run.model),
            tensor_mesh,
            spec,
            None if expert_mesh is None else expert_mesh["expert", "tensor"],
        )
    if expert_mesh is not None:
        expert_parallel.apply_expert_parallel(module, expert_mesh["expert"])
    set_chunked_loss(
        run.objective,
        module,
        in_forward=run.computes_loss_gradients_in_forward,
        compile_config=run.loss_compile,
    )

    # Before torch.compile, which then compiles the recomputation too.
    apply_checkpointing(run.memory, module, stage, run.hardware.device)

    # Before FSDP, whose hooks would break the graph of a block.
    compile_module(run.applied_compile, module, len(run.sequence_lengths))

    if spec.uses_fsdp:
        # Views of tensor-parallel embeddings and of blocks such as OPT's: nothing of ours changes
        # them in place. A user module may, and keeps FSDP2's warning.
        warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
        shard_blocks(module, module.layers(), run, rank_mesh, run.model.end_modules)
        _gather_head_for_chunked_loss(module)

    # After FSDP: only shards are allocated.
    module.to_empty(device=torch.device("cpu") if spec.cpu_offload else rank_mesh.root_device)
    initial_parameters.init_parameters(module, run.model, run.adapter, run.seed)
    for name, buffer in module.named_buffers():  # CPU offload applies to parameters only
        parent, _, key = name.rpartition(".")
        setattr(module.get_submodule(parent), key, buffer.to(rank_mesh.root_device))
    return module


def position_ids(
    run: RunConfig, sharding: SequenceSharding | None, device: torch.device
) -> dict[int, Tensor]:
    """Positions of this rank's tokens, ``positions_T``, by sequence length of the run.

    ``sharding``: assignment of tokens to context ranks; None: no context parallelism.
    """
    if sharding is not None:
        return {length: order.positions for length, order in sharding.orders.items()}
    return {
        length: torch.arange(run.adapter.prompt_tokens + length, device=device)
        for length in run.sequence_lengths.values()
    }


def shard_user_module(module: LightningModule, run: RunConfig, rank_mesh: RankMesh) -> None:
    """Apply FSDP to a user-defined module: to each repeated block, then to the rest as the root.

    Its steps are registered as forward methods of the root, which gathers the parameters that they
    read directly.
    """
    shard_blocks(module, repeated_blocks(module), run, rank_mesh)
    for step in ("training_step", "validation_step"):
        if is_overridden(step, module):
            register_fsdp_forward_method(module, step)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Outermost children that share a ``ModuleList`` or ``Sequential`` with others of their class.

    Children without parameters are left out.
    """
    if isinstance(module, nn.ModuleList | nn.Sequential):
        with_parameters = [child for child in module if next(child.parameters(), None) is not None]
        counts = Counter(map(type, with_parameters))
        if repeated := [child for child in with_parameters if counts[type(child)] > 1]:
            return repeated
    return [block for child in module.children() for block in repeated_blocks(child)]


def shard_blocks(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    run: RunConfig,
    rank_mesh: RankMesh,
    end_modules: Sequence[str] = (),
) -> None:
    """Apply FSDP2 to each block and to the end modules, then to the rest as the root.

    Parameters are sharded over the axes ``shards`` and ``context`` together, and replicated over
    ``replicate`` (HSDP).

    Args:
        module: Model or pipeline stage.
        blocks: Its blocks.
        run: Config of the run.
        rank_mesh: Mesh of this rank.
        end_modules: Names of the token embedding and of the head, with parameters of their own.
    """
    spec, mesh = rank_mesh.spec, rank_mesh.device_mesh
    fsdp_mesh = mesh["replicate", "shards"] if spec.sizes["replicate"] > 1 else mesh["shards"]
    parameters, compute = run.precision.parameters.bytes, run.precision.compute
    is_mixed = compute.bytes < parameters
    mp_policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[compute.value])
        if is_mixed
        else None,
        reduce_dtype=torch.float32 if is_mixed else None,
        cast_forward_inputs=False,
    )
    pin_memory = rank_mesh.root_device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if spec.cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=fsdp_mesh, mp_policy=mp_policy, offload_policy=offload)
    block_options: dict[str, Any] = {
        "reshard_after_forward": spec.frees_after_forward,
        "shard_placement_fn": tensor_parallel_experts.fsdp_shard_dim,
    }
    if rank_mesh.expert_mesh is not None:
        placement = expert_parallel.expert_placement(module, rank_mesh.expert_mesh)
        block_options["shard_placement_fn"] = placement
    # Blocks and ends first: the root then shards the parameters that none of them contains.
    sharded = [shard(it, **block_options) for it in blocks]
    modules, head = dict(module.named_modules()), None
    for end in filter(None, map(modules.get, end_modules)):
        if next(end.parameters(), None) is None:
            continue  # a pipeline stage without it
        if isinstance(end, nn.Embedding):
            embedding = shard(end, reshard_after_forward=spec.frees_after_forward)
            embedding.set_unshard_in_backward(False)  # its backward reads no weight
        else:
            head = shard(end, reshard_after_forward=False)  # its backward comes next
    root = shard(module)
    _set_prefetch(sharded, head or root, spec.prefetch)


def _gather_head_for_chunked_loss(module: ModelModule) -> None:
    """Let FSDP gather the head once for a chunked loss, not for each chunk."""
    loss, head = module.loss, cast(Any, module).head
    if loss is None or not isinstance(head, FSDPModule):
        return
    head = cast(Any, head)
    head.chunked_loss = partial(loss, partial(module.logits, hooks=False))
    register_fsdp_forward_method(head, "chunked_loss")
    module.loss = lambda _, x_BTW, labels_BT: head.chunked_loss(x_BTW, labels_BT)


def _set_prefetch(blocks: list[FSDPModule], head: FSDPModule, depth: int) -> None:
    """Set how many blocks are all-gathered ahead; FSDP2's default is one.

    ``head``: module whose backward pass comes before that of the blocks.
    """
    if depth == 1:
        return
    for index, module in enumerate([*blocks, head]):
        module.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
        # An empty list would be FSDP2's default; the module itself is gathered already.
        backward = blocks[max(0, index - depth) : index][::-1] or [module]
        module.set_modules_to_backward_prefetch(backward)
