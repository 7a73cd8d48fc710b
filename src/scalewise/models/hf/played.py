"""The parts of a model as they run, with no memory behind their tensors: what plans count with."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from scalewise.adapters.low_rank import Dora, Lora
from scalewise.adapters.scales import IA3
from scalewise.adapters.spec import Adapter, NoAdapter
from scalewise.measure.memory import LiveBytes, bytes_of, storages_of
from scalewise.memory import Checkpointing, Recompute
from scalewise.models.base import Part
from scalewise.models.hf.module import HuggingFaceModule
from scalewise.models.hf.operators import Operators
from scalewise.models.tape import Pass, Played, Tape, Tapes
from scalewise.objectives import CausalLM

if TYPE_CHECKING:
    from scalewise.models.hf.spec import HuggingFace

NUMBERS = {4: torch.float32, 2: torch.bfloat16}
"""Formats by their bytes: fp16 takes what bf16 does."""
ONE = Part(range(1))

Sizes = tuple[int, int, int, int]
"""What a ``Played`` gives."""


def tapes(spec: HuggingFace, run: Pass) -> Tapes:
    """Returns the parts of a model, each of which runs when it is asked for."""
    player = Player(spec, run)
    ends, (block, last, loss) = player.ends(True), player.operators()
    return Tapes(
        first=Played(play=lambda _, fresh: player.ends(fresh).first),
        start=_played(block, lambda *how: player.block(*how, trained=ends.x.requires_grad)),
        block=_played(block, lambda *how: player.block(*how, trained=True)),
        last=_played(last, lambda _, fresh: player.ends(fresh).last),
        loss=None if player.in_pieces else _played(loss, lambda *_: player.loss()),
        shared=ends.shared,
    )


def _played(tape: Tape, play: Any) -> Played:
    return Played(sizes=tape.sizes, trained=tape.trained, operators=tape.operators, play=play)


class Player:
    """Runs parts of a model on the CPU, under ``FakeTensorMode``, in the formats of a pass."""

    def __init__(self, spec: HuggingFace, run: Pass) -> None:
        self.spec, self.run = spec, run
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.in_pieces = 0 < run.loss_chunk < run.places
        self.objective = CausalLM(loss_chunk=run.loss_chunk if self.in_pieces else None)
        self.ends = cache(self._ends)

    def _module(self, recompute: Recompute, *, fresh: bool) -> HuggingFaceModule:
        """Returns the ends of the model and one block, alive in the mode."""
        module = self.spec.shape(ONE)
        self._adapter().apply(module, self.spec)
        self.objective.apply(module)
        Checkpointing(recompute).apply(module, ONE)
        with self.mode, torch.no_grad():
            for owner in module.modules():
                for name, parameter in owner._parameters.items():
                    if parameter is not None:
                        owner._parameters[name] = self._alive(parameter, fresh=fresh)
                for name, buffer in owner._buffers.items():
                    owner._buffers[name] = None if buffer is None else torch.empty_like(buffer)
        return module

    def _alive(self, parameter: nn.Parameter, *, fresh: bool) -> nn.Parameter:
        empty = torch.empty(parameter.shape, dtype=NUMBERS[self.run.held])
        made = nn.Parameter(empty, parameter.requires_grad)
        if made.requires_grad and not fresh:
            made.grad = torch.empty_like(made)
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

    def block(self, recompute: Recompute, fresh: bool, *, trained: bool) -> Sizes:
        """Returns what a block holds; ``trained``: whether something before it is."""
        ends, module = self.ends(True), self._module(recompute, fresh=fresh)
        (block,) = module.layers()
        with self.mode:
            leaf = ends.x.leaf(trained=trained)
        with self.mode, LiveBytes() as live:
            x = leaf.clone()
            with self._forward():
                y = block(x, *ends.arguments, **ends.keywords)
            forward = live.take_peak()
            del x
            kept, end = live.now - bytes_of([y]), [_End.apply(y)]  # type: ignore[no-untyped-call]
            del y
            return kept, forward, _backward(end, live), _gradients(module) * fresh

    def loss(self) -> Sizes:
        """Returns what the loss holds."""
        with self.mode:
            leaf, (_, labels) = self.ends(True).logits.leaf(trained=True), self._rows()
        with self.mode, LiveBytes() as live:
            logits = leaf.clone()
            end = [self.objective.summed(logits, labels)]
            forward = live.take_peak()
            del logits
            return live.now, forward, _backward(end, live), 0

    def _ends(self, fresh: bool) -> Ends:
        """Runs what stands before the blocks and after them, around a block that does nothing."""
        module = self._module(Recompute.nothing, fresh=fresh)
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
            end = [out if self.in_pieces else _End.apply(out)]  # type: ignore[no-untyped-call]
            del out
            backward = _backward(end, after)
            after.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            last = (kept, forward, backward, _gradients(module) * fresh)
            if fresh:
                module.zero_grad()
            return between.told(before, last, logits, module, fresh=fresh)

    def operators(self) -> tuple[Tape, Tape, Tape]:
        """Returns the operators of a block, of what comes after all blocks, and of the loss."""
        module = self._module(Recompute.nothing, fresh=True)
        (block,) = module.layers()
        module.put_layers([block])
        with self.mode:
            tokens, labels = self._rows()
            with self._forward(), Operators(self.run) as counted:
                block.register_forward_pre_hook(lambda _, given: counted.begin("block", given[:1]))
                block.register_forward_hook(lambda _, __, out: counted.begin("last", (out,)))
                out = module(tokens, labels if self.in_pieces else None)
                counted.begin("loss", (out,))
                if not self.in_pieces:
                    self.objective.summed(out, labels)
        return counted.tapes["block"], counted.tapes["last"], counted.tapes["loss"]


@dataclass(frozen=True)
class Kind:
    """What is known of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Kind:
        """Returns that of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def leaf(self, *, trained: bool) -> Tensor:
        """Returns one that autograd holds; a clone of it has no other holder than who makes it."""
        return torch.empty(self.shape, dtype=self.dtype, requires_grad=trained)


@dataclass(frozen=True)
class Ends:
    """``first`` and ``last``: what the two ends hold. A block reads ``x`` and what all read.

    ``shared``: the bytes of that.
    """

    first: Sizes
    last: Sizes
    x: Kind
    logits: Kind
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    shared: int


class Between(nn.Module):
    """A block that does nothing, and ends what is counted of before it."""

    def __init__(self, before: LiveBytes, after: LiveBytes) -> None:
        super().__init__()
        self._counts = (before, after)

    def forward(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Returns another such tensor, of which backward goes no further."""
        before, after = self._counts
        self.x, self.arguments, self.keywords = x, arguments, keywords
        before.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        leaf = Kind.of(x).leaf(trained=True)
        after.__enter__()  # type: ignore[no-untyped-call]
        return leaf.clone()

    def told(
        self,
        before: LiveBytes,
        last: Sizes,
        logits: Kind,
        module: nn.Module,
        *,
        fresh: bool,
    ) -> Ends:
        """Returns the ends, once what comes before the blocks has gone backward."""
        x = Kind.of(self.x)
        others = [
            each
            for each in tree_leaves((self.arguments, self.keywords))
            if isinstance(each, Tensor)
        ]
        others = [each for each in others if not storages_of([each]) & storages_of([self.x])]
        shared = bytes_of(others)
        first = (0, 0, 0, 0)
        if x.requires_grad:
            end = [_End.apply(self.x)]  # type: ignore[no-untyped-call]
            del self.x
            before.__enter__()  # type: ignore[no-untyped-call]
            backward = _backward(end, before) - shared
            before.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            first = (0, 0, backward, _gradients(module) * fresh)
        return Ends(first, last, x, logits, self.arguments, self.keywords, shared)


class _End(torch.autograd.Function):
    """A number that all of a tensor leads to; the tensor's gradient is made in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns a number."""
        ctx.kind = Kind.of(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        """Returns a gradient."""
        return torch.empty(ctx.kind.shape, dtype=ctx.kind.dtype)


def _backward(end: list[Tensor], live: LiveBytes) -> int:
    """Goes backward from the only one of a list; returns the most that is alive meanwhile."""
    live.take_peak()
    last = end.pop()
    if last.requires_grad:
        cast(Any, last).backward()
    return live.take_peak()


def _gradients(module: nn.Module) -> int:
    return bytes_of(each.grad for each in module.parameters() if each.grad is not None)
