"""Private names of torch's distributed packages, also for steps on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from scalewise.compat import PrivateNames

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = [
    "SAVED_COLLECTIVES",
    "AsyncCollectiveTensor",
    "all_gather",
    "all_to_all",
    "clear_sharding_caches",
    "fsdp_parameters",
    "fsdp_placements",
    "functional_collectives",
    "gradient_metadata",
    "init_fake_process_group",
    "is_strided_shard",
    "on_rank_failure",
    "parameter_pair",
    "replaced_mesh_init",
    "replaced_stage_metadata",
    "replaced_to_empty",
    "schedule_stages",
    "set_group_timeouts",
    "strided_shard",
    "uncounted_shape_propagation",
    "unsharded_gradients",
]

private = PrivateNames("torch")

STRIDED_SHARD = "torch.distributed.tensor.placement_types:_StridedShard"
STAGE = "torch.distributed.pipelining:PipelineStage"
PROPAGATE = (
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached"
)

with private:
    from torch.distributed import _functional_collectives
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    """Result of a collective in flight; ``torch.distributed`` offers no test for it."""

    all_gather: Any = (
        getattr(
            _functional_collectives,
            "all_gather_single_autograd",
            None,  # torch 2.11 has the old name
        )
        or _functional_collectives.all_gather_tensor_autograd
    )
    """All-gather with gradients; collectives of ``torch.distributed`` have none."""
    all_to_all: Any = _functional_collectives.all_to_all_single_autograd
    """All-to-all with gradients; collectives of ``torch.distributed`` have none."""

with private:
    functional_collectives: Any = torch.ops._c10d_functional
    """Collectives as operators, also of fake tensors without a process group; not documented."""
    SAVED_COLLECTIVES = frozenset(
        {
            functional_collectives.all_reduce.default,
            functional_collectives.reduce_scatter_tensor.default,
            functional_collectives.all_to_all_single.default,
        }
    )
    """Collective operators whose results selective checkpointing stores; not documented."""

if not TYPE_CHECKING:
    __getattr__ = private.missing_name


@private.reads("_fsdp_param_group", "_get_fsdp_state", "fsdp_params")
def fsdp_parameters(module: FSDPModule) -> list[Any]:
    """Parameters with their buffers of an FSDP module; the public API returns shards only."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return [parameter for group in groups for parameter in group.fsdp_params]


def fsdp_placements(mesh: DeviceMesh) -> Callable[[Shard | None], Any]:
    """Function from a dimension, None for the first, to the result of a ``shard_placement_fn``.

    The result shards a parameter over another mesh, which has one axis, or one of replicas before
    it. The documentation of ``fully_shard`` names its class, which no public module has. torch
    2.11 does not have it.
    """
    common = "torch.distributed.fsdp._fully_shard._fsdp_common"
    if mesh.ndim == 1:
        info = private.get(f"{common}:FSDPMeshInfo")(mesh, shard_mesh_dim=0)
    else:
        hybrid = private.get(f"{common}:HSDPMeshInfo")
        info = hybrid(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    result = private.get(f"{common}:ShardPlacementResult")
    return lambda placement: result(placement, info)


def strided_shard(dim: int, parts: int) -> Any:
    """Placement that shards each of ``parts`` equal parts of a dimension, as FSDP2 makes them.

    The local tensor has the shards of all parts, one after the other. Its class is not documented.
    """
    return private.get(STRIDED_SHARD)(dim, split_factor=parts)


def is_strided_shard(placement: Any) -> bool:
    """Whether a placement is one of ``strided_shard``."""
    return isinstance(placement, private.get(STRIDED_SHARD))


@private.reads("_unsharded_param", "sharded_param")
def parameter_pair(parameter: Any) -> tuple[Any, Any]:
    """Gathered parameter, None before the first all-gather, and shard of an FSDP parameter.

    The module has one of them; the public API returns that one.
    """
    return getattr(parameter, "_unsharded_param", None), parameter.sharded_param


@private.reads("unsharded_accumulated_grad")
def unsharded_gradients(parameter: Any) -> list[Tensor]:
    """Gradients that an FSDP parameter has not reduced yet; no public API returns them."""
    gradients = [parameter.unsharded_accumulated_grad]
    if hasattr(parameter, "_unsharded_param"):  # set by the first all-gather
        gradients.append(parameter._unsharded_param.grad)
    return [gradient for gradient in gradients if gradient is not None]


_WAIT_FOR_RANKS = "torch.multiprocessing.spawn:ProcessContext._join_procs_with_timeout"


@contextmanager
def on_rank_failure(action: Callable[[Mapping[int, int]], None]) -> Iterator[None]:
    """Call ``action`` with the process IDs by rank after a failed rank, before torch elastic waits.

    Torch elastic waits for 30 s for the other ranks to end by SIGTERM, and has no option for it.
    """
    wait_for_ranks = private.get(_WAIT_FOR_RANKS)

    def wait(context: Any, timeout: float) -> None:
        action({rank: process.pid for rank, process in enumerate(context.processes)})
        wait_for_ranks(context, timeout)

    with private.replaced(_WAIT_FOR_RANKS, wait):
        yield


@private.reads("_set_pg_timeout", "_world")
def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of all process groups of this process.

    Groups of a device mesh have the default one; the public API sets it for new groups only.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timeout, group)


