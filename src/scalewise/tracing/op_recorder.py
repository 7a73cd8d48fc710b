"""Recorders of a model: graphs of its operators, and sizes of the parts outside of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from scalewise.compat.torch import (
    ATTENTION_OPS,
    GROUPED_MATMUL_OP,
    TorchDispatchMode,
    tree_leaves,
)
from scalewise.measure.allocated_bytes import LiveBytes, storage_bytes, storage_key, storage_keys
from scalewise.models.attention_kernels import causal_rate_share
from scalewise.models.grouped_mm import grouped_mm  # noqa: F401 (registers its operator)
from scalewise.models.linear_ops import LinearOps
from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork

Sizes = tuple[int, int, int, int]
"""Bytes of a part, in the order of ``RecordedPart.measure``."""


@dataclass(frozen=True)
class TensorKind:
    """Shape, dtype and ``requires_grad`` of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorKind:
        """Return those of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def empty_leaf(self, *, requires_grad: bool) -> Tensor:
        """Return an empty leaf tensor; callers clone it, so that the clone has one reference."""
        return torch.empty(self.shape, dtype=self.dtype, requires_grad=requires_grad)


@dataclass(frozen=True)
class NonBlockParts:
    """Sizes of the parts outside the blocks, and the inputs of a block."""

    embedding: Sizes
    """Sizes of the operators before the blocks."""
    head: Sizes
    """Sizes of the operators after the blocks."""
    x: TensorKind
    """First input of a block."""
    logits: TensorKind
    """Output of the model."""
    arguments: tuple[Any, ...]
    """Other positional inputs of a block."""
    keywords: dict[str, Any]
    """Keyword inputs of a block."""
    shared_bytes: int
    """Bytes of the inputs that all blocks read."""


class CountingBlock(nn.Module):
    """Block that computes nothing, and ends the measurement of the operators before it."""

    def __init__(self, before: LiveBytes, after: LiveBytes, *, returns_tuple: bool) -> None:
        super().__init__()
        self._counters, self._returns_tuple = (before, after), returns_tuple

    def forward(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor | tuple[Tensor, ...]:
        """Return a new tensor of the same kind, detached from ``x``."""
        before, after = self._counters
        self.x, self.arguments, self.keywords = x, arguments, keywords
        before.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
        leaf = TensorKind.from_tensor(x).empty_leaf(requires_grad=True)
        after.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return (leaf.clone(), leaf) if self._returns_tuple else leaf.clone()

    def build_parts(
        self,
        before: LiveBytes,
        head: Sizes,
        logits: TensorKind,
        module: nn.Module,
        *,
        fresh_gradients: bool,
    ) -> NonBlockParts:
        """Run the backward of the operators before the blocks, and return all sizes."""
        x = TensorKind.from_tensor(self.x)
        others = [
            each
            for each in tree_leaves((self.arguments, self.keywords))
            if isinstance(each, Tensor)
        ]
        others = [each for each in others if not storage_keys([each]) & storage_keys([self.x])]
        shared = storage_bytes(others)
        embedding = (0, 0, 0, 0)
        if x.requires_grad:
            outputs = [AllocateGradient.apply(self.x)]  # type: ignore[no-untyped-call]  # torch's own
            del self.x
            before.__enter__()  # type: ignore[no-untyped-call]  # torch's own
            backward_peak = count_backward(outputs, before) - shared
            before.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            embedding = (0, 0, backward_peak, gradient_bytes(module) * fresh_gradients)
        return NonBlockParts(embedding, head, x, logits, self.arguments, self.keywords, shared)


def first_tensor(output: Any) -> Tensor:
    """Residual stream that a block returns, alone or as the first element of a sequence."""
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first


class AllocateGradient(torch.autograd.Function):
    """Scalar that depends on a tensor; backward allocates the gradient of the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a scalar."""
        ctx.kind = TensorKind.from_tensor(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        """Return an empty gradient."""
        return torch.empty(ctx.kind.shape, dtype=ctx.kind.dtype)


def measure_part(
    live: LiveBytes, outputs: list[Tensor], module: nn.Module, *, fresh_gradients: bool
) -> Sizes:
    """Sizes of a part whose forward pass has run; runs its backward.

    Args:
        live: Counter of the part's memory.
        outputs: List with the only reference to the output, which is removed.
        module: Module of the part.
        fresh_gradients: Whether this backward allocates the gradients.
    """
    forward_peak, saved_bytes = live.take_peak(), live.current_bytes - storage_bytes(outputs)
    backward_peak = count_backward(outputs, live)
    return saved_bytes, forward_peak, backward_peak, gradient_bytes(module) * fresh_gradients


def count_backward(outputs: list[Tensor], live: LiveBytes) -> int:
    """Run backward from the only tensor in ``outputs``, which is removed; return the peak bytes."""
    if outputs[0].dim():  # otherwise a loss
        outputs[:] = [AllocateGradient.apply(*outputs)]  # type: ignore[no-untyped-call]  # torch's own
    live.take_peak()
    root = outputs.pop()
    if root.requires_grad:
        cast(Any, root).backward()
    return live.take_peak()


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of a module's gradients."""
    return storage_bytes(each.grad for each in module.parameters() if each.grad is not None)


