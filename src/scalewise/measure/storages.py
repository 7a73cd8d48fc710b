"""Which storages tensors lie in, and how large these are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes that tensors hold on this rank, each storage once."""
    storages = {
        storage_key(tensor): tensor.untyped_storage().nbytes()
        for tensor in iter_plain_tensors(tensors)
    }
    return sum(storages.values())


def storage_keys(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns what tells the storages of tensors on this rank apart, while they live."""
    return {storage_key(tensor) for tensor in iter_plain_tensors(tensors)}


def iter_plain_tensors(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors that hold the bytes: a DTensor's own storage has the whole's size."""
    for leaf in leaves:
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from iter_plain_tensors(getattr(leaf, name) for name in names)
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def storage_key(tensor: torch.Tensor) -> int:
    """Returns what tells a tensor's storage from others, while it lives."""
    return int(tensor.untyped_storage()._cdata)
