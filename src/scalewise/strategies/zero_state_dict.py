"""What a ZeRO optimizer's ranks hold of weights and state, as whole tensors by name and back.

DeepSpeed flattens the parameters of a group into one tensor of masters, of which every rank holds
and steps a piece, and keeps the state of that piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.measure.memory import StrategyBuffers

Names = Mapping[nn.Parameter, str]
Read = Callable[[str, Tensor], None]
"""Fills a whole tensor from a checkpoint, by name."""

STEP = "step"
"""The one slot that is a number: the steps an optimizer has taken."""


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Returns the whole shape of a parameter, partitioned or not."""
    return cast(torch.Size, getattr(parameter, "ds_shape", parameter.shape))


def full_weight(parameter: nn.Parameter) -> Tensor:
    """Returns a parameter's whole master, or itself if it is frozen; every rank must ask."""
    if parameter.requires_grad:
        return cast(Tensor, safe_get_full_fp32_param(parameter))
    with GatheredParameters([parameter], enabled=_is_partitioned(parameter)):
        return parameter.detach().float().clone()


def iter_state(zero: Any, names: Names) -> Iterator[tuple[str, Tensor]]:
    """Yields the optimizer's state as ``exp_avg/blocks.0.weight``; every rank must go through."""
    _link_states(zero)
    state: dict[str, Any] = next((state for state in zero.optimizer.state.values() if state), {})
    slots = [slot for slot, value in state.items() if slot != STEP and value is not None]
    for parameter, name in _trained_parameters(names):
        for slot in slots:
            yield f"{slot}/{name}", safe_get_full_optimizer_state(parameter, slot)
        if STEP in state:
            yield f"{STEP}/{name}", torch.tensor([float(state[STEP])])


def load_weights(zero: Any, names: Names, read: Read) -> None:
    """Fills the masters, and the weights that stand for them in the forward pass."""
    for parameter, name in names.items():
        whole = torch.empty(full_shape(parameter), dtype=torch.float32)
        read(name, whole)
        if not parameter.requires_grad:
            held = getattr(parameter, "ds_tensor", parameter.data)
            held.copy_(_rank_partition(parameter, whole) if _is_partitioned(parameter) else whole)
        elif _is_partitioned(parameter):
            safe_set_local_fp32_param(parameter, _rank_partition(parameter, whole))
        else:
            safe_set_full_fp32_param(parameter, whole)
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
    else:
        _copy_masters_to_weights(zero)
        _drop_secondary_partitions(names)


def load_states(zero: Any, names: Names, shapes: Mapping[str, torch.Size], read: Read) -> None:
    """Fills the optimizer's state with the tensors of a checkpoint that holds ``shapes``."""
    slots = sorted({key.partition("/")[0] for key in shapes})
    if not slots:
        return
    steps = torch.zeros(1)
    if STEP in slots:
        read(next(key for key in shapes if key.startswith(f"{STEP}/")), steps)
    slots = [slot for slot in slots if slot != STEP]
    _allocate_state(zero, slots, float(steps))
    for parameter, name in _trained_parameters(names):
        for slot in slots:
            whole = torch.empty(full_shape(parameter), dtype=torch.float32)
            read(f"{slot}/{name}", whole)
            if _is_partitioned(parameter):
                safe_set_local_optimizer_state(parameter, _rank_partition(parameter, whole), slot)
            else:
                safe_set_full_optimizer_state(parameter, whole, slot)


class ZeroPartition(StrategyBuffers):
    """What a rank holds in a ZeRO optimizer."""

    def __init__(self, zero: Any, names: Names) -> None:
        self._zero, self._names = zero, names

    def parameters(self) -> list[Tensor]:
        """Returns masters and, in stage 3, shards."""
        shards = [p.ds_tensor for p in self._names if hasattr(p, "ds_tensor")]
        return [*_master_partitions(self._zero), *shards]

    def gradients(self) -> list[Tensor]:
        """Returns the reduced gradients of this rank's share."""
        zero = self._zero
        flat = [master.grad for master in _master_partitions(zero) if master.grad is not None]
        whole = getattr(zero, "grad_partitions_flat_buffer", None)
        reduced = [held for group in zero.averaged_gradients.values() for held in group or ()]
        return [*flat, *reduced, *([] if whole is None else [whole])]

    def buckets(self) -> list[Tensor]:
        """Returns what stage 1 has filled before the last micro batch, and keeps until it ends."""
        filled = getattr(self._zero, "ipg_buckets", {}).values()
        held = [getattr(bucket, "buffer", ()) for bucket in filled]  # stage 3 has one, not a list
        return [b for each in held for b in ([each] if isinstance(each, Tensor) else each)]


