"""What stands before a model's blocks and after them, run apart: what each holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from scalewise.measure.memory import LiveBytes
from scalewise.measure.storages import storage_bytes, storage_keys

Sizes = tuple[int, int, int, int]
"""What a ``Played`` gives."""


@dataclass(frozen=True)
class TensorKind:
    """What is known of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorKind:
        """Returns that of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def empty_leaf(self, *, requires_grad: bool) -> Tensor:
        """Returns one that autograd holds; a clone of it has no other holder than who makes it."""
        return torch.empty(self.shape, dtype=self.dtype, requires_grad=requires_grad)


@dataclass(frozen=True)
class NonBlockParts:
    """``embedding`` and ``head``: what the two ends hold. A block reads ``x`` and what all read.

    ``shared_bytes``: the bytes of that.
    """

    embedding: Sizes
    head: Sizes
    x: TensorKind
    logits: TensorKind
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    shared_bytes: int


class CountingBlock(nn.Module):
    """A block that does nothing, and ends what is counted of before it."""

    def __init__(self, before: LiveBytes, after: LiveBytes) -> None:
        super().__init__()
        self._counters = (before, after)

    def forward(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Returns another such tensor, of which backward goes no further."""
        before, after = self._counters
        self.x, self.arguments, self.keywords = x, arguments, keywords
        before.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
        leaf = TensorKind.from_tensor(x).empty_leaf(requires_grad=True)
        after.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return leaf.clone()

    def build_parts(
        self,
        before: LiveBytes,
        head: Sizes,
        logits: TensorKind,
        module: nn.Module,
        *,
        fresh_gradients: bool,
    ) -> NonBlockParts:
        """Returns the ends, once what comes before the blocks has gone backward."""
        x = TensorKind.from_tensor(self.x)
        others = [
            each
            for each in tree_leaves((self.arguments, self.keywords))
            if isinstance(each, Tensor)
        ]
        others = [each for each in others if not storage_keys([each]) & storage_keys([self.x])]
        shared = storage_bytes(others)
        first = (0, 0, 0, 0)
        if x.requires_grad:
            end = [CountedLeaf.apply(self.x)]  # type: ignore[no-untyped-call]  # torch's own
            del self.x
            before.__enter__()  # type: ignore[no-untyped-call]  # torch's own
            most = count_backward(end, before) - shared
            before.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            first = (0, 0, most, gradient_bytes(module) * fresh_gradients)
        return NonBlockParts(first, head, x, logits, self.arguments, self.keywords, shared)


class CountedLeaf(torch.autograd.Function):
    """A number that all of a tensor leads to; the tensor's gradient is made in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns a number."""
        ctx.kind = TensorKind.from_tensor(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        """Returns a gradient."""
        return torch.empty(ctx.kind.shape, dtype=ctx.kind.dtype)


def count_backward(roots: list[Tensor], live: LiveBytes) -> int:
    """Goes backward from the only one of a list; returns the most that is alive meanwhile."""
    live.take_peak()
    last = roots.pop()
    if last.requires_grad:
        cast(Any, last).backward()
    return live.take_peak()


def gradient_bytes(module: nn.Module) -> int:
    """Returns the bytes of a module's gradients."""
    return storage_bytes(each.grad for each in module.parameters() if each.grad is not None)


def drop_gradients(scratch_ratio: float, parameter: Tensor) -> None:
    """Drops a gradient, once a step has taken ``scratch_ratio`` bytes for one of it."""
    assert parameter.grad is not None
    torch.empty(round(parameter.grad.nbytes * scratch_ratio), dtype=torch.uint8)
    parameter.grad = None
