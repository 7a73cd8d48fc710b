"""Conversion between the partitions of a ZeRO optimizer and unpartitioned tensors by name.

DeepSpeed flattens the parameters of a group into one tensor of master weights. Every rank stores
and updates a partition of it, with the optimizer state of that partition.

Functions import deepspeed when they are called: it reads ``DS_ACCELERATOR`` when it is imported,
which the strategy sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.compat.deepspeed import (
    link_states,
    partition_all,
    swap_in,
    swap_out,
    swaps_group,
    write_partitions,
)
from scalewise.measure.memory import StrategyBuffers

Names = Mapping[nn.Parameter, str]
ReadTensor = Callable[[str, Tensor], None]
"""Fill an unpartitioned tensor from a checkpoint, by name."""
Averages = Sequence[Tensor]
"""This rank's averages in fp32, one for each of ``master_partitions``."""

STEP_SLOT = "step"
"""Slot of the step count, the only scalar of the state."""
AVERAGE_SLOT = "average"
"""Slot of the moving average of the weights while it is gathered or loaded."""


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Unpartitioned shape of a parameter."""
    return cast(torch.Size, getattr(parameter, "ds_shape", parameter.shape))


def full_weight(parameter: nn.Parameter) -> Tensor:
    """Unpartitioned master weight of a parameter; of a frozen one, the parameter in fp32.

    All ranks must call this.
    """
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        return cast(Tensor, safe_get_full_fp32_param(parameter))
    with GatheredParameters([parameter], enabled=_is_partitioned(parameter)):
        return parameter.detach().float().clone()


def iter_state(zero: Any, names: Names) -> Iterator[tuple[str, Tensor]]:
    """Optimizer state by name, as ``exp_avg/blocks.0.weight``; all ranks must iterate."""
    from deepspeed.utils import safe_get_full_optimizer_state

    link_states(zero)
    state: dict[str, Any] = next((state for state in zero.optimizer.state.values() if state), {})
    slots = [slot for slot, value in state.items() if slot != STEP_SLOT and value is not None]
    for parameter, name in _trained_parameters(names):
        for slot in slots:
            yield f"{slot}/{name}", safe_get_full_optimizer_state(parameter, slot)
        if STEP_SLOT in state:
            yield f"{STEP_SLOT}/{name}", torch.tensor([float(state[STEP_SLOT])])


def load_weights(zero: Any, names: Names, read: ReadTensor) -> None:
    """Set master weights, and the parameters of the forward pass, from a checkpoint.

    ``read`` fills an unpartitioned tensor by name.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    for parameter, name in names.items():
        tensor = torch.empty(full_shape(parameter), dtype=torch.float32)
        read(name, tensor)
        if not parameter.requires_grad:
            stored = getattr(parameter, "ds_tensor", parameter.data)
            stored.copy_(
                _rank_partition(parameter, tensor) if _is_partitioned(parameter) else tensor
            )
        elif _is_partitioned(parameter):
            safe_set_local_fp32_param(parameter, _rank_partition(parameter, tensor))
        else:
            safe_set_full_fp32_param(parameter, tensor)
    copy_masters_to_weights(zero, names)


def copy_masters_to_weights(zero: Any, names: Names) -> None:
    """Set the parameters of the forward pass to the master weights; all ranks must call this."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
    else:
        _copy_stage3_masters(zero)
        _drop_secondary_partitions(names)


def iter_averages(zero: Any, names: Names, partitions: Averages) -> Iterator[tuple[str, Tensor]]:
    """Unpartitioned averages of the master weights by name; all ranks must iterate."""
    from deepspeed.utils import safe_get_full_optimizer_state, safe_get_local_optimizer_state

    with _averages_in_state(zero, partitions):
        for parameter, name in _trained_parameters(names):
            if _is_partitioned(parameter):  # DeepSpeed would gather them in the masters' dtype
                partition = safe_get_local_optimizer_state(parameter, AVERAGE_SLOT)
                yield name, _gather_partitions(parameter, partition)
            else:
                yield name, safe_get_full_optimizer_state(parameter, AVERAGE_SLOT)


def load_averages(zero: Any, names: Names, partitions: Averages, read: ReadTensor) -> None:
    """Set this rank's averages of the master weights from a checkpoint."""
    with _averages_in_state(zero, partitions):
        for parameter, name in _trained_parameters(names):
            _read_state(parameter, name, AVERAGE_SLOT, read)


