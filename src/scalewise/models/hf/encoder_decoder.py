"""An encoder with a decoder of transformers alive, the blocks of both where layouts look for them.

Shape suffixes: B rows, S tokens of a question, T of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from unittest.mock import patch

from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from scalewise.models.hf.causal_lm import TiedLinearHead
from scalewise.models.hf.multi_stack import MultiStackModule


class EncoderDecoderModule(MultiStackModule):
    """``inputs_BS, labels_BT -> logits_BTV``, by transformers' own code.

    Inputs below zero are no tokens: nothing attends to them. The encoder is the first stack.
    ``source_layers`` are the layers of the decoder that read the question.
    """

    def __init__(self, model: PreTrainedModel, stacks: Mapping[str, int]) -> None:
        super().__init__(model, stacks)
        self.source_layers: set[str] = set()

    def find_input_embedding(self) -> nn.Module:
        """Returns what embeds tokens, of questions and of answers."""
        return self.head.get_input_embeddings()

    def forward(
        self, x: Tensor, labels_BT: Tensor | None = None, places_BS: Tensor | None = None
    ) -> Tensor:
        """Returns ``logits_BTV`` of an answer, which the decoder reads one place on."""
        assert labels_BT is not None, "a decoder writes an answer"
        assert places_BS is None, "packed rows are refused"
        model = cast(Any, self.head)
        with patch.multiple(masking_utils, **MASKS):
            logits: Tensor = model(
                input_ids=x.clamp(min=0),
                attention_mask=x >= 0,
                decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels=labels_BT),
                use_cache=False,
            ).logits
        return logits if self.loss is None else self.loss(lambda each: each, logits, labels_BT)


_ignore_causal = masking_utils._ignore_causal_mask_sdpa


def _with_padding_mask(*_: Any) -> bool:
    """Says that some of what an encoder reads are no tokens."""
    return False


def _with_causal_mask(mask: object, *given: Any) -> bool:
    """Says the same of a decoder as if nothing were hidden but what comes later."""
    return _ignore_causal(None, *given)


MASKS: dict[str, Any] = {
    "_ignore_bidirectional_mask_sdpa": _with_padding_mask,
    "_ignore_causal_mask_sdpa": _with_causal_mask,
}
"""What is known here: transformers would wait for the device to see so."""


def _with_both_masks(model: Any) -> tuple[nn.Module, nn.Module]:
    return model.get_encoder(), model.get_decoder()


def find_stacks(model: PreTrainedModel) -> dict[str, int]:
    """Returns the names of the lists of blocks, the encoder's first, and how many each has.

    Raises ``ValueError`` where an encoder or a decoder has not one list of blocks of one kind.
    """
    kinds, found = {*(model._no_split_modules or ())}, dict[str, int]()
    for stack in _with_both_masks(model):
        lists = [
            (name, len(held))
            for name, held in model.named_modules()
            if any(held is child for child in stack.children())
            and isinstance(held, nn.ModuleList)
            and {type(block).__name__ for block in held} <= kinds
        ]
        if len(lists) != 1:
            raise ValueError(f"{type(stack).__name__} has no list of blocks of one kind")
        found |= dict(lists)
    return found


def tie_embeddings(model: PreTrainedModel) -> None:
    """Leaves the matrix that both stacks embed by to one module, and the head's if it is tied.

    Raises ``ValueError`` where they have several.
    """
    shared = model.get_input_embeddings()
    for stack in _with_both_masks(model):
        for name, child in [*stack.named_children()]:
            if getattr(child, "weight", None) is not shared.weight:
                continue
            if type(child) is not type(shared):
                raise ValueError(f"{type(stack).__name__} embeds in a way of its own ({name})")
            del stack._modules[name]
            stack.__dict__[name] = shared  # what is no child is named once
    own = cast(Any, model).get_output_embeddings()
    if own.weight is shared.weight:
        name = next(name for name, layer in model.named_modules() if layer is own)
        holder, _, key = name.rpartition(".")
        setattr(model.get_submodule(holder), key, TiedLinearHead(shared, own.bias))
