"""Operators of CUDA in runs with fake tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scalewise.compat.torch import replaced_functions

_dropout, _attention = F.dropout, F.scaled_dot_product_attention


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Context in which dropout saves what it saves on CUDA.

    Its mask is boolean there, and attention with dropout stores no scores. On the CPU, a mask has
    the dtype of its input, and attention with dropout has no fused kernel. Functions are replaced
    because autograd leaves modes of torch functions, which recomputation in backward requires.
    """
    functions = {"dropout": _fused_dropout, "scaled_dot_product_attention": _fused_attention}
    with replaced_functions(functions):
        yield


def _fused_dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training or not p:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, train=True)[0]


def _fused_attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
    return _attention(*args, **kwargs)