@contextmanager
def _averages_in_state(zero: Any, partitions: Averages) -> Iterator[None]:
    """Averages as a slot of the optimizer state, which DeepSpeed can address by parameter."""
    state = zero.optimizer.state
    slots = [(master, master in state) for master in master_partitions(zero)]
    for (master, _), average in zip(slots, partitions, strict=True):
        state[master][AVERAGE_SLOT] = average
    link_states(zero)
    try:
        yield
    finally:
        for master, has_state in slots:
            del state[master][AVERAGE_SLOT]
            if not has_state:  # the optimizer has not stepped yet
                del state[master]


def load_states(
    zero: Any, names: Names, shapes: Mapping[str, torch.Size], read: ReadTensor
) -> None:
    """Set the optimizer state from a checkpoint whose state tensors have ``shapes``."""
    slots = sorted({key.partition("/")[0] for key in shapes})
    if not slots:
        return
    steps = torch.zeros(1)
    if STEP_SLOT in slots:
        read(next(key for key in shapes if key.startswith(f"{STEP_SLOT}/")), steps)
    slots = [slot for slot in slots if slot != STEP_SLOT]
    _allocate_state(zero, slots, float(steps))
    for parameter, name in _trained_parameters(names):
        for slot in slots:
            _read_state(parameter, f"{slot}/{name}", slot, read)


def _read_state(parameter: nn.Parameter, key: str, slot: str, read: ReadTensor) -> None:
    """Set a slot of a parameter's state to the tensor ``key`` of a checkpoint."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    tensor = torch.empty(full_shape(parameter), dtype=torch.float32)
    read(key, tensor)
    if _is_partitioned(parameter):
        safe_set_local_optimizer_state(parameter, _rank_partition(parameter, tensor), slot)
    else:
        safe_set_full_optimizer_state(parameter, tensor, slot)


class ZeroPartition(StrategyBuffers):
    """Tensors of a ZeRO optimizer on this rank."""

    def __init__(self, zero: Any, names: Names) -> None:
        self._zero, self._names = zero, names

    def parameters(self) -> list[Tensor]:
        """Master weights and, in stage 3, parameter partitions."""
        shards = [p.ds_tensor for p in self._names if hasattr(p, "ds_tensor")]
        return [*master_partitions(self._zero), *shards]

    def gradients(self) -> list[Tensor]:
        """Reduced gradients of this rank's partition."""
        zero = self._zero
        flat = [master.grad for master in master_partitions(zero) if master.grad is not None]
        flat_buffer = getattr(zero, "grad_partitions_flat_buffer", None)
        reduced = [
            gradient for group in zero.averaged_gradients.values() for gradient in group or ()
        ]
        return [*flat, *reduced, *([] if flat_buffer is None else [flat_buffer])]

    def reallocated(self) -> list[Tensor]:
        """Small parameters of stage 3, which the optimizer step partitions and gathers again."""
        return [parameter for parameter in self._names if _is_partitioned(parameter)]

    def buckets(self) -> list[Tensor]:
        """Reduction buckets that stage 1 fills before the last micro-batch and then frees."""
        buckets = getattr(self._zero, "ipg_buckets", {}).values()
        # One tensor per bucket in stage 3, None without contiguous gradients; else a list.
        buffers = [getattr(bucket, "buffer", None) for bucket in buckets]
        return [
            tensor
            for buffer in buffers
            if buffer is not None
            for tensor in ([buffer] if isinstance(buffer, Tensor) else buffer)
        ]


