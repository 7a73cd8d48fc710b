"""A forward pass as a list of operators, with what each keeps for backward: shapes, no tensors.

One list serves memory and time: what is alive when (``replay``), what is computed and what moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalewise.activation_checkpointing import Recompute


class OpWork(StrEnum):
    """What an operator is bound by."""

    product = "product"
    """Matrix products: the tensor cores."""
    product_fp8 = "product_fp8"
    """Matrix products of numbers of 8 bits: the tensor cores, faster."""
    attention = "attention"
    """Products inside a fused attention kernel."""
    pointwise = "pointwise"
    """Reads and writes: the memory's bandwidth."""
    message = "message"
    """What other ranks send: the links."""


@dataclass(frozen=True)
class ForwardSpec:
    """One pass of one rank through a model: shapes and formats.

    ``stream``: bytes of a number between layers; ``compute``: in matrix products; ``held``: of a
    weight's gradient. ``casts``: whether products cast what they read (autocast). ``on_cpu``:
    whether norms are taken apart into their arithmetic, as torch does without a kernel of its own.
    ``loss_chunk``: tokens whose logits exist at a time; 0: all; ``loss_in_forward``: whether
    gradients are taken with the loss of these. ``table``: bytes of a number of
    the rotations. ``tensor``: ranks that share every matrix out; ``cut_tokens``: whether they share
    the tokens out in between, ``cut_loss``: and the logits in the loss. ``context``: ranks that
    share the tokens of a row out; ``gathers``: whether each has the keys of all (else some heads).
    ``frozen``: whether the model's own weights are not trained, but for the modules that are
    trained ``whole``; ``adapted``: layers that have
    matrices of ``rank`` beside them, a ``dropout`` of what these read, and ``magnitudes`` of their
    rows or not; ``scaled``: layers whose outputs, or inputs if they end a sublayer, are multiplied
    by a vector; ``packed``: layers whose matrices are unpacked for each product, with
    ``scale_bytes`` of scales for each number. ``loss``: bytes of a number in the loss.
    ``ahead``: vectors that are trained, before the tokens of a row, and that blocks read as such;
    ``before``: keys and values that are trained, before those of a layer.
    ``every_second``: whether selective recomputation keeps every second product alone, as
    torchtitan's does. ``packing``: whether several texts lie in a row, which do not see each other.
    ``in_fp8``: layers that cast what they multiply to 8 bits. ``fake_quantized``: layers that round
    their matrices to integers and back, with a scale for each ``group``, and if ``rounds_inputs``
    what these multiply. ``compiled``: whether a compiler makes kernels of blocks.
    """

    rows: int
    tokens: int
    stream: int
    compute: int
    held: int
    casts: bool
    on_cpu: bool
    loss_chunk: int = 0
    loss_in_forward: bool = False
    table: int = 4
    tensor: int = 1
    cut_tokens: bool = False
    cut_loss: bool = False
    context: int = 1
    gathers: bool = False
    frozen: bool = False
    whole: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    rank: int = 0
    dropout: float = 0.0
    magnitudes: bool = False
    scaled: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    scale_bytes: float = 0.0
    loss: int = 4
    every_second: bool = False
    packing: bool = False
    ahead: int = 0
    before: int = 0
    in_fp8: tuple[str, ...] = ()
    fake_quantized: tuple[str, ...] = ()
    group: int = 0
    rounds_inputs: bool = False
    compiled: bool = False

    @property
    def places(self) -> int:
        """Returns the tokens of all rows."""
        return self.rows * self.tokens

    @property
    def between(self) -> int:
        """Returns the tokens of all rows that this rank has between sublayers."""
        return self.places // (self.tensor if self.cut_tokens else 1)


@dataclass(frozen=True)
class Op:
    """One operator. Tensors are places in ``Tape.sizes``.

    ``saved``: what backward reads. ``gradients``: the inputs that get a gradient, in the order in
    which it is made; ``shares``: whether those of the output's format are given its own.
    ``weight``: bytes of the weight's gradient as computed, and as held; ``weight_first``: whether
    that is made before the inputs'. ``forward_scratch``, ``scratch``: bytes that either direction
    needs besides. ``casts``: bytes that it reads and writes in either direction to make numbers of
    8 bits or fewer. ``packed``: whether its matrix is unpacked anew, so that backward reads nothing
    of forward. ``kept_by_selective``: whether selective recomputation keeps the results.
    ``hands_over``: whether what it saved are the gradients. ``kernel``: whether backward is part of
    a compiler's kernel, which reads all that arrives for it, ``anew``: and of this writes nothing
    over that it reads for several gradients.
    ``flops`` of forward; backward makes ``backward_flops``.
    """

    work: OpWork
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    saved: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    shares: bool = False
    weight: tuple[int, int] = (0, 0)
    weight_first: bool = True
    forward_scratch: int = 0
    scratch: int = 0
    casts: tuple[int, int] = (0, 0)
    packed: bool = False
    kept_by_selective: bool = False
    hands_over: bool = False
    kernel: bool = False
    anew: bool = False
    flops: float = 0.0
    backward_flops: float = 0.0

    @property
    def reads_back(self) -> bool:
        """Returns whether backward reads what forward has left: a result, or a product's weight."""
        multiplies = self.work in (OpWork.product, OpWork.product_fp8)
        return bool(self.saved) or (multiplies and not self.packed)


