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

from scalewise.adapters.low_rank import Dora, Lora
from scalewise.adapters.scales import IA3
from scalewise.adapters.spec import Adapter, NoAdapter
from scalewise.hardware import DeviceKind
from scalewise.measure.memory import LiveBytes
from scalewise.measure.storages import bytes_of
from scalewise.memory import Checkpointing, Recompute
from scalewise.models import cross_entropy
from scalewise.models.base import Part
from scalewise.models.decoder.products import Products
from scalewise.models.hf.cut import cut
from scalewise.models.hf.ends import (
    Between,
    End,
    Ends,
    Kind,
    Sizes,
    backward,
    gradients,
    stepped,
)
from scalewise.models.hf.module import HuggingFaceModule
from scalewise.models.hf.operators import Operators
from scalewise.models.tape import Pass, Played, Tape, Tapes, Way
from scalewise.objectives import CausalLM
from scalewise.precision.fp8 import Float8
from scalewise.quantization.aware import QAT8da4w, QATInt4
from scalewise.quantization.packing import NF4

if TYPE_CHECKING:
    from scalewise.models.hf.spec import HuggingFace

FRESH = Way(Recompute.nothing, fresh=True)
NUMBERS = {4: torch.float32, 2: torch.bfloat16}
"""Formats by their bytes: fp16 takes what bf16 does."""
ONE = Part(range(1))


def tapes(spec: HuggingFace, run: Pass) -> Tapes:
    """Returns the parts of a model, each of which runs when it is asked for."""
    player = Player(spec, run)
    ends, (block, last, loss) = player.ends(FRESH), player.operators()
    return Tapes(
        first=Played(play=lambda way: player.ends(way).first),
        start=_played(block, lambda way: player.block(way, trained=ends.x.requires_grad)),
        block=_played(block, lambda way: player.block(way, trained=True)),
        last=_played(last, lambda way: player.ends(way).last),
        loss=player.loss_of(loss),
        shared=ends.shared,
    )


def _played(tape: Tape, play: Callable[[Way], Sizes]) -> Played:
    return Played(sizes=tape.sizes, trained=tape.trained, operators=tape.operators, play=play)


