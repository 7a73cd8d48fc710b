"""Operator graphs of a forward pass, of which the planner derives memory, FLOPs and traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from scalewise.cached_hash import cache_hash
from scalewise.lazy_dispatch import lazy_dispatch_by, not_registered
from scalewise.models.base import ModelConfig


class OpWork(StrEnum):
    """Resource that bounds the time of an operator."""

    matmul = "product"
    """Matrix multiplication: tensor cores."""
    matmul_fp8 = "product_fp8"
    """Matrix multiplication in FP8: tensor cores at their FP8 rate."""
    attention = "attention"
    """Matrix multiplications inside a fused attention kernel."""
    pointwise = "pointwise"
    """Elementwise operator: memory bandwidth."""
    communication = "message"
    """Collective: link bandwidth."""


class Recompute(StrEnum):
    """Activations of a block that the backward pass recomputes."""

    nothing = "nothing"
    """Nothing: all activations are stored."""
    selective = "selective"
    """All but the results of matmuls and attention, which are stored (Korthikanti et al., 2022)."""
    full = "full"
    """The whole block: only its input is stored (Chen et al., 2016)."""


class SavedOn(StrEnum):
    """Memory in which the tensors that a block saves for backward wait for it."""

    device = "device"
    """Memory of the device."""
    host = "host"
    """Host memory, to and from which they are copied while the next block runs."""
    disk = "disk"
    """Disk, to which they are written when they are saved, and read at their first use."""


@cache_hash
@dataclass(frozen=True)
class ForwardSpec:
    """Shapes and formats of one forward pass (one micro-batch) on one rank."""

    sequences: int
    """Sequences per micro-batch."""
    tokens_per_sequence: int
    """Tokens of one sequence on this rank; of an encoder-decoder model, of source and target."""
    residual_element_bytes: int
    """Bytes per element of the residual stream."""
    compute_element_bytes: int
    """Bytes per element of matmul operands."""
    gradient_element_bytes: int
    """Bytes per element of weights and of their gradients."""
    autocast: bool
    """Whether matmuls run under ``torch.autocast``."""
    on_cpu: bool
    """Whether torch's CPU operators run: RMSNorm, for example, has no fused kernel there."""
    unfused_norms: bool = False
    """Whether RMSNorm consists of fp32 operators on a GPU too, as in litgpt."""
    loss_chunk: int = 0
    """Tokens whose logits exist at a time (chunked loss); 0: all."""
    loss_in_forward: bool = False
    """Whether the gradients of a chunk are computed together with its loss."""
    rope_element_bytes: int = 4
    """Bytes per element of the rotary table."""
    tensor_ranks: int = 1
    """Tensor-parallel degree."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks shard the tokens between sublayers."""
    has_megatron_layers: bool = False
    """Whether backward gathers tokens again and computes the shard of the embedding's gradient."""
    loss_parallel: bool = False
    """Whether tensor-parallel ranks shard the logits in the loss."""
    context_ranks: int = 1
    """Context-parallel degree: ranks that shard the tokens of a sequence."""
    expert_ranks: int = 1
    """Expert-parallel degree: ranks that exchange the tokens of their experts."""
    expert_load: float = 1.0
    """Tokens of the experts of this rank, relative to the mean over expert-parallel ranks."""
    gathers_keys: bool = False
    """Whether context-parallel ranks all-gather keys and values; otherwise they shard heads."""
    has_frozen_weights: bool = False
    """Whether the weights of the model are frozen, except ``fully_trained_modules``."""
    fully_trained_modules: tuple[str, ...] = ()
    """Modules of a frozen model that are trained."""
    adapted_layers: tuple[str, ...] = ()
    """Linear layers with a LoRA adapter."""
    adapter_rank: int = 0
    """Rank of the LoRA matrices."""
    adapter_dropout: float = 0.0
    """Dropout probability of the input of the LoRA matrices."""
    has_magnitudes: bool = False
    """Whether adapted layers have DoRA magnitudes."""
    scaled_layers: tuple[str, ...] = ()
    """Linear layers with an IA3 vector: on the input if they end a sublayer, else on the output."""
    packed_layers: tuple[str, ...] = ()
    """Linear layers with packed weights, which are unpacked for each matmul."""
    scale_bytes: float = 0.0
    """Bytes of quantization scales per element of a packed weight."""
    loss_element_bytes: int = 4
    """Bytes per element of logits in the loss."""
    saves_alternate_matmuls: bool = False
    """Whether selective checkpointing saves every second matmul only, as in torchtitan."""
    stores_scores: bool = False
    """Whether attention stores its scores, as frameworks before FlashAttention do."""
    sequence_packing: bool = False
    """Whether a sequence contains several texts that do not attend to each other."""
    prompt_tokens: int = 0
    """Trained vectors before the embedded tokens of a sequence (prompt tuning)."""
    prefix_tokens: int = 0
    """Trained keys and values before those of each layer (prefix tuning)."""
    fp8_layers: tuple[str, ...] = ()
    """Linear layers that cast their operands to FP8."""
    fuses_fp8_casts: bool = False
    """Whether kernels write FP8 operands and their transposes themselves, and weights are cast once
    per step, as in Transformer Engine."""
    fake_quantized_layers: tuple[str, ...] = ()
    """Linear layers that round their weights to integers and back (quantization-aware training)."""
    quantization_group: int = 0
    """Elements of a weight per quantization scale."""
    rounds_inputs: bool = False
    """Whether fake-quantized layers also round their inputs."""
    is_compiled: bool = False
    """Whether ``torch.compile`` fuses the operators of blocks."""
    is_loss_compiled: bool = False
    """Whether ``torch.compile`` fuses the operators of the loss."""
    has_z_loss: bool = False
    """Whether the loss also reads the logit of each label, which has a gradient of its own."""
    target_tokens: int = 0
    """Tokens of one sequence that the decoder of an encoder-decoder model reads."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences of the micro-batch."""
        return self.sequences * self.tokens_per_sequence

    @property
    def residual_tokens(self) -> int:
        """Tokens of the micro-batch that this rank stores between sublayers."""
        return self.num_tokens // (self.tensor_ranks if self.sequence_parallel else 1)


