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

    matmul = "product"
    """Matrix products: the tensor cores."""
    matmul_fp8 = "product_fp8"
    """Matrix products of numbers of 8 bits: the tensor cores, faster."""
    attention = "attention"
    """Products inside a fused attention kernel."""
    pointwise = "pointwise"
    """Reads and writes: the memory's bandwidth."""
    communication = "message"
    """What other ranks send: the links."""


@dataclass(frozen=True)
class ForwardSpec:
    """One pass of one rank through a model: shapes and formats.

    ``residual_element_bytes``: bytes of a number between layers; ``compute_element_bytes``: in
    matrix products; ``gradient_element_bytes``: of a
    weight's gradient. ``autocast``: whether products cast what they read (autocast). ``on_cpu``:
    whether norms are taken apart into their arithmetic, as torch does without a kernel of its own.
    ``loss_chunk``: tokens whose logits exist at a time; 0: all; ``loss_in_forward``: whether
    gradients are taken with the loss of these. ``rope_element_bytes``: bytes of a number of
    the rotations. ``tensor_ranks``: ranks that share every matrix out; ``sequence_parallel``:
    whether they share
    the tokens out in between, ``loss_parallel``: and the logits in the loss. ``context_ranks``:
    ranks that
    share the tokens of a row out; ``gathers_keys``: whether each has the keys of all (else some
    heads).
    ``has_frozen_weights``: whether the model's own weights are not trained, but for the modules
    that are trained ``fully_trained_modules``; ``adapted_layers``: layers that have
    matrices of ``adapter_rank`` beside them, a ``adapter_dropout`` of what these read, and
    ``has_magnitudes`` of their
    rows or not; ``scaled_layers``: layers whose outputs, or inputs if they end a sublayer, are
    multiplied
    by a vector; ``packed_layers``: layers whose matrices are unpacked for each product, with
    ``scale_bytes`` of scales for each number. ``loss_element_bytes``: bytes of a number in the
    loss.
    ``prompt_tokens``: vectors that are trained, before the tokens of a row, and that blocks read as
    such;
    ``prefix_tokens``: keys and values that are trained, before those of a layer.
    ``saves_alternate_matmuls``: whether selective recomputation keeps every second product alone,
    as torchtitan's does. ``sequence_packing``: whether several texts lie in a row, which do not see
    each other.
    ``fp8_layers``: layers that cast what they multiply to 8 bits. ``fake_quantized_layers``: layers
    that round
    their matrices to integers and back, with a scale for each ``quantization_group``, and if
    ``rounds_inputs``
    what these multiply. ``is_compiled``: whether a compiler makes kernels of blocks.
    """

    sequences: int
    tokens_per_sequence: int
    residual_element_bytes: int
    compute_element_bytes: int
    gradient_element_bytes: int
    autocast: bool
    on_cpu: bool
    loss_chunk: int = 0
    loss_in_forward: bool = False
    rope_element_bytes: int = 4
    tensor_ranks: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    context_ranks: int = 1
    gathers_keys: bool = False
    has_frozen_weights: bool = False
    fully_trained_modules: tuple[str, ...] = ()
    adapted_layers: tuple[str, ...] = ()
    adapter_rank: int = 0
    adapter_dropout: float = 0.0
    has_magnitudes: bool = False
    scaled_layers: tuple[str, ...] = ()
    packed_layers: tuple[str, ...] = ()
    scale_bytes: float = 0.0
    loss_element_bytes: int = 4
    saves_alternate_matmuls: bool = False
    sequence_packing: bool = False
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    fp8_layers: tuple[str, ...] = ()
    fake_quantized_layers: tuple[str, ...] = ()
    quantization_group: int = 0
    rounds_inputs: bool = False
    is_compiled: bool = False

    @property
    def num_tokens(self) -> int:
        """Returns the tokens of all rows."""
        return self.sequences * self.tokens_per_sequence

    @property
    def residual_tokens(self) -> int:
        """Returns the tokens of all rows that this rank has between sublayers."""
        return self.num_tokens // (self.tensor_ranks if self.sequence_parallel else 1)


@dataclass(frozen=True)
class Op:
    """One operator. Tensors are places in ``Tape.sizes``.

    ``saved``: what backward reads. ``gradients``: the inputs that get a gradient, in the order in
    which it is made; ``shares_gradient``: whether those of the output's format are given its own.
    ``weight_gradient_bytes``: bytes of the weight's gradient as computed, and as held;
    ``weight_gradient_first``: whether
    that is made before the inputs'. ``forward_scratch``, ``backward_scratch``: bytes that either
    direction
    needs besides. ``cast_bytes``: bytes that it reads and writes in either direction to make
    numbers of
    8 bits or fewer. ``unpacks_weight``: whether its matrix is unpacked anew, so that backward reads
    nothing of forward. ``saved_by_selective``: whether selective recomputation keeps the results.
    ``saves_gradients``: whether what it saved are the gradients. ``is_fused``: whether backward is
    part of
    a compiler's kernel, which reads all that arrives for it, ``forbids_inplace``: and of this
    writes nothing over that it reads for several gradients.
    ``flops`` of forward; backward makes ``backward_flops``.
    """

    work: OpWork
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    saved: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    shares_gradient: bool = False
    weight_gradient_bytes: tuple[int, int] = (0, 0)
    weight_gradient_first: bool = True
    forward_scratch: int = 0
    backward_scratch: int = 0
    cast_bytes: tuple[int, int] = (0, 0)
    unpacks_weight: bool = False
    saved_by_selective: bool = False
    saves_gradients: bool = False
    is_fused: bool = False
    forbids_inplace: bool = False
    flops: float = 0.0
    backward_flops: float = 0.0

    @property
    def backward_reads_forward(self) -> bool:
        """Returns whether backward reads what forward has left: a result, or a product's weight."""
        multiplies = self.work in (OpWork.matmul, OpWork.matmul_fp8)
        return bool(self.saved) or (multiplies and not self.unpacks_weight)