class Player:
    """Runs parts of a model on the CPU, under ``FakeTensorMode``, in the formats of a pass."""

    def __init__(self, spec: HuggingFace, run: Pass) -> None:
        self.spec, self.run = spec, run
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.in_pieces = 0 < run.loss_chunk < run.places
        self.objective = CausalLM(loss_chunk=run.loss_chunk if self.in_pieces else None)
        self.ends = cache(self._ends)

    def _module(self, way: Way, *, in_forward: bool = False) -> HuggingFaceModule:
        """Returns the ends of the model and one block, alive in the mode."""
        module = self.spec.shape(ONE)
        if self.run.packed:  # whatever packs: what is unpacked is as large
            NF4(double=self.run.scale_bytes > 0).apply(module, self.spec)
        if self.run.in_fp8:
            self._convert(module)
        if self.run.fake_quantized:
            rounding = QAT8da4w if self.run.rounds_inputs else QATInt4
            rounding(group=self.run.group).apply(module, self.spec)
        self._adapter().apply(module, self.spec)
        if self.run.tensor > 1:
            cut(module, self.spec.tensor_split(), self.run)
        self.objective.apply(module, in_forward=in_forward)
        Checkpointing(way.recompute, offload=way.offload).apply(module, ONE)
        with self.mode, torch.no_grad():
            for owner in module.modules():
                for name, parameter in owner._parameters.items():
                    if parameter is not None:
                        owner._parameters[name] = self._alive(parameter, way)
                for name, buffer in owner._buffers.items():
                    owner._buffers[name] = None if buffer is None else torch.empty_like(buffer)
        return module

    def _convert(self, module: HuggingFaceModule) -> None:
        """Puts torchao's layers in the place of those that multiply in 8 bits, as on the CPU.

        On CUDA they cast what they read first, as autocast would.
        """
        Float8().apply(module, self.spec, DeviceKind.cpu)
        if self.run.casts and not self.run.on_cpu:
            for block, name in product(module.layers(), self.run.in_fp8):
                layer = block.get_submodule(name)
                layer.register_forward_pre_hook(lambda _, given: (given[0].to(torch.bfloat16),))

    def _alive(self, parameter: nn.Parameter, way: Way) -> nn.Parameter:
        held = NUMBERS[self.run.held] if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty(parameter.shape, dtype=held)
        made = nn.Parameter(empty, parameter.requires_grad)
        if made.requires_grad and not way.fresh:
            made.grad = torch.empty_like(made)
        if made.requires_grad and way.stepped >= 0:
            made.register_post_accumulate_grad_hook(partial(stepped, way.stepped))
        return made

    def _adapter(self) -> Adapter:
        """Returns an adapter of the same shapes: what it begins with makes no difference."""
        run = self.run
        whole = tuple(map(re.escape, run.whole))
        if run.scaled:
            return IA3(targets=tuple(map(re.escape, run.scaled)), trained=whole)
        if not run.adapted:
            return NoAdapter()
        kind = Dora if run.magnitudes else Lora
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

    def block(self, way: Way, *, trained: bool) -> Sizes:
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
            kept, end = live.now - bytes_of([y]), [End.apply(y)]  # type: ignore[no-untyped-call]  # torch's own
            del y
            return kept, forward, backward(end, live), gradients(module) * way.fresh

    def loss_of(self, operators: Tape) -> Tape | None:
        """Returns the part that is the loss, unless it is taken in pieces with the logits.

        What torch makes of logits that tensor ranks share out is not played.
        """
        if self.in_pieces:
            return None
        if self.run.cut_loss:
            return cross_entropy.tape(self.run, self.spec.outputs)
        return _played(operators, lambda *_: self.loss())

    def loss(self) -> Sizes:
        """Returns what the loss holds."""
        with self.mode:
            leaf, (_, labels) = self.ends(FRESH).logits.leaf(trained=True), self._rows()
        with self.mode, LiveBytes() as live:
            logits = leaf.clone()
            end = [self.objective.summed(logits, labels)]
            forward = live.take_peak()
            del logits
            return live.now, forward, backward(end, live), 0

    def _ends(self, way: Way) -> Ends:
        """Runs what stands before the blocks and after them, around a block that does nothing."""
        in_forward = self.run.loss_in_forward
        module = self._module(way, in_forward=in_forward)
        before, after = LiveBytes(), LiveBytes()
        between = Between(before, after)
        module.put_layers([between])
        with self.mode:
            tokens, labels = self._rows()
            before.__enter__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
            with self._forward():
                out = module(tokens, labels if self.in_pieces else None)
            logits = Kind.of(out)
            forward = after.take_peak()
            kept = after.now - bytes_of([out])
            end = [out if self.in_pieces else End.apply(out)]  # type: ignore[no-untyped-call]  # torch's own
            del out
            most = backward(end, after)
            after.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            last = (kept, forward, most, gradients(module) * way.fresh)
            if way.fresh:
                module.zero_grad()
            return between.told(before, last, logits, module, fresh=way.fresh)

    def _product(self, layer: nn.Linear) -> Callable[[Products, int], int]:
        """Returns what writes the product of a layer that casts or rounds what it multiplies."""
        (out, into), bias = layer.weight.shape, layer.bias is not None
        if self.run.in_fp8:
            return lambda products, x: products.product_fp8(x, into, out, (), bias=bias)
        return lambda products, x: products.rounded_product(x, into, out, ())

    def operators(self) -> tuple[Tape, Tape, Tape]:
        """Returns the operators of a block, of what comes after all blocks, and of the loss."""
        module = self._module(FRESH)
        (block,) = module.layers()
        module.put_layers([block])
        counted = Operators(self.run)
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
