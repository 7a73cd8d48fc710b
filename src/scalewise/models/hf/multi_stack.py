"""Base of Hugging Face modules with several stacks of blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from scalewise.models.hf.causal_lm import CausalLMModule


class MultiStackModule(CausalLMModule):
    """Model with several stacks: ``head`` is the full model without its ``blocks``.

    ``blocks`` are those of all stacks, one stack after the other.

    Args:
        model: Model of transformers, which the module takes over.
        stacks: Number of blocks of each stack, by transformers' name of the list.

    Attributes:
        stack_starts: Index of the first block of each stack.
    """

    def __init__(self, model: PreTrainedModel, stacks: Mapping[str, int]) -> None:
        nn.Module.__init__(self)
        self.stacks, self.transposed_weights = dict(stacks), frozenset[str]()
        self.stack_starts = tuple(accumulate(stacks.values(), initial=0))[:-1]
        self.layer_order: list[str] = []
        blocks: list[nn.Module] = []
        for name in stacks:
            owner, _, key = name.rpartition(".")
            blocks += cast(nn.ModuleList, model.get_submodule(owner)._modules.pop(key))
        self.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.num_layers = len(blocks)
        self.head = model
        self.set_layers(blocks)
        self.original_buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def set_layers(self, blocks: list[nn.Module]) -> None:
        """Run other blocks; names of parameters stay those of the original blocks."""
        bounds = pairwise((*self.stack_starts, len(blocks)))
        for name, (start, end) in zip(self.stacks, bounds, strict=True):
            owner, _, key = name.rpartition(".")
            setattr(self.head.get_submodule(owner), key, blocks[start:end])

    def hf_name(self, name: str) -> str:
        """Return transformers' name of a parameter."""
        child, _, rest = name.partition(".")
        if child != "blocks":
            return rest
        index, _, rest = rest.partition(".")
        stack = bisect_right(self.stack_starts, int(index)) - 1
        return f"{[*self.stacks][stack]}.{int(index) - self.stack_starts[stack]}.{rest}"
