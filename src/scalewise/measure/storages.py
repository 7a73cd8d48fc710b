"""Storages of tensors, and their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from scalewise.compat.torch import is_traceable_wrapper_subclass, storage_id


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of the storages of tensors on this rank, each counted once, in bytes."""
    storages = {
        storage_key(tensor): tensor.untyped_storage().nbytes()
        for tensor in iter_plain_tensors(tensors)
    }
    return sum(storages.values())


def storage_keys(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the keys of the storages of tensors on this rank; valid while the storages live."""
    return {storage_key(tensor) for tensor in iter_plain_tensors(tensors)}


def iter_plain_tensors(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the plain tensors inside ``leaves``; a DTensor's own storage has the unsharded size."""
    for leaf in leaves:
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from iter_plain_tensors(getattr(leaf, name) for name in names)
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's storage; valid while the storage lives."""
    return storage_id(tensor.untyped_storage())
