"""The parts of a model as they run, with no memory behind their tensors: what plans count with."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, cast

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from scalewise.activation_checkpointing import FixedCheckpointing, Recompute
from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_config import DoRAAdapterConfig, LoRAAdapterConfig
from scalewise.hardware import DeviceKind
from scalewise.measure.memory import LiveBytes
from scalewise.measure.storages import storage_bytes
from scalewise.models import cross_entropy
from scalewise.models.base import StageSlice
from scalewise.models.decoder.linear_ops import LinearOps
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.hf.non_block_parts import (
    CountedLeaf,
    CountingBlock,
    NonBlockParts,
    Sizes,
    TensorKind,
    count_backward,
    drop_gradients,
    gradient_bytes,
)
from scalewise.models.hf.op_recorder import OpRecorder
from scalewise.models.hf.tp_shard_fake import shard_for_rank
from scalewise.models.op_graph import (
    BackwardMode,
    ForwardSpec,
    ModelOpGraphs,
    OpGraph,
    RecordedPart,
)
from scalewise.objectives import CausalLM
from scalewise.precision.fp8 import Float8
from scalewise.quantization.bitsandbytes_config import NF4Config
from scalewise.quantization.qat import QAT8da4wConfig, QATInt4Config

if TYPE_CHECKING:
    from scalewise.models.hf.config import HuggingFaceConfig

FRESH = BackwardMode(Recompute.nothing, fresh=True)
NUMBERS = {4: torch.float32, 2: torch.bfloat16}
"""Formats by their bytes: fp16 takes what bf16 does."""
ONE = StageSlice(range(1))


def fake_op_graphs(spec: HuggingFaceConfig, run: ForwardSpec) -> ModelOpGraphs:
    """Returns the parts of a model, each of which runs when it is asked for."""
    player = FakeTensorRunner(spec, run)
    ends, (block, last, loss) = player.ends(FRESH), player.operators()
    return ModelOpGraphs(
        first=RecordedPart(play=lambda way: player.ends(way).first),
        start=_run_part(block, lambda way: player.block(way, trained=ends.x.requires_grad)),
        block=_run_part(block, lambda way: player.block(way, trained=True)),
        last=_run_part(last, lambda way: player.ends(way).last),
        loss=player.loss_of(loss),
        shared=ends.shared,
    )


def _run_part(tape: OpGraph, play: Callable[[BackwardMode], Sizes]) -> RecordedPart:
    return RecordedPart(sizes=tape.sizes, trained=tape.trained, operators=tape.operators, play=play)


class FakeTensorRunner:
    """Runs parts of a model on the CPU, under ``FakeTensorMode``, in the formats of a pass."""

    def __init__(self, spec: HuggingFaceConfig, run: ForwardSpec) -> None:
        self.spec, self.run = spec, run
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.in_pieces = 0 < run.loss_chunk < run.places
        self.objective = CausalLM(loss_chunk=run.loss_chunk if self.in_pieces else None)
        self.ends = cache(self._ends)

    def _module(self, way: BackwardMode, *, in_forward: bool = False) -> CausalLMModule:
        """Returns the ends of the model and one block, alive in the mode."""
        module = self.spec.shape(ONE)
        if self.run.packed:  # whatever packs: what is unpacked is as large
            NF4Config(double=self.run.scale_bytes > 0).apply(module, self.spec)
        if self.run.in_fp8:
            self._convert(module)
        if self.run.fake_quantized:
            rounding = QAT8da4wConfig if self.run.rounds_inputs else QATInt4Config
            rounding(group=self.run.group).apply(module, self.spec)
        self._adapter().apply(module, self.spec)
        if self.run.tensor > 1:
            shard_for_rank(module, self.spec.tensor_split(), self.run)
        self.objective.apply(module, in_forward=in_forward)
        FixedCheckpointing(way.recompute, offload=way.offload).apply(module, ONE)
        with self.mode, torch.no_grad():
            for owner in module.modules():
                for name, parameter in owner._parameters.items():
                    if parameter is not None:
                        owner._parameters[name] = self._alive(parameter, way)
                for name, buffer in owner._buffers.items():
                    owner._buffers[name] = None if buffer is None else torch.empty_like(buffer)
        return module

    def _convert(self, module: CausalLMModule) -> None:
        """Puts torchao's layers in the place of those that multiply in 8 bits, as on the CPU.

        On CUDA they cast what they read first, as autocast would.
        """
        Float8().apply(module, self.spec, DeviceKind.cpu)
        if self.run.casts and not self.run.on_cpu:
            for block, name in product(module.layers(), self.run.in_fp8):
                layer = block.get_submodule(name)
                layer.register_forward_pre_hook(lambda _, given: (given[0].to(torch.bfloat16),))

    def _alive(self, parameter: nn.Parameter, way: BackwardMode) -> nn.Parameter:
        held = NUMBERS[self.run.held] if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty(parameter.shape, dtype=held)
        made = nn.Parameter(empty, parameter.requires_grad)
        if made.requires_grad and not way.fresh:
            made.grad = torch.empty_like(made)
        if made.requires_grad and way.stepped >= 0:
            made.register_post_accumulate_grad_hook(partial(drop_gradients, way.stepped))
        return made

    def _adapter(self) -> AdapterConfig:
        """Returns an adapter of the same shapes: what it begins with makes no difference."""
        run = self.run
        whole = tuple(map(re.escape, run.whole))
        if run.scaled:
            return IA3AdapterConfig(targets=tuple(map(re.escape, run.scaled)), trained=whole)
        if not run.adapted:
            return NoAdapterConfig()
        kind = DoRAAdapterConfig if run.magnitudes else LoRAAdapterConfig
        targets = tuple(map(re.escape, run.adapted))
        return kind(rank=run.rank, dropout=run.dropout, targets=targets, trained=whole)

    def _forward(self) -> AbstractContextManager[object]:
        """Returns the context of a forward pass."""
        mixed = MixedPrecision("bf16-mixed", "cpu")
        return mixed.forward_context() if self.run.casts else nullcontext()

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Returns tokens and labels."""
        shape = (self.run.rows, self.run.tokens)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)

    def block(self, way: BackwardMode, *, trained: bool) -> Sizes:
        """Returns what a block holds; ``trained``: whether something before it is."""
        ends, module = self.ends(FRESH), self._module(way)
        (block,) = module.layers()
        with self.mode:
            leaf = ends.x.leaf(trained=trained)
        with self.mode, LiveBytes() as live:
            x = leaf.clone()
            with self._forward():
                y = block(x, *ends.arguments, **ends.keywords)
            forward = live.take_peak()
            del x
            kept, end = live.now - storage_bytes([y]), [CountedLeaf.apply(y)]  # type: ignore[no-untyped-call]  # torch's own
            del y
            return kept, forward, count_backward(end, live), gradient_bytes(module) * way.fresh

    def loss_of(self, operators: OpGraph) -> OpGraph | None:
        """Returns the part that is the loss, unless it is taken in pieces with the logits.

        What torch makes of logits that tensor ranks share out is not played.
        """
        if self.in_pieces:
            return None
        if self.run.cut_loss:
            return cross_entropy.cross_entropy_ops(self.run, self.spec.outputs)
        return _run_part(operators, lambda *_: self.loss())

    def loss(self) -> Sizes:
        """Returns what the loss holds."""
        with self.mode:
            leaf, (_, labels) = self.ends(FRESH).logits.leaf(trained=True), self._rows()
        with self.mode, LiveBytes() as live:
            logits = leaf.clone()
            end = [self.objective.summed(logits, labels)]
            forward = live.take_peak()
            del logits
            return live.now, forward, count_backward(end, live), 0

    def _ends(self, way: BackwardMode) -> NonBlockParts:
        """Runs what stands before the blocks and after them, around a block that does nothing."""
        in_forward = self.run.loss_in_forward
        module = self._module(way, in_forward=in_forward)
        before, after = LiveBytes(), LiveBytes()
        between = CountingBlock(before, after)
        module.put_layers([between])
        with self.mode:
            tokens, labels = self._rows()
            before.__enter__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
            with self._forward():
                out = module(tokens, labels if self.in_pieces else None)
            logits = TensorKind.of(out)
            forward = after.take_peak()
            kept = after.now - storage_bytes([out])
            end = [out if self.in_pieces else CountedLeaf.apply(out)]  # type: ignore[no-untyped-call]  # torch's own
            del out
            most = count_backward(end, after)
            after.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            last = (kept, forward, most, gradient_bytes(module) * way.fresh)
            if way.fresh:
                module.zero_grad()
            return between.told(before, last, logits, module, fresh=way.fresh)

    def _product(self, layer: nn.Linear) -> Callable[[LinearOps, int], int]:
        """Returns what writes the product of a layer that casts or rounds what it multiplies."""
        (out, into), bias = layer.weight.shape, layer.bias is not None
        if self.run.in_fp8:
            return lambda products, x: products.product_fp8(x, into, out, (), bias=bias)
        return lambda products, x: products.rounded_product(x, into, out, ())

    def operators(self) -> tuple[OpGraph, OpGraph, OpGraph]:
        """Returns the operators of a block, of what comes after all blocks, and of the loss."""
        module = self._module(FRESH)
        (block,) = module.layers()
        module.put_layers([block])
        counted = OpRecorder(self.run)
        for name in self.run.in_fp8 + self.run.fake_quantized:
            layer = cast(nn.Linear, block.get_submodule(name))
            counted.write(layer, self._product(layer))
        with self.mode:
            tokens, labels = self._rows()
            with self._forward(), counted:
                block.register_forward_pre_hook(lambda _, given: counted.begin("block", given[:1]))
                block.register_forward_hook(lambda _, __, out: counted.begin("last", (out,)))
                out = module(tokens, labels if self.in_pieces else None)
                counted.begin("loss", (out,))
                if not self.in_pieces:
                    self.objective.summed(out, labels)
        return counted.tapes["block"], counted.tapes["last"], counted.tapes["loss"]
