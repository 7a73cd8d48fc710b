"""Recorder of the operators that torch dispatches, with their FLOPs and tensor sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from scalewise.compat.torch import ATTENTION_OPS, TorchDispatchMode, tree_leaves
from scalewise.measure.memory import storage_key
from scalewise.models.linear_ops import LinearOps
from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork

aten = torch.ops.aten
ATTENTION = frozenset(op.default for op in ATTENTION_OPS)
MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})


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
        differentiable = sum(self.graph.requires_grad[tensor] for tensor in reads[-2:])
        work, flops, backward_flops = OpWork.pointwise, 0.0, 0.0
        if func in MATMULS:
            work = OpWork.matmul
            flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
            backward_flops = flops * differentiable
        elif func in ATTENTION:  # a causal kernel skips half of the scores
            work = OpWork.attention
            flops = 2.0 * args[0].numel() * args[1].shape[-2]
            backward_flops = 2.5 * flops * bool(differentiable)
        output = self.graph.add_op(
            work,
            reads,
            outputs[0].nbytes,
            extra_output_bytes=[tensor.nbytes for tensor in outputs[1:]],
            saved_by_selective=func in MATMULS or func in ATTENTION,
            flops=flops,
            backward_flops=backward_flops,
        )
        self._indices[storage_key(outputs[0])] = output

    def _index(self, tensor: Tensor) -> int:
        """Return the index of a tensor; a tensor from outside the part gets a new one."""
        key = storage_key(tensor)
        if key not in self._indices:
            size, requires_grad = tensor.untyped_storage().nbytes(), tensor.requires_grad
            self._indices[key] = self.graph.add_tensor(size, requires_grad=requires_grad)
        return self._indices[key]