@dataclass
class OpGraph:
    """The operators of a part of a model, in order, and the bytes of every tensor.

    ``inside``: tensors that are in no memory unless saved: the kernel that makes them reads them.
    """

    sizes: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    operators: list[Op] = field(default_factory=list)
    inside: frozenset[int] = frozenset()

    def moved(self, places: Iterable[int]) -> int:
        """Returns the bytes of those that are read from memory, or written to it."""
        return sum(self.sizes[place] for place in places if place not in self.inside)

    def tensor(self, size: int, *, trained: bool = True) -> int:
        """Returns the place of a new tensor of ``size`` bytes.

        ``trained``: whether backward has to give it a gradient.
        """
        self.sizes.append(size)
        self.trained.append(trained)
        return len(self.sizes) - 1

    def add(
        self,
        work: OpWork,
        reads: Sequence[int],
        size: int,
        *,
        saved: Iterable[int] = (),
        gradients: Sequence[int] | None = None,
        weight: tuple[int, int] = (0, 0),
        weight_first: bool = True,
        extra: Sequence[int] = (),
        saves_output: bool = False,
        shares: bool = False,
        forward_scratch: int = 0,
        scratch: int = 0,
        casts: tuple[int, int] = (0, 0),
        packed: bool = False,
        kept_by_selective: bool = False,
        hands_over: bool = False,
        flops: float = 0.0,
        backward_flops: float = 0.0,
    ) -> int:
        """Appends an operator and returns the place of what it writes, of ``size`` bytes.

        ``extra``: bytes of further outputs that backward alone reads. The rest is ``Operator``'s.
        """
        wanted = reads if gradients is None else gradients
        asked = tuple(place for place in wanted if self.trained[place])
        trained = bool(asked or weight[0])
        written = self.tensor(size, trained=trained)
        others = tuple(self.tensor(each, trained=False) for each in extra)
        kept = (*saved, *others, *((written,) if saves_output else ())) if trained else ()
        self.operators.append(
            Op(
                work,
                tuple(dict.fromkeys(reads)),
                (written, *others),
                saved=kept,
                gradients=asked,
                shares=shares,
                weight=weight,
                weight_first=weight_first,
                forward_scratch=forward_scratch,
                scratch=scratch,
                casts=casts,
                packed=packed,
                kept_by_selective=kept_by_selective,
                hands_over=hands_over,
                flops=flops,
                backward_flops=backward_flops,
            )
        )
        return written


@dataclass(frozen=True)
class BackwardMode:
    """How a part goes through a pass.

    ``recompute``: what backward makes a second time. ``fresh``: whether weights have no gradient
    yet, so that the one made here stays. ``offload``: whether what is kept is brought back when
    backward first reads it. ``stepped``: bytes that the optimizer takes for each byte of a weight's
    gradient, before it drops that; below 0: later.
    """

    recompute: Recompute
    fresh: bool
    offload: bool = False
    stepped: float = -1


@dataclass(kw_only=True)
class RecordedPart(OpGraph):
    """A part whose memory is found by running it; its operators tell of its time alone.

    ``play`` gives what a ``Replay`` has, bytes: ``kept``, ``forward_peak``, ``backward_peak`` and
    ``gradients``.
    """

    play: Callable[[BackwardMode], tuple[int, int, int, int]]


@dataclass(frozen=True)
class ModelOpGraphs:
    """The parts of a model: what comes before its layers, one of these, the head, and the loss.

    ``start`` is the first layer, which keeps less where nothing before it is trained. The first
    tensor of a part but ``first`` is what it reads. ``loss`` is None where ``last`` takes
    the loss of pieces. ``shared``: bytes that all layers read and none makes again.
    """

    first: OpGraph
    start: OpGraph
    block: OpGraph
    last: OpGraph
    loss: OpGraph | None
    shared: int