@dataclass(frozen=True)
class Op:
    """One operator. Tensors are indices into ``OpGraph.sizes``."""

    work: OpWork
    """Resource that bounds its time."""
    reads: tuple[int, ...]
    """Input tensors."""
    writes: tuple[int, ...]
    """Output tensors; the first one is the result."""
    saved: tuple[int, ...] = ()
    """Tensors saved for backward."""
    gradients: tuple[int, ...] = ()
    """Inputs that get a gradient, in the order of computation."""
    shares_gradient: bool = False
    """Whether inputs of the output's dtype receive the output's gradient itself, without a copy."""
    gradient_views: tuple[int, ...] = ()
    """Inputs whose gradient is a view of the output's gradient, as a part of a concatenation."""
    weight_gradient_bytes: tuple[int, int] = (0, 0)
    """Bytes of the weight gradient as computed, and as stored in ``.grad``."""
    weight_gradient_first: bool = True
    """Whether the weight gradient is computed before the input gradients."""
    has_joint_backward: bool = False
    """Whether backward computes both gradients, of inputs and weight, if only one is read."""
    forward_scratch: int = 0
    """Bytes of temporary tensors in forward."""
    backward_scratch: int = 0
    """Bytes of temporary tensors in backward."""
    cast_bytes: tuple[int, int] = (0, 0)
    """Memory traffic of casts to 8 bits or fewer, in forward and in backward."""
    elementwise_bytes: tuple[int, int] = (0, 0)
    """Memory traffic of elementwise kernels between its matmuls, in forward and in backward."""
    unpacks_weight: bool = False
    """Whether its packed weight is unpacked again in backward, which then reads no saved tensor."""
    saved_by_selective: bool = False
    """Whether selective checkpointing saves its outputs."""
    saves_gradients: bool = False
    """Whether the saved tensors are the gradients, computed in forward."""
    is_fused: bool = False
    """Whether its backward is part of a compiled kernel, which reads all incoming gradients."""
    forbids_inplace: bool = False
    """Whether that kernel must not overwrite an incoming gradient that it reads several times."""
    flops: float = 0.0
    """FLOPs of forward."""
    backward_flops: float = 0.0
    """FLOPs of backward."""
    rate_share: float = 1.0
    """Rate of its kernel at these shapes, relative to the sustained rate of the device."""

    @property
    def backward_reads_forward(self) -> bool:
        """Whether backward reads a saved tensor or the weight of a matmul."""
        is_matmul = self.work in (OpWork.matmul, OpWork.matmul_fp8)
        return bool(self.saved) or (is_matmul and not self.unpacks_weight)