def master_partitions(zero: Any) -> list[Tensor]:
    """This rank's partitions of the flattened master weights."""
    stage3_groups = getattr(zero, "fp32_partitioned_groups_flat", None)
    return cast(
        list[Tensor],
        zero.single_partition_of_fp32_groups if stage3_groups is None else stage3_groups,
    )


def _allocate_state(zero: Any, slots: list[str], steps: float) -> None:
    """Allocate zeros for the state that DeepSpeed allocates at the first step."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if isinstance(zero.optimizer, DeepSpeedCPUAdam):
        _set_kernel_steps(zero.optimizer, int(steps))
    for group, master in enumerate(master_partitions(zero)):
        with _swapped_in(zero, group):
            zero.optimizer.state[master] = {slot: torch.zeros_like(master) for slot in slots}
            if isinstance(zero.optimizer, DeepSpeedCPUAdam):
                zero.optimizer.state[master][STEP_SLOT] = int(steps)
            elif steps:
                zero.optimizer.state[master][STEP_SLOT] = torch.tensor(steps, device=master.device)
    link_states(zero)


def _set_kernel_steps(optimizer: Any, steps: int) -> None:
    """Set the bias corrections of the CPU Adam kernel to those after ``steps`` steps.

    The kernel multiplies the powers of the betas up step by step, in fp32. For a later step it
    calls ``pow``, whose result differs in the last bits, so that a resumed run would differ
    bitwise.
    """
    group, scalars = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
    arguments = (0.0, *group["betas"], group["eps"], 0.0, group["bias_correction"], *scalars)
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *arguments)


def _copy_stage3_masters(zero: Any) -> None:
    """Copy the master weights of stage 3 to its parameters."""
    partition_all(zero)
    for group in range(len(zero.fp32_partitioned_groups_flat)):
        with _swapped_in(zero, group):
            write_partitions(zero, group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _drop_secondary_partitions(parameters: Iterable[Any]) -> None:
    """Remove the secondary partitions of ZeRO++; the next forward pass creates new ones.

    DeepSpeed would gather them instead of the parameters just loaded. Its own
    ``invalidate_secondary_tensor`` skips frozen parameters.
    """
    for parameter in parameters:
        parameter.ds_secondary_tensor = None


class _swapped_in:  # noqa: N801 (a context manager)
    """Context in which master weights and state of a group are in memory, not on NVMe."""

    def __init__(self, zero: Any, group: int) -> None:
        self._zero, self._group = zero, group
        self._on_disk = swaps_group(zero, group)

    def __enter__(self) -> None:
        if self._on_disk:
            swap_in(self._zero, self._group)

    def __exit__(self, *exception: object) -> None:
        if self._on_disk:
            swap_out(self._zero, self._group)


def _trained_parameters(names: Names) -> list[tuple[nn.Parameter, str]]:
    return [(parameter, name) for parameter, name in names.items() if parameter.requires_grad]


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _rank_partition(parameter: Any, tensor: Tensor) -> Tensor:
    """This rank's partition of a tensor; the last partitions are padded with zeros."""
    size = parameter.partition_numel()
    start = dist.get_rank(parameter.ds_process_group) * size
    partition = tensor.flatten()[start : start + size]
    return F.pad(partition, (0, size - partition.numel()))


def _gather_partitions(parameter: Any, partition: Tensor) -> Tensor:
    """Unpartitioned tensor of a parameter from this rank's partition; all ranks must call this."""
    ranks = dist.get_world_size(parameter.ds_process_group)
    gathered = partition.new_empty(ranks * partition.numel())
    dist.all_gather_into_tensor(gathered, partition, group=parameter.ds_process_group)
    return gathered[: parameter.ds_numel].view(full_shape(parameter))
