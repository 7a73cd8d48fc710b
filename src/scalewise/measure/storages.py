"""Which storages tensors lie in, and how large these are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes that tensors hold on this rank, each storage once."""
    storages = {key_of(tensor): tensor.untyped_storage().nbytes() for tensor in plain(tensors)}
    return sum(storages.values())


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns what tells the storages of tensors on this rank apart, while they live."""
    return {key_of(tensor) for tensor in plain(tensors)}


def plain(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors that hold the bytes: a DTensor's own storage has the whole's size."""
    for leaf in leaves:
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from plain(getattr(leaf, name) for name in names)
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def key_of(tensor: torch.Tensor) -> int:
    """Returns what tells a tensor's storage from others, while it lives."""
    return int(tensor.untyped_storage()._cdata)
