"""A causal language model of transformers alive, its blocks where layouts look for them.

Shape suffixes: B rows, T tokens of a row, S on all, W width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from scalewise.models.base_module import ModelModule


class CausalLMModule(ModelModule):
    """``tokens_BT -> logits_BTV``, both by transformers' own code.

    ``body`` is the module that goes through the ``blocks``, whose weights have their names from
    these; ``head`` is the whole model with a stand-in for the body. ``num_layers`` are the blocks
    of the whole. ``layer_order`` are the layers with
    weights of a block, as a trial ran them. ``body_name`` is transformers' name
    of the body, ``blocks_name`` that of the blocks in it; ``transposed_weights`` are its matrices
    (in, out).
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        body_name: str,
        blocks_name: str,
        transposed_weights: frozenset[str],
    ) -> None:
        super().__init__()
        self.body_name, self.blocks_name, self.transposed_weights = (
            body_name,
            blocks_name,
            transposed_weights,
        )
        self.layer_order: list[str] = []
        self.body = hf_model.get_submodule(body_name)
        blocks = cast(nn.ModuleList, self.body._modules.pop(blocks_name))
        self.blocks = nn.ModuleDict({str(at): block for at, block in enumerate(blocks)})
        self.num_layers = len(blocks)
        setattr(self.body, blocks_name, [*blocks])  # a list registers nothing: names are given once
        holder, _, name = body_name.rpartition(".")
        setattr(hf_model.get_submodule(holder), name, PassThrough())
        self.head = hf_model
        self.original_buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def layers(self) -> list[nn.Module]:
        """Returns the blocks, in order."""
        return list(self.blocks.values())

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the head's own, and the embedding's if it reads that."""
        yield from self.head.parameters()
        for part in self.head.modules():
            if isinstance(part, TiedLinearHead):
                yield cast(nn.Parameter, part.embedding[0].weight)

    def find_input_embedding(self) -> nn.Module:
        """Returns what embeds tokens."""
        found: nn.Module = self.body.get_input_embeddings()  # type: ignore[operator]  # transformers' own
        return found

    def set_layers(self, blocks: list[nn.Module]) -> None:
        """Goes through other blocks; names of weights stay with those that it was made of."""
        setattr(self.body, self.blocks_name, blocks)

    def replace_attention(self, make: Callable[[float], nn.Module]) -> None:
        """Raises ``NotImplementedError``: attention is transformers' own."""
        raise NotImplementedError

    def add_prompt_tokens(self, tokens: int) -> None:
        """Raises ``NotImplementedError``: what is embedded is transformers' own."""
        raise NotImplementedError

    def add_prefix_kv(self, tokens: int) -> None:
        """Raises ``NotImplementedError``: attention is transformers' own."""
        raise NotImplementedError

    def set_position_ids(self, places_T: Tensor) -> None:
        """Does nothing: a row is whole, and its tokens are counted by transformers."""

    def forward(
        self, x: Tensor, labels_BT: Tensor | None = None, places_BS: Tensor | None = None
    ) -> Tensor:
        """Returns ``logits_BTV`` of ``tokens_BT``, or their loss."""
        assert places_BS is None, "packed rows are refused"
        with patch.object(masking_utils, "find_packed_sequence_indices", _without_packing_check):
            x_BTW = self.body(input_ids=x, use_cache=False).last_hidden_state
        if self.loss is None or labels_BT is None:
            return self.logits(x_BTW)
        return self.loss(self.logits, x_BTW, labels_BT)

    def logits(self, x_BTW: Tensor) -> Tensor:
        """Returns ``logits_BTV`` from what the body gives."""
        return cast(Tensor, self.head(inputs_embeds=x_BTW, use_cache=False).logits)

    def hf_name(self, name: str) -> str:
        """Returns transformers' name of a weight."""
        room, _, rest = name.partition(".")
        body = f"{self.body_name}."
        return {"blocks": f"{body}{self.blocks_name}.", "body": body}.get(room, "") + rest

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the module; buffers keep their numbers and formats, which no checkpoint holds.

        Rotations of many tokens cannot be made of frequencies in bf16.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch lacks the annotation
        for name, constant in self.original_buffers.items():
            holder, _, key = name.rpartition(".")
            owner = self.get_submodule(holder)
            there = owner.get_buffer(key).device
            if there.type != "meta":
                setattr(owner, key, constant.to(there))
        return self


def _without_packing_check(position_ids: Tensor) -> None:
    """Says that rows hold one text each: transformers would wait for the device to see so."""


class PassThrough(nn.Module):
    """Stands where the body was, and gives back what it is given."""

    def forward(
        self, input_ids: Tensor | None = None, *, inputs_embeds: Tensor, **_: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Returns the features as the body's result."""
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=cast(Any, inputs_embeds))


class TiedLinearHead(nn.Module):
    """A linear head whose matrix is the embedding's, which alone holds it."""

    def __init__(self, embedding: nn.Module, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.embedding = (embedding,)  # a tuple registers nothing
        self.bias = bias

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Returns ``logits_BTV``."""
        return F.linear(x_BTW, cast(Tensor, self.embedding[0].weight), self.bias)


def conv1d_as_linear(layer: nn.Module) -> nn.Linear:
    """Returns a linear layer without memory for a ``Conv1D``, which holds its matrix transposed."""
    into, out = cast(Tensor, layer.weight).shape
    with torch.device("meta"):
        return nn.Linear(into, out)