@dataclass
class OpGraph:
    """The operators of a part of a model, in order, and the bytes of every tensor.

    ``fused_intermediates``: tensors that are in no memory unless saved: the kernel that makes them
    reads them.
    """

    sizes: list[int] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    operators: list[Op] = field(default_factory=list)
    fused_intermediates: frozenset[int] = frozenset()

    def count_moved_bytes(self, tensors: Iterable[int]) -> int:
        """Returns the bytes of those that are read from memory, or written to it."""
        return sum(self.sizes[place] for place in tensors if place not in self.fused_intermediates)

    def add_tensor(self, size: int, *, requires_grad: bool = True) -> int:
        """Returns the place of a new tensor of ``size`` bytes.

        ``requires_grad``: whether backward has to give it a gradient.
        """
        self.sizes.append(size)
        self.requires_grad.append(requires_grad)
        return len(self.sizes) - 1

    def add_op(
        self,
        work: OpWork,
        reads: Sequence[int],
        size: int,
        *,
        saved: Iterable[int] = (),
        gradients: Sequence[int] | None = None,
        weight_gradient_bytes: tuple[int, int] = (0, 0),
        weight_gradient_first: bool = True,
        extra_output_bytes: Sequence[int] = (),
        saves_output: bool = False,
        shares_gradient: bool = False,
        forward_scratch: int = 0,
        backward_scratch: int = 0,
        cast_bytes: tuple[int, int] = (0, 0),
        unpacks_weight: bool = False,
        saved_by_selective: bool = False,
        saves_gradients: bool = False,
        flops: float = 0.0,
        backward_flops: float = 0.0,
    ) -> int:
        """Appends an operator and returns the place of what it writes, of ``size`` bytes.

        ``extra_output_bytes``: bytes of further outputs that backward alone reads. The rest is
        ``Operator``'s.
        """
        wanted = reads if gradients is None else gradients
        asked = tuple(place for place in wanted if self.requires_grad[place])
        trained = bool(asked or weight_gradient_bytes[0])
        written = self.add_tensor(size, requires_grad=trained)
        others = tuple(self.add_tensor(each, requires_grad=False) for each in extra_output_bytes)
        kept = (*saved, *others, *((written,) if saves_output else ())) if trained else ()
        self.operators.append(
            Op(
                work,
                tuple(dict.fromkeys(reads)),
                (written, *others),
                saved=kept,
                gradients=asked,
                shares_gradient=shares_gradient,
                weight_gradient_bytes=weight_gradient_bytes,
                weight_gradient_first=weight_gradient_first,
                forward_scratch=forward_scratch,
                backward_scratch=backward_scratch,
                cast_bytes=cast_bytes,
                unpacks_weight=unpacks_weight,
                saved_by_selective=saved_by_selective,
                saves_gradients=saves_gradients,
                flops=flops,
                backward_flops=backward_flops,
            )
        )
        return written


@dataclass(frozen=True)
class BackwardMode:
    """How a part goes through a pass.

    ``recompute``: what backward makes a second time. ``fresh_gradients``: whether weights have no
    gradient
    yet, so that the one made here stays. ``offload``: whether what is kept is brought back when
    backward first reads it. ``step_scratch_ratio``: bytes that the optimizer takes for each byte of
    a weight's gradient, before it drops that; below 0: later.
    """

    recompute: Recompute
    fresh_gradients: bool
    offload: bool = False
    step_scratch_ratio: float = -1


@dataclass(kw_only=True)
class RecordedPart(OpGraph):
    """A part whose memory is found by running it; its operators tell of its time alone.

    ``measure`` gives what a ``Replay`` has, bytes: ``kept``, ``forward_peak``, ``backward_peak``
    and
    ``gradients``.
    """

    measure: Callable[[BackwardMode], tuple[int, int, int, int]]


@dataclass(frozen=True)
class ModelOpGraphs:
    """The parts of a model: what comes before its layers, one of these, the head, and the loss.

    ``first_block`` is the first layer, which keeps less where nothing before it is trained. The
    first tensor of a part but ``embedding`` is what it reads. ``loss`` is None where ``head`` takes
    the loss of pieces. ``shared_bytes``: bytes that all layers read and none makes again.
    """

    embedding: OpGraph
    first_block: OpGraph
    block: OpGraph
    head: OpGraph
    loss: OpGraph | None
    shared_bytes: int
