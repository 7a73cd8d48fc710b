"""Torch module of Hugging Face models with several stacks of blocks: encoder-decoder models.

Shape suffixes: B batch, S source tokens, T target tokens, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from scalewise.compat.hugging_face import (
    block_class_names,
    causal_mask_check,
    replaced_mask_checks,
)
from scalewise.models.hf.causal_lm import CausalLMModule, TiedLinearHead


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
        self.expert_fractions: dict[str, float] = {}
        self.returns_tuples = False
        blocks: list[nn.Module] = []
        for name in stacks:
            stack, _, key = name.rpartition(".")
            blocks += cast(nn.ModuleList, model.get_submodule(name))
            delattr(model.get_submodule(stack), key)
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


class EncoderDecoderModule(MultiStackModule):
    """Encoder-decoder model: ``inputs_BS, labels_BT -> logits_BTV``, computed by transformers.

    Negative inputs are padding, which is masked. The encoder is the first stack.

    Attributes:
        source_layers: Layers that are applied to the source tokens, by name.
    """

    def __init__(self, model: PreTrainedModel, stacks: Mapping[str, int]) -> None:
        super().__init__(model, stacks)
        self.source_layers: set[str] = set()

    def find_input_embedding(self) -> nn.Module:
        """Return the token embedding of encoder and decoder."""
        return self.head.get_input_embeddings()

    def forward(
        self, x: Tensor, labels_BT: Tensor | None = None, positions_BS: Tensor | None = None
    ) -> Tensor:
        """Return ``logits_BTV`` of the labels; the decoder reads them shifted by one position."""
        assert labels_BT is not None, "labels are required"
        assert positions_BS is None, "sequence packing is not supported"
        model = cast(Any, self.head)
        with replaced_mask_checks(**MASKS):
            logits: Tensor = model(
                input_ids=x.clamp(min=0),
                attention_mask=x >= 0,
                decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels=labels_BT),
                use_cache=False,
            ).logits
        return logits if self.loss is None else self.loss(lambda x: x, logits, labels_BT)


_ignore_causal = causal_mask_check()


def _keep_padding_mask(*_: Any) -> bool:
    """Keep the mask of the encoder, whose inputs may contain padding."""
    return False


def _ignore_unpadded_mask(mask: object, *args: Any) -> bool:
    """Ignore the mask of the decoder as if only the causal mask applied."""
    return _ignore_causal(None, *args)


MASKS: dict[str, Any] = {
    "ignore_bidirectional": _keep_padding_mask,
    "ignore_causal": _ignore_unpadded_mask,
}
"""Replacements of transformers' mask checks, which would synchronize with the device."""


def _encoder_and_decoder(model: Any) -> tuple[nn.Module, nn.Module]:
    return model.get_encoder(), model.get_decoder()


def find_stacks(model: PreTrainedModel) -> dict[str, int]:
    """Return the number of blocks of each stack, by name of the list; the encoder is first.

    Raises:
        ValueError: The encoder or the decoder has no single list of blocks of one class.
    """
    block_classes, stacks = block_class_names(model), dict[str, int]()
    for stack in _encoder_and_decoder(model):
        lists = [
            (name, len(module))
            for name, module in model.named_modules()
            if any(module is child for child in stack.children())
            and isinstance(module, nn.ModuleList)
            and {type(block).__name__ for block in module} <= block_classes
        ]
        if len(lists) != 1:
            raise ValueError(f"{type(stack).__name__} has no single list of blocks of one class")
        stacks |= dict(lists)
    return stacks


def tie_embeddings(model: PreTrainedModel) -> None:
    """Share one embedding module between both stacks, and with the head if it is tied.

    Raises:
        ValueError: A stack has an embedding of another class.
    """
    shared = model.get_input_embeddings()
    for stack in _encoder_and_decoder(model):
        for name, child in [*stack.named_children()]:
            if getattr(child, "weight", None) is not shared.weight:
                continue
            if type(child) is not type(shared):
                raise ValueError(
                    f"{type(stack).__name__} has an embedding of another class ({name})"
                )
            delattr(stack, name)
            stack.__dict__[name] = shared  # not registered, so that each parameter has one name
    head = cast(Any, model).get_output_embeddings()
    if head.weight is shared.weight:
        name = next(name for name, layer in model.named_modules() if layer is head)
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, TiedLinearHead(shared, head.bias))