def _master_partitions(zero: Any) -> list[Tensor]:
    """Returns a rank's pieces of the flattened groups that the optimizer steps."""
    kept = getattr(zero, "fp32_partitioned_groups_flat", None)
    return cast(list[Tensor], zero.single_partition_of_fp32_groups if kept is None else kept)


def _allocate_state(zero: Any, slots: list[str], steps: float) -> None:
    """Makes the state that DeepSpeed would make at the first step, all zeros."""
    if isinstance(zero.optimizer, DeepSpeedCPUAdam):
        _set_kernel_steps(zero.optimizer, int(steps))
    for group, master in enumerate(_master_partitions(zero)):
        with _swapped_in(zero, group):
            zero.optimizer.state[master] = {slot: torch.zeros_like(master) for slot in slots}
            if isinstance(zero.optimizer, DeepSpeedCPUAdam):
                zero.optimizer.state[master][STEP] = int(steps)
            elif steps:
                zero.optimizer.state[master][STEP] = torch.tensor(steps, device=master.device)
    _link_states(zero)


def _set_kernel_steps(optimizer: DeepSpeedCPUAdam, steps: int) -> None:
    """Brings the kernel's bias corrections to where so many steps leave them.

    It multiplies the powers of the betas up step by step, in fp32. Asked for a later step at once
    it takes ``pow``, which differs in the last places: a resumed run would not go on bit by bit.
    """
    group, number = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
    fixed = (0.0, *group["betas"], group["eps"], 0.0, group["bias_correction"], *number)
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *fixed)


def _link_states(zero: Any) -> None:
    """Tells stages 1 and 2 where each parameter's state is.

    DeepSpeed does so once the first group has stepped, when later groups have none.
    """
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _copy_masters_to_weights(zero: Any) -> None:
    """Gives stage 3's weights the numbers of its masters."""
    zero._partition_all_parameters()
    for group in range(len(zero.fp32_partitioned_groups_flat)):
        with _swapped_in(zero, group):
            zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _drop_secondary_partitions(parameters: Iterable[Any]) -> None:
    """Removes the secondary partitions of ZeRO++; the next forward pass makes new ones.

    While a parameter has one, DeepSpeed gathers it in place of the weights just loaded. Its own
    ``invalidate_secondary_tensor`` leaves those of frozen parameters.
    """
    for parameter in parameters:
        parameter.ds_secondary_tensor = None


class _swapped_in:  # noqa: N801 (a context manager, read as a verb)
    """Brings a group's masters and state from the disk they may live on, and back."""

    def __init__(self, zero: Any, group: int) -> None:
        swaps = getattr(zero, "_swappable_optimizer_subgroup", None)
        self._zero, self._group = zero, group
        self._on_disk = swaps is not None and swaps(group)

    def __enter__(self) -> None:
        if self._on_disk:
            self._zero._optimizer_states_and_gradient_swap_in(self._group)

    def __exit__(self, *exception: object) -> None:
        if self._on_disk:
            self._zero._optimizer_states_and_gradient_swap_out(self._group)


def _trained_parameters(names: Names) -> list[tuple[nn.Parameter, str]]:
    return [(parameter, name) for parameter, name in names.items() if parameter.requires_grad]


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _rank_partition(parameter: Any, tensor: Tensor) -> Tensor:
    """Returns this rank's piece of a tensor; the last ranks' are filled up with zeros."""
    size = parameter.partition_numel()
    start = dist.get_rank(parameter.ds_process_group) * size
    piece = tensor.flatten()[start : start + size]
    return F.pad(piece, (0, size - piece.numel()))
