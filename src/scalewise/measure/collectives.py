"""Counter of the collectives that a rank runs, by DDP, FSDP, DTensor or the strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from scalewise.compat.torch import COLLECTIVE_NAMESPACES, TorchDispatchMode
from scalewise.compat.torch_distributed import process_group
from scalewise.parallelism.collective import CollectiveKind

KINDS: dict[str, tuple[CollectiveKind, int]] = {
    "allreduce_": (CollectiveKind.all_reduce, 0),
    "_allgather_base_": (CollectiveKind.all_gather, 0),
    "allgather_": (CollectiveKind.all_gather, 0),
    "_reduce_scatter_base_": (CollectiveKind.reduce_scatter, 1),
    "reduce_scatter_": (CollectiveKind.reduce_scatter, 1),
    "alltoall_base_": (CollectiveKind.all_to_all, 1),
    "broadcast_": (CollectiveKind.broadcast, 0),
    "send": (CollectiveKind.send, 0),
    "all_reduce": (CollectiveKind.all_reduce, 0),
    "all_reduce_": (CollectiveKind.all_reduce, 0),
    "all_gather_into_tensor": (CollectiveKind.all_gather, -1),
    "reduce_scatter_tensor": (CollectiveKind.reduce_scatter, 0),
    "all_to_all_single": (CollectiveKind.all_to_all, 0),
}
"""Kind of each torch operator, and the index of its larger tensor; -1: its result."""

CollectiveKey = tuple[CollectiveKind, tuple[int, ...], int]
"""Kind, ranks of the group, and bytes of the larger tensor on one rank."""


class CollectiveCounter(TorchDispatchMode):
    """Count the collectives of this rank by kind, group and size, while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
        self.counts: Counter[CollectiveKey] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # DTensor calls again with plain tensors
        result = func(*args, **(kwargs or {}))
        namespace, _, name = str(func.name()).partition("::")
        if namespace in COLLECTIVE_NAMESPACES and name.split(".")[0] in KINDS:
            kind, tensor_index = KINDS[name.split(".")[0]]
            self.counts[
                kind,
                _group_ranks(args),
                _tensor_bytes(result if tensor_index < 0 else args[tensor_index]),
            ] += 1
        return result


def _group_ranks(arguments: Sequence[Any]) -> tuple[int, ...]:
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(argument)
            except RuntimeError:
                continue
            return tuple(dist.get_process_group_ranks(group))
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min"):
            return tuple(dist.get_process_group_ranks(process_group(argument)))
    return ()


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_tensor_bytes(tensor) for tensor in value)
