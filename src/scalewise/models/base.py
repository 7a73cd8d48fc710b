"""Interface of model configurations: parameters, FLOPs and shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil, prod
from pathlib import Path
from typing import ClassVar, Self

from scalewise.cached_hash import cache_hash
from scalewise.errors import ConfigIssue


class AttentionFlops(Enum):
    """Convention by which the FLOPs of attention in forward and backward are counted.

    The values are FLOPs per pair of a query and a key and per feature of the query: without, and
    with a causal mask. The matmuls of scores and values take 4 in forward and 8 in backward.
    """

    kernel = (14.0, 14.0)
    """Flash attention recomputes the scores in backward; masked pairs count, as in
    ``torch.utils.flop_counter``."""
    palm = (12.0, 12.0)
    """No recomputation; masked pairs count (Chowdhery et al., 2022, PaLM, appendix B)."""
    causal = (12.0, 6.0)
    """No recomputation; half of the pairs are masked and do not count."""

    def count(self, causal_pairs: float, full_pairs: float = 0.0) -> float:
        """FLOPs of pairs times features, with and without a causal mask."""
        full, causal = self.value
        return causal * causal_pairs + full * full_pairs


@cache_hash
@dataclass(frozen=True)
class Weight:
    """One parameter tensor of a model; a tied weight is listed once."""

    name: str
    """Key of the tensor in the module's ``state_dict``."""
    shape: tuple[int, ...]
    """Unsharded shape."""
    role: str
    """``embedding``, ``position``, ``attention``, ``feedforward``, ``norm``, ``bias``, ``head``,
    ``router``, ``experts`` or ``scale`` (a vector of an adapter)."""
    layer: int | None = None
    """Index of its block; None: outside the blocks."""
    trainable: bool = True
    """Whether the optimizer updates it."""
    element_bytes: int | None = None
    """Bytes per element, for weights with a dtype of their own; None: the dtype of the run."""
    stacked: int = 1
    """Number of matrices that are stacked along dim 0: one per expert."""
    expert_ranks: int = 1
    """Number of the sharding ranks that have parts of a stacked weight of experts; ``shape`` is
    that of one part."""
    width_ratio: float = 1.0
    """Size of its dimensions that grow with the width, relative to the base model of muP."""

    shard_dim: int = 0
    """Dimension that FSDP shards."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def shard_numel(self, ranks: int) -> int:
        """Return the elements that one of ``ranks`` ranks stores."""
        shape = list(self.shape)
        size = shape.pop(self.shard_dim)
        return ceil(size / self.num_shards(ranks)) * prod(shape)

    def num_shards(self, ranks: int) -> int:
        """Return the number of shards of ``shape`` over ``ranks`` ranks."""
        return max(1, ranks // self.expert_ranks)

    def shard_bytes(self, element_bytes: int, ranks: int = 1) -> int:
        """Return the bytes of one shard; ``element_bytes``: that of the run's dtype."""
        return self.shard_numel(ranks) * (self.element_bytes or element_bytes)


class WeightGroup(tuple[Weight, ...]):
    """Weights of one part of a model, with a cached hash: caches look up the same groups often."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        """Return the hash of the weights."""
        return self._hash

    def __reduce__(self) -> tuple[type[WeightGroup], tuple[tuple[Weight, ...]]]:
        """Pickle the weights without their hash, which differs between processes."""
        return WeightGroup, (tuple(self),)


ADAPTER_MARKS = (".lora_", ".ia3_l.", "prompt.weight", ".mix.prefix_")
"""Substrings of the names of weights that adapters add: PEFT's layers, prompt and prefix."""


def is_adapter_weight(name: str) -> bool:
    """Whether a weight is added by an adapter."""
    return any(mark in name for mark in ADAPTER_MARKS)