def drop_gradients(scratch_ratio: float, parameter: Tensor) -> None:
    """Free a gradient after an optimizer step with ``scratch_ratio`` temporary bytes per byte."""
    assert parameter.grad is not None
    torch.empty(round(parameter.grad.nbytes * scratch_ratio), dtype=torch.uint8)
    parameter.grad = None


aten = torch.ops.aten
ATTENTION = frozenset(op.default for op in ATTENTION_OPS)
MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
GROUPED = frozenset((torch.ops.scalewise.grouped_mm.default, GROUPED_MATMUL_OP.default))
CONVOLUTION = aten.convolution.default


class OpRecorder(TorchDispatchMode):
    """Records an operator graph of each part of a model, by name."""

    def __init__(self, forward_spec: ForwardSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
        self.forward_spec, self._linear_ops, self._paused = (
            forward_spec,
            LinearOps(forward_spec),
            False,
        )
        self.graphs: dict[str, OpGraph] = {}
        self.begin_part("first", ())

    def begin_part(self, name: str, inputs: Sequence[Tensor]) -> None:
        """Start the graph of a part; its first tensors are ``inputs``."""
        self.graph = self.graphs[name] = OpGraph()
        self._indices: dict[int, int] = {}
        for tensor in inputs:
            self._index(tensor)

    def replace_layer_ops(self, layer: nn.Module, add_ops: Callable[[LinearOps, int], int]) -> None:
        """Record ``add_ops(writer, input index)`` instead of the operators that a layer runs."""

        def before(*_: Any) -> None:
            self._paused = True

        def after(layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            self._paused, self._linear_ops.graph = False, self.graph
            self._indices[storage_key(out)] = add_ops(self._linear_ops, self._index(inputs[0]))

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        result = func(*args, **kwargs)
        input_keys = {storage_key(tensor) for tensor in inputs}
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        outputs = [each for each in outputs if storage_key(each) not in input_keys and each.nbytes]
        if outputs and not self._paused:
            self._record(func, args, kwargs, inputs, result, outputs)
        return result

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        result: Any,
        outputs: list[Tensor],
    ) -> None:
        reads = [self._index(tensor) for tensor in inputs]
        # A bias comes before the operands of a matmul, and after those of a convolution.
        operands = reads[:2] if func is CONVOLUTION else reads[-2:]
        differentiable = sum(self.graph.requires_grad[tensor] for tensor in operands)
        work, flops, backward_flops, rate_share = OpWork.pointwise, 0.0, 0.0, 1.0
        if func in MATMULS or func is CONVOLUTION:
            work = OpWork.matmul
            flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
            backward_flops = flops * differentiable
        elif func in GROUPED:  # the matrix of one expert for each row
            work, flops = OpWork.matmul, 2.0 * args[0].numel() * outputs[0].shape[-1]
            backward_flops = flops * sum(self.graph.requires_grad[tensor] for tensor in reads[:2])
        elif func in ATTENTION:  # a causal kernel skips half of the scores
            work = OpWork.attention
            flops = 2.0 * args[0].numel() * args[1].shape[-2]
            backward_flops = 2.5 * flops * bool(differentiable)
            if not self.forward_spec.on_cpu:
                rate_share = causal_rate_share(args[1].shape[-2], args[0].shape[-1])
        output = self.graph.add_op(
            work,
            reads,
            outputs[0].nbytes,
            extra_output_bytes=[tensor.nbytes for tensor in outputs[1:]],
            saved_by_selective=func in MATMULS | GROUPED | ATTENTION,
            flops=flops,
            backward_flops=backward_flops,
            rate_share=rate_share,
        )
        self._indices[storage_key(outputs[0])] = output

    def _index(self, tensor: Tensor) -> int:
        """Return the index of a tensor; a tensor from outside the part gets a new one."""
        key = storage_key(tensor)
        if key not in self._indices:
            size, requires_grad = tensor.untyped_storage().nbytes(), tensor.requires_grad
            self._indices[key] = self.graph.add_tensor(size, requires_grad=requires_grad)
        return self._indices[key]