@private.reads("_stage")
def schedule_stages(schedule: Any) -> list[nn.Module]:
    """Stages of this rank of a pipeline schedule, which has no public attribute for them."""
    return getattr(schedule, "_stages", None) or [schedule._stage]


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Make this process a rank of a group whose collectives do nothing; torch tests with it."""
    store = private.get("torch.testing._internal.distributed.fake_pg:FakeStore")()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)


def clear_sharding_caches() -> None:
    """Clear DTensor's caches, which refer to process groups; no public function does."""
    private.get("torch.distributed.tensor.debug:_clear_sharding_prop_cache")()
    private.get("torch.distributed.tensor._redistribute:_gen_transform_infos").cache_clear()


@private.reads("_stage_meta")
def gradient_metadata(stage: PipelineStage) -> Any:
    """Metadata of the gradients of a stage's outputs, as the next stage would send them."""
    outputs = stage._stage_meta.outputs
    assert outputs is not None
    utils = "torch.distributed.pipelining._utils"
    gradients = private.get(f"{utils}:_derive_grad_metas")(outputs)
    return private.get(f"{utils}:_StageBackwardMeta")(gradients)


@contextmanager
def replaced_stage_metadata(
    send: Callable[..., None], receive: Callable[..., Any]
) -> Iterator[None]:
    """Context in which pipeline stages exchange tensor metadata by functions.

    torch sends them between processes, and votes on the kind of inference by tensor data.

    Args:
        send: Function of a stage, its metadata and the index of the receiving stage.
        receive: Function of a stage and the index of the sending stage; returns the metadata.
    """
    dynamic = private.get("torch.distributed.pipelining._utils:InferenceMode.DYNAMIC")

    def choose_dynamic(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            private.replace_attribute(stage, "_inference_mode", dynamic)

    schedule = "torch.distributed.pipelining.schedules:_PipelineSchedule"
    with (
        private.replaced(f"{schedule}._warmup_p2p", choose_dynamic),
        private.replaced(f"{STAGE}._send_meta", send),
        private.replaced(f"{STAGE}._recv_meta", receive),
    ):
        yield


@contextmanager
def uncounted_shape_propagation() -> Iterator[None]:
    """Context in which active modes do not see DTensor's extra run of an operator for its shape.

    No public mode distinguishes this run from the operator itself.
    """
    propagate = private.get(PROPAGATE)
    disable_modes = private.get("torch.utils._python_dispatch:_disable_current_modes")

    def propagate_without_modes(self: Any, schema: Any) -> Any:
        with disable_modes():
            return propagate(self, schema)

    with private.replaced(PROPAGATE, propagate_without_modes):
        yield


@contextmanager
def replaced_mesh_init(
    wrap: Callable[[Callable[..., None]], Callable[..., None]],
) -> Iterator[None]:
    """Context with another constructor of meshes, which computes with values of a tensor.

    Args:
        wrap: Function that returns the constructor for the original one.
    """
    with private.replaced(
        "torch.distributed.device_mesh:DeviceMesh.__init__", wrap(DeviceMesh.__init__)
    ):
        yield


@contextmanager
def replaced_to_empty(
    wrap: Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]],
) -> Iterator[None]:
    """Context with another ``Module.to_empty``, which cannot swap fake tensors.

    Args:
        wrap: Function that returns the method for the original one.
    """
    with private.replaced("torch.nn:Module.to_empty", wrap(nn.Module.to_empty)):
        yield