class TPStyle(StrEnum):
    """Tensor-parallel style of a module (Shoeybi et al. 2019, Megatron-LM, section 3)."""

    column = "column"
    """Column-parallel linear layer: weight and bias sharded by dim 0, output stays sharded."""
    row = "row"
    """Row-parallel linear layer: weight sharded by dim 1, input sharded, output all-reduced.

    A vector that scales sharded features, or prefix keys and values, are sharded alike.
    """
    vocabulary = "vocabulary"
    """Embedding sharded by its vocabulary (dim 0)."""
    head = "head"
    """Output head sharded by its outputs (dim 0), if it is not tied to the embedding."""
    tokens = "tokens"
    """Replicated norm; with sequence parallelism it reads this rank's shard of the tokens."""
    heads = "heads"
    """Replicated norm over the features of one head, which reads the heads of this rank."""
    positions = "positions"
    """Replicated table of positions."""
    prompt = "prompt"
    """Replicated prompt vectors; with sequence parallelism each rank continues with its shard."""
    expert_column = "expert_column"
    """Stacked matrices of experts, each sharded by its rows; output stays sharded."""
    expert_row = "expert_row"
    """Stacked matrices of experts, each sharded by its columns; output stays a partial sum."""
    partial_row = "partial_row"
    """Row-parallel linear layer of shared experts; output stays a partial sum, which is added to
    that of routed experts."""
    router = "router"
    """Replicated router, which reads all tokens; each rank has a partial sum of its gradient."""
    expert_replicated = "expert_replicated"
    """Replicated stacked matrices of experts; each rank has a partial sum of their gradient."""
    partial_replicated = "partial_replicated"
    """Replicated linear layer of a partial sum; output and gradient are partial sums too."""
    replicated = "replicated"
    """Replicated linear layer that every rank applies to all tokens."""


DIM_0_STYLES = (TPStyle.column, TPStyle.vocabulary, TPStyle.head, TPStyle.expert_column)
DIM_1_STYLES = (TPStyle.row, TPStyle.partial_row, TPStyle.expert_row)


@cache_hash
@dataclass(frozen=True)
class StageSlice:
    """Consecutive layers of a model: a pipeline stage, or the full model."""

    layers: range
    """Indices of the blocks."""
    is_first: bool = True
    """Whether the slice includes the embedding."""
    is_last: bool = True
    """Whether the slice includes the final norm and the head."""


def tp_style(weight: Weight, tp_styles: Mapping[str, TPStyle]) -> TPStyle | None:
    """Return the tensor parallel style of a weight's module."""
    module = weight.name.rpartition(".")[0]
    pattern = module if weight.layer is None else module.replace(f".{weight.layer}.", ".*.", 1)
    return tp_styles.get(pattern)


