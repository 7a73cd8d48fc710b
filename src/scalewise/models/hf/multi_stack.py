"""A model of transformers with several stacks of blocks, where layouts look for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from scalewise.models.hf.causal_lm import CausalLMModule


class MultiStackModule(CausalLMModule):
    """``head`` is the whole model but its ``blocks``, those of all stacks one after the other.

    ``stacks`` are transformers' names of the lists of these, with how many each has;
    ``stack_starts`` the places of the first block of each.
    """

    def __init__(self, model: PreTrainedModel, stacks: Mapping[str, int]) -> None:
        nn.Module.__init__(self)
        self.stacks, self.transposed_weights = dict(stacks), frozenset[str]()
        self.stack_starts = tuple(accumulate(stacks.values(), initial=0))[:-1]
        self.layer_order: list[str] = []
        found: list[nn.Module] = []
        for name in stacks:
            holder, _, key = name.rpartition(".")
            found += cast(nn.ModuleList, model.get_submodule(holder)._modules.pop(key))
        self.blocks = nn.ModuleDict({str(at): block for at, block in enumerate(found)})
        self.num_layers = len(found)
        self.head = model
        self.set_layers(found)
        self.original_buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def set_layers(self, blocks: list[nn.Module]) -> None:
        """Goes through other blocks; names of weights stay with those that it was made of."""
        ends = pairwise((*self.stack_starts, len(blocks)))
        for name, (start, end) in zip(self.stacks, ends, strict=True):
            holder, _, key = name.rpartition(".")
            setattr(self.head.get_submodule(holder), key, blocks[start:end])

    def hf_name(self, name: str) -> str:
        """Returns transformers' name of a weight."""
        room, _, rest = name.partition(".")
        if room != "blocks":
            return rest
        at, _, rest = rest.partition(".")
        stack = bisect_right(self.stack_starts, int(at)) - 1
        return f"{[*self.stacks][stack]}.{int(at) - self.stack_starts[stack]}.{rest}"
