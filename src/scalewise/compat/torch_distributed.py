"""Private names of torch's distributed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from scalewise.compat import PrivateNames

__all__ = [
    "SAVED_COLLECTIVES",
    "AsyncCollectiveTensor",
    "all_gather",
    "all_to_all",
    "fsdp_parameters",
    "functional_collectives",
    "schedule_stages",
    "unsharded_gradients",
]

private = PrivateNames("torch")

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
    group = module._get_fsdp_state()._fsdp_param_group
    return list(group.fsdp_params) if group else []


@private.reads("unsharded_accumulated_grad")
def unsharded_gradients(parameter: Any) -> list[Tensor]:
    """Gradients that an FSDP parameter has not reduced yet; no public API returns them."""
    gradients = [parameter.unsharded_accumulated_grad]
    if hasattr(parameter, "_unsharded_param"):  # set by the first all-gather
        gradients.append(parameter._unsharded_param.grad)
    return [gradient for gradient in gradients if gradient is not None]


@private.reads("_stage")
def schedule_stages(schedule: Any) -> list[nn.Module]:
    """Stages of this rank of a pipeline schedule, which has no public attribute for them."""
    return getattr(schedule, "_stages", None) or [schedule._stage]