def shard_weight(weight: Weight, tp_styles: Mapping[str, TPStyle], ranks: int) -> Weight:
    """Return the shard of a weight on one tensor-parallel rank."""
    style, shape = tp_style(weight, tp_styles), weight.shape
    shard_dim = int(style is TPStyle.expert_column)  # rows are sharded within each expert
    if style in DIM_0_STYLES:
        shape = (shape[0] // ranks, *shape[1:])
    elif style in DIM_1_STYLES and len(shape) > 1:
        shape = (shape[0], shape[1] // ranks, *shape[2:])
    return replace(weight, shape=shape, shard_dim=shard_dim)


class ModelConfig(ABC):
    """Configuration of a model. Its properties need no torch; ``models.build`` has the builders."""

    vocabulary: int
    """Vocabulary size, in tokens."""
    context: int
    """Longest sequence, in tokens."""
    layers: int
    """Number of blocks."""
    heads: int
    """Number of query heads per block."""
    width: int
    """Width of the residual stream, in features."""
    classes: int | None = None
    """Number of classes of the head; None: one logit per token of the vocabulary."""
    image_size: int = 0
    """Height and width of input images, in pixels; 0: the model reads no images."""
    has_post_norm: bool = False
    """Whether a block normalizes the output of its last linear layer (post-norm)."""
    casts_residual: ClassVar[bool] = False
    """Whether the residual stream is in bf16 if matmuls are, also with fp32 parameters."""
    embeds_all_tokens: ClassVar[bool] = False
    """Whether the first block reads the embeddings of all tokens, of which sequence-parallel ranks
    take their part: masks and positions are computed from the embeddings."""
    implementation: ClassVar[str] = ""
    """Module that registers the builders of ``models.build``."""
    op_graph_implementation: ClassVar[str] = ""
    """Module that registers ``models.op_graph.build_op_graphs``; it needs no torch if its operator
    graphs are computed."""
    imports: tuple[str, ...] = ()
    """Modules that are slow to import, which worker processes import in advance."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return False

    @property
    def num_stacks(self) -> int:
        """Number of stacks of blocks; blocks of different stacks differ."""
        return 1

    @property
    def has_equal_blocks(self) -> bool:
        """Whether all blocks have weights of the same names and shapes."""
        return self.num_stacks == 1

    @property
    def output_size(self) -> int:
        """Number of logits per token."""
        return self.classes or self.vocabulary

    @property
    def pretrained_path(self) -> str | None:
        """Path or Hub name of the pretrained weights; None: random initialization."""
        return None

    def find_tokenizer_file(self) -> Path | None:
        """Return the tokenizer.json next to the pretrained weights, or None."""
        return None

    def has_key(self, name: str) -> bool:
        """Return whether the option group of the model has a key ``name``."""
        return name in getattr(type(self), "__dataclass_fields__", ())

    @property
    @abstractmethod
    def key_heads(self) -> int:
        """Number of key (and value) heads per block."""

    @property
    @abstractmethod
    def query_width(self) -> int:
        """Features of all query heads of one token."""

    @property
    @abstractmethod
    def kv_width(self) -> int:
        """Features of all key heads of one token."""

    @abstractmethod
    def weight_census(self) -> tuple[Weight, ...]:
        """Return every parameter once, in the order of ``module.named_parameters()``."""

    @abstractmethod
    def flops(
        self, sequence: int, target: int = 0, attention: AttentionFlops = AttentionFlops.kernel
    ) -> float:
        """Return the FLOPs of one forward and backward pass, per token of a sequence.

        A multiply-add counts as two FLOPs.

        Args:
            sequence: Sequence length, in tokens.
            target: Target tokens at the end of the sequence; an encoder-decoder model encodes the
                tokens before them.
            attention: Convention by which attention is counted.
        """

    def token_fraction(self, name: str, sequence: int, target: int) -> float:
        """Return the fraction of the tokens that a matrix is applied to; other names: the head."""
        return 1.0

    def skipped_backward_flops(
        self, trained_names: Collection[str], sequence: int, attention: AttentionFlops
    ) -> float:
        """Return the backward FLOPs per token that autograd skips below all ``trained_names``.

        FLOPs of the weight gradients of frozen matrices in blocks are not included.
        """
        return 0.0

    @abstractmethod
    def tensor_parallel_styles(self) -> dict[str, TPStyle]:
        """Return the TP style of each module with weights, by name; ``*`` matches every layer."""

    @property
    @abstractmethod
    def lora_targets(self) -> tuple[str, ...]:
        """Linear layers of a block that LoRA adapts by default."""

    @property
    @abstractmethod
    def ia3_targets(self) -> tuple[str, ...]:
        """Linear layers of a block that IA3 scales by default."""

    @abstractmethod
    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the sizes that the tensor-parallel degree must divide, by field."""

    @property
    def tied_weights(self) -> frozenset[str]:
        """Names of the weights that the embedding and the head share."""
        return frozenset()

    @property
    def end_modules(self) -> tuple[str, ...]:
        """Names of the token embedding and of the head, which FSDP shards by themselves.

        Empty if they share a weight, or if the model has blocks of several kinds.
        """
        return ()

    def split_stages(self, count: int, sequence: int) -> tuple[StageSlice, ...]:
        """Return pipeline stages that minimize the FLOPs of the most expensive stage.

        The last stage has the head; the other stages divide the remaining layers evenly.
        """
        head_flops = 6.0 * self.output_size * self.width
        head_layers = head_flops / ((self.flops(sequence) - head_flops) / self.layers)

        def max_stage_cost(last: int) -> float:
            return max(ceil((self.layers - last) / max(count - 1, 1)), last + head_layers)

        last = (
            min(range(self.layers - count + 1, 0, -1), key=max_stage_cost)
            if count > 1
            else self.layers
        )
        base, remainder = divmod(self.layers - last, max(count - 1, 1))
        sizes = [base + (stage < remainder) for stage in range(count - 1)] + [last]
        bounds = list(accumulate(sizes, initial=0))
        return tuple(
            StageSlice(range(start, end), start == 0, end == self.layers)
            for start, end in pairwise(bounds)
        )

    @abstractmethod
    def with_layers(self, layers: int) -> Self:
        """Return the same configuration with another number of layers."""

    def shrink(self, layers: int, width: int | None) -> Self:
        """Return a small copy of the architecture with random weights and without dropout.

        Args:
            layers: Largest number of layers of a stack.
            width: Largest width of the residual stream, in features; None: as configured. Models
                whose width is not an option keep it.
        """
        return self.with_layers(min(layers, self.layers))

    @abstractmethod
    def validate(self) -> Iterator[ConfigIssue]:
        """Yield config issues of the model itself."""

    @property
    def expert_layers(self) -> tuple[str, ...]:
        """Names, within a block, of the matrices of routed experts that LoRA can adapt: none."""
        return ()

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(weight.numel for weight in self.weight_census())

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token is computed with: all, unless there are experts."""
        return self.num_parameters
