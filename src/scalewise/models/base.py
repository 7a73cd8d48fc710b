"""What every model answers: its weights, its flops, and the real module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from scalewise.errors import ConfigIssue
from scalewise.models.op_graph import ForwardSpec, ModelOpGraphs

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.base_module import ModelModule
    from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class Weight:
    """One parameter tensor of a model.

    ``name`` is its name in the module's ``state_dict``; ``role`` one of ``embedding``,
    ``position``, ``attention``, ``feedforward``, ``norm``, ``bias``, ``head``, ``scale`` (an
    adapter's vector); ``layer`` the block it belongs to, None outside the blocks. A tied weight is
    listed once. ``element_bytes`` are those of an element that has a format of its own; None: the
    run's.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int | None = None
    trainable: bool = True
    element_bytes: int | None = None

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return prod(self.shape)

    def shard_numel(self, ranks: int) -> int:
        """Returns the elements that one of ``ranks`` holds of a weight cut by its rows."""
        return ceil(self.shape[0] / ranks) * prod(self.shape[1:])

    def shard_bytes(self, element_bytes: int, ranks: int = 1) -> int:
        """Returns the bytes of that share; ``element_bytes``: of an element in the run's format."""
        return self.shard_numel(ranks) * (self.element_bytes or element_bytes)


class TPStyle(StrEnum):
    """How tensor parallelism cuts a module (Shoeybi et al. 2019, Megatron-LM, section 3)."""

    column = "column"
    """A linear layer by its outputs: dim 0 of weight and bias; outputs stay cut."""
    row = "row"
    """A linear layer by its inputs, which arrive cut: dim 1 of the weight; outputs are summed.

    What scales features that arrive cut, or stands before them, is cut alike.
    """
    vocabulary = "vocabulary"
    """An embedding by its rows."""
    head = "head"
    """The matrix that gives logits by its rows, if it has one of its own: dim 0."""
    tokens = "tokens"
    """A norm, whole on every rank: sequence parallelism gives it some of the tokens."""
    positions = "places"
    """A table of positions, whole on every rank."""
    prompt = "ahead"
    """Vectors before the tokens of rows, whole on every rank: each goes on with some of both."""
    replicated = "whole"
    """A linear layer that every rank has and computes with all of the tokens."""


@dataclass(frozen=True)
class StageSlice:
    """Some consecutive layers, with what stands before the first and after the last of all."""

    layers: range
    is_first: bool = True
    is_last: bool = True


class ModelConfig(ABC):
    """A model as a spec: pure questions first, ``build`` for the living module."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    classes: int | None = None
    """What the head tells apart; None: the tokens of the vocabulary."""
    image_size: int = 0
    """The side of the pictures that it reads, pixels; 0: none."""
    normed_after: bool = False
    """Whether a block norms what its last linear layer gives."""
    imports: tuple[str, ...] = ()
    """Modules that its ranks import and that take long, as those of an adapter."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Returns whether an encoder reads what its decoder answers."""
        return False

    @property
    def output_size(self) -> int:
        """Returns the logits of a token."""
        return self.classes or self.vocabulary

    @property
    def pretrained_path(self) -> str | None:
        """Returns where the weights lie that it begins with; None: fresh ones."""
        return None

    def find_tokenizer_file(self) -> Path | None:
        """Returns the tokenizer.json beside these weights; None where there is none."""
        return None

    def has_key(self, name: str) -> bool:
        """Returns whether its group has a key of that name."""
        return name in getattr(type(self), "__dataclass_fields__", ())

    @property
    @abstractmethod
    def key_heads(self) -> int:
        """Returns the key (and value) heads per block."""

    @property
    @abstractmethod
    def query_width(self) -> int:
        """Returns the features of all queries of one token."""

    @property
    @abstractmethod
    def kv_width(self) -> int:
        """Returns the features of all keys of one token."""

    @abstractmethod
    def weight_census(self) -> tuple[Weight, ...]:
        """Returns every trainable tensor once, in the order of the module's parameters."""

    @abstractmethod
    def flops(self, sequence: int, target: int = 0) -> float:
        """Returns the flops of one forward and backward pass, per token of a sequence.

        A multiply and an add are two flops. ``sequence`` is the tokens of one row, of which a
        decoder writes the last ``target`` where there is an encoder to read the others.
        """

    def token_fraction(self, name: str, sequence: int, target: int) -> float:
        """Returns the share of a row's tokens that a matrix multiplies, the head by any name."""
        return 1.0

    def skipped_backward_flops(self, trained_names: Collection[str], sequence: int) -> float:
        """Returns the flops per token of backward where it does not come: before all
        ``trained_names``.

        Gradients of the frozen matrices of blocks are left out.
        """
        return 0.0

    @abstractmethod
    def build_op_graphs(self, forward_spec: ForwardSpec) -> ModelOpGraphs:
        """Returns the operators that a pass runs, part by part."""

    @abstractmethod
    def tensor_parallel_styles(self) -> dict[str, TPStyle]:
        """Returns how each module with weights is cut, by name; ``*`` stands for every layer."""

    @property
    @abstractmethod
    def lora_targets(self) -> tuple[str, ...]:
        """Returns the linear layers of a block that low-rank adapters change by default."""

    @property
    @abstractmethod
    def ia3_targets(self) -> tuple[str, ...]:
        """Returns the linear layers of a block that learnt scales change by default."""

    @abstractmethod
    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Returns the sizes that tensor parallelism divides, by field."""

    @property
    def tied_weights(self) -> frozenset[str]:
        """Returns the weights that both the first and the last layer use."""
        return frozenset()

    def split_stages(self, count: int, sequence: int) -> tuple[StageSlice, ...]:
        """Returns parts of which the costliest is as cheap as can be; the last has the head.

        The others share the layers evenly that the last leaves them.
        """
        head = 6.0 * self.output_size * self.width
        worth = head / ((self.flops(sequence) - head) / self.layers)  # of the head, in layers

        def costliest(last: int) -> float:
            return max(ceil((self.layers - last) / max(count - 1, 1)), last + worth)

        last = (
            min(range(self.layers - count + 1, 0, -1), key=costliest) if count > 1 else self.layers
        )
        each, more = divmod(self.layers - last, max(count - 1, 1))
        sizes = [each + (place < more) for place in range(count - 1)] + [last]
        ends = list(accumulate(sizes, initial=0))
        return tuple(
            StageSlice(range(start, end), start == 0, end == self.layers)
            for start, end in pairwise(ends)
        )

    @abstractmethod
    def with_layers(self, layers: int) -> Self:
        """Returns the same model with as many layers."""

    @abstractmethod
    def validate(self) -> Iterator[ConfigIssue]:
        """Yields what is contradictory inside this spec."""

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what of a run a sound model does not go with."""
        yield from ()

    @abstractmethod
    def build_meta(self, stage: StageSlice) -> ModelModule:
        """Returns the module on the meta device, or a part of it; names are those of the whole.

        The whole is ``tokens_BT -> logits_BTV`` (B rows, T tokens, V vocabulary); a part that is
        not first reads, and one that is not last gives, ``x_BTW`` (W features).
        """

    @abstractmethod
    def init_weights(self, module: ModelModule, seed: int) -> None:
        """Gives a materialized module, sharded or not, the weights that a run starts with."""

    def build(self, seed: int) -> ModelModule:
        """Returns the whole module on torch's default device, with its weights.

        Under ``torch.device("meta")`` only shapes are made.
        """
        import torch

        device = torch.get_default_device()
        module = self.build_meta(StageSlice(range(self.layers)))
        if device.type != "meta":
            module.to_empty(device=device)
            self.init_weights(module, seed)
        return module

    @abstractmethod
    def export(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Writes a folder that transformers loads from whole tensors, in their dtype.

        Raises ``ConfigError`` where it has no such model, before anything is written.
        """

    @property
    def num_parameters(self) -> int:
        """Returns the number of parameters."""
        return sum(weight.numel for weight in self.weight_census())