@dataclass
class OpGraph:
    """Operators of one part of a model, in execution order, and the bytes of their tensors."""

    sizes: list[int] = field(default_factory=list)
    """Bytes of each tensor."""
    requires_grad: list[bool] = field(default_factory=list)
    """Whether backward computes the gradient of each tensor."""
    operators: list[Op] = field(default_factory=list)
    """Operators, in execution order."""
    fused_intermediates: frozenset[int] = frozenset()
    """Tensors inside a fused kernel, which are in memory only if saved."""
    weight_casts: set[int] = field(default_factory=set)
    """Casts of weights, which are not offloaded but computed again."""

    def count_moved_bytes(self, tensors: Iterable[int]) -> int:
        """Return the bytes of the tensors that are read from memory or written to it."""
        return sum(
            self.sizes[tensor] for tensor in tensors if tensor not in self.fused_intermediates
        )

    def forward_bytes(self, operator: Op) -> int:
        """Return the memory traffic of an operator in forward, without casts inside it."""
        return self.count_moved_bytes((*operator.reads, *operator.writes))

    def backward_bytes(self, operator: Op) -> int:
        """Return the memory traffic of an operator in backward, without casts inside it."""
        if not (operator.gradients or operator.weight_gradient_bytes[0]):
            return 0
        gradient_bytes = self.count_moved_bytes(operator.gradients)
        return self.forward_bytes(operator) + gradient_bytes + sum(operator.weight_gradient_bytes)

    def add_tensor(self, size: int, *, requires_grad: bool = True) -> int:
        """Add a tensor and return its index.

        Args:
            size: Bytes of the tensor.
            requires_grad: Whether backward computes its gradient.
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
        has_joint_backward: bool = False,
        extra_output_bytes: Sequence[int] = (),
        saves_output: bool = False,
        shares_gradient: bool = False,
        gradient_views: tuple[int, ...] = (),
        forward_scratch: int = 0,
        backward_scratch: int = 0,
        cast_bytes: tuple[int, int] = (0, 0),
        elementwise_bytes: tuple[int, int] = (0, 0),
        unpacks_weight: bool = False,
        saved_by_selective: bool = False,
        saves_gradients: bool = False,
        flops: float = 0.0,
        backward_flops: float = 0.0,
        rate_share: float = 1.0,
    ) -> int:
        """Append an operator and return the index of its output.

        Args:
            work: As in :class:`Op`, with all arguments that are not listed here.
            reads: Input tensors.
            size: Bytes of the output.
            gradients: Inputs that may get a gradient; None: all.
            extra_output_bytes: Bytes of further outputs that only backward reads.
            saves_output: Whether the output is saved for backward.
        """
        candidates = reads if gradients is None else gradients
        differentiable = tuple(tensor for tensor in candidates if self.requires_grad[tensor])
        has_backward = bool(differentiable or weight_gradient_bytes[0])
        output = self.add_tensor(size, requires_grad=has_backward)
        extra_outputs = tuple(
            self.add_tensor(extra, requires_grad=False) for extra in extra_output_bytes
        )
        all_saved = (*saved, *extra_outputs, *((output,) if saves_output else ()))
        self.operators.append(
            Op(
                work,
                tuple(dict.fromkeys(reads)),
                (output, *extra_outputs),
                saved=all_saved if has_backward else (),
                gradients=differentiable,
                shares_gradient=shares_gradient,
                gradient_views=gradient_views,
                weight_gradient_bytes=weight_gradient_bytes,
                weight_gradient_first=weight_gradient_first,
                has_joint_backward=has_joint_backward,
                forward_scratch=forward_scratch,
                backward_scratch=backward_scratch,
                cast_bytes=cast_bytes,
                elementwise_bytes=elementwise_bytes,
                unpacks_weight=unpacks_weight,
                saved_by_selective=saved_by_selective,
                saves_gradients=saves_gradients,
                flops=flops,
                backward_flops=backward_flops,
                rate_share=rate_share,
            )
        )
        return output


@dataclass(frozen=True)
class BackwardMode:
    """Options of one forward and backward pass through a part of a model."""

    recompute: Recompute
    """Operators that backward recomputes (activation checkpointing)."""
    fresh_gradients: bool
    """Whether the weights have no gradient yet, so that this backward allocates it."""
    saved_on: SavedOn = SavedOn.device
    """Memory of saved tensors; casts of weights are computed again unless it is the device."""
    step_scratch_ratio: float = -1
    """Bytes of optimizer scratch per byte of a weight gradient, with the optimizer step in
    backward; negative: the step is taken later."""


@dataclass(kw_only=True)
class RecordedPart(OpGraph):
    """A part whose memory is measured by a run with fake tensors; its operators give time only."""

    measure: Callable[[BackwardMode], tuple[int, int, int, int]]
    """Function that runs the part. It returns the bytes of the saved tensors, the peaks of forward
    and of backward, and the bytes of the gradients, as in ``PartLiveness``."""


@dataclass(frozen=True)
class ModelOpGraphs:
    """Operator graphs of the parts of a model.

    The first tensor of each graph, except of ``embedding``, is the input of the part.
    """

    embedding: OpGraph
    """Operators before the blocks."""
    first_block: OpGraph
    """First block, which saves less if nothing before it is trained; else ``block``."""
    block: OpGraph
    """Any other block."""
    head: OpGraph
    """Operators after the blocks, with the loss if it is chunked."""
    loss: OpGraph | None
    """Loss; None: part of ``head``."""
    shared_bytes: int
    """Bytes that all blocks read and no block recomputes, such as the rotary table."""
    blocks: tuple[OpGraph, ...] = ()
    """Each block of a model with several stacks, equal ones as the same graph; empty: blocks are
    equal, except for the first one."""

    def equal_layer(self, layer: int) -> int:
        """Return the first layer whose block has the operators and the memory of ``layer``."""
        if not self.blocks:
            return 1 if self.first_block is self.block else min(layer, 1)
        return next(index for index, graph in enumerate(self.blocks) if graph is self.blocks[layer])

    @property
    def distinct_layers(self) -> tuple[int, ...]:
        """First layer of each kind of block; of equal blocks, any but the first one."""
        if not self.blocks:
            return (1,)
        return tuple(dict.fromkeys(map(self.equal_layer, range(len(self.blocks)))))

    def layer_graph(self, layer: int) -> OpGraph:
        """Return the graph of a layer."""
        if self.blocks:
            return self.blocks[layer]
        return self.block if layer else self.first_block


@lazy_dispatch_by("op_graph_implementation")
def build_op_graphs(config: ModelConfig, forward_spec: ForwardSpec) -> ModelOpGraphs:
    """Operator graph of each part of a model, for the planner.

    Raises:
        ConfigError: The analytic memory model does not cover the model.
    """
    raise not_registered(build_op_graphs, config)
