"""Torch module of a Hugging Face causal language model, with the interface of ``ModelModule``.

Shape suffixes: B batch, T tokens of a sequence, S tokens of the full sequence, W width, V
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from scalewise.compat.hugging_face import replaced_mask_checks
from scalewise.compat.torch import ModuleWithApplyHook, unset_fake_temporarily
from scalewise.models.base_module import ModelModule


class CausalLMModule(ModuleWithApplyHook, ModelModule):
    """Causal language model: ``tokens_BT -> logits_BTV``, computed by transformers' code.

    Submodules: ``blocks`` are the transformer blocks, ``body`` the module that runs them, and
    ``head`` the full model with a :class:`PassThrough` in the place of the body.

    Args:
        hf_model: Model of transformers, which the module takes over.
        body_name: transformers' name of the body.
        blocks_name: Name of the list of blocks in the body.
        transposed_weights: transformers' names of weights stored as (in, out).

    Attributes:
        num_layers: Number of blocks of the full model.
        layer_order: Layers with weights of a block in execution order, set by a probe forward pass.
        expert_fractions: Fraction of the experts that process one token, by name of the module
            with the weights of the experts, set by the probe too.
        returns_tuples: Whether blocks return a sequence whose first element is the output.
        original_buffers: Buffers as transformers builds them, by name.
    """

    embeds_all_tokens = True

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
        self.expert_fractions: dict[str, float] = {}
        self.returns_tuples = False
        self.body = hf_model.get_submodule(body_name)
        blocks = cast(nn.ModuleList, getattr(self.body, blocks_name))
        delattr(self.body, blocks_name)
        self.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.num_layers = len(blocks)
        # A list is not registered, so that each parameter has one name.
        setattr(self.body, blocks_name, [*blocks])
        owner, _, name = body_name.rpartition(".")
        setattr(hf_model.get_submodule(owner), name, PassThrough())
        self.head = hf_model
        self.original_buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def layers(self) -> list[nn.Module]:
        """Return the blocks, in order."""
        return list(self.blocks.values())

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the head, and the embedding if it is tied."""
        yield from self.head.parameters()
        for part in self.head.modules():
            if isinstance(part, TiedLinearHead):
                yield cast(nn.Parameter, part.embedding[0].weight)

    def find_input_embedding(self) -> nn.Module:
        """Return the token embedding."""
        embedding: nn.Module = self.body.get_input_embeddings()  # type: ignore[operator]  # transformers' own
        return embedding

    def set_layers(self, blocks: list[nn.Module]) -> None:
        """Run other blocks; names of parameters stay those of the original blocks."""
        setattr(self.body, self.blocks_name, blocks)

    def replace_attention(self, make: Callable[[float], nn.Module]) -> None:
        """Raise ``NotImplementedError``: transformers implements attention."""
        raise NotImplementedError

    def add_prompt_tokens(self, tokens: int) -> None:
        """Raise ``NotImplementedError``: transformers implements the embedding."""
        raise NotImplementedError

    def add_prefix_kv(self, tokens: int) -> None:
        """Raise ``NotImplementedError``: transformers implements attention."""
        raise NotImplementedError

    def set_position_ids(self, positions_T: Tensor) -> None:
        """Do nothing: sequences are not sharded, and transformers computes the positions."""

    def forward(
        self, x: Tensor, labels_BT: Tensor | None = None, positions_BS: Tensor | None = None
    ) -> Tensor:
        """Return ``logits_BTV`` of ``tokens_BT``, or their loss."""
        inputs = {"input_ids": x}
        if positions_BS is not None:
            inputs["position_ids"] = positions_BS.to(x.device, non_blocking=True)
        find_packed = _no_packed_texts if positions_BS is None else _packed_text_numbers
        with replaced_mask_checks(find_packed=find_packed):
            x_BTW = self.body(**inputs, use_cache=False).last_hidden_state
        if self.loss is None or labels_BT is None:
            return self.logits(x_BTW)
        return self.loss(self.logits, self.gather_tokens(x_BTW), labels_BT)

    def logits(self, x_BTW: Tensor, *, hooks: bool = True) -> Tensor:
        """Return ``logits_BTV`` of the body's output."""
        head: Callable[..., Any] = self.head if hooks else self.head.forward
        return cast(Tensor, head(inputs_embeds=x_BTW, use_cache=False).logits)

    def hf_name(self, name: str) -> str:
        """Return transformers' name of a parameter."""
        child, _, rest = name.partition(".")
        body = f"{self.body_name}."
        return {"blocks": f"{body}{self.blocks_name}.", "body": body}.get(child, "") + rest

    def after_apply(self) -> None:
        """Restore values and dtypes of buffers, which no checkpoint has.

        Rotary frequencies in bf16 are too imprecise for long sequences.
        """
        for name, constant in self.original_buffers.items():
            module_name, _, key = name.rpartition(".")
            owner = self.get_submodule(module_name)
            device = owner.get_buffer(key).device
            if device.type != "meta":
                setattr(owner, key, constant.to(device))


def _no_packed_texts(position_ids: Tensor) -> None:
    """Skip the search for packed sequences, which synchronizes with the device."""


def _packed_text_numbers(position_ids_BS: Tensor) -> Tensor:
    """Number of each token's text, by which transformers masks other texts.

    transformers' own function synchronizes with the device to find out whether there are several.
    """
    return (position_ids_BS == 0).cumsum(-1)


@unset_fake_temporarily()  # a trace may read the facts first
def packs_texts(module: CausalLMModule) -> bool:
    """Whether the body of a model builds its mask from position ids, by which texts are separated.

    Only such masks are searched for packed texts. The blocks are left out: all of them consist of
    matrices and attention.
    """
    probe = copy.deepcopy(module).to("meta")
    probe.set_layers([])
    searched: list[Tensor] = []
    tokens = torch.zeros((1, 2), dtype=torch.long, device="meta")
    try:
        with replaced_mask_checks(find_packed=searched.append):
            probe.body(input_ids=tokens, position_ids=tokens, use_cache=False)
    except Exception:  # the code of a model may raise anything
        return False
    return bool(searched)


@dataclass
class BodyOutput(BaseModelOutputWithPastAndCrossAttentions):
    """Output of a body: the features; heads of models with experts also read ``router_logits``."""

    router_logits: tuple[torch.FloatTensor, ...] | None = None


class PassThrough(nn.Module):
    """Stand-in for the body, which returns its input features."""

    def forward(
        self, input_ids: Tensor | None = None, *, inputs_embeds: Tensor, **_: Any
    ) -> BodyOutput:
        """Return the features as an output of the body."""
        return BodyOutput(last_hidden_state=cast(Any, inputs_embeds))


class TiedLinearHead(nn.Module):
    """Linear head that uses the embedding's weight, which is registered in the embedding only."""

    def __init__(self, embedding: nn.Module, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.embedding = (embedding,)  # a tuple is not registered as a submodule
        self.bias = bias

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return ``logits_BTV``."""
        return F.linear(x_BTW, cast(Tensor, self.embedding[0].weight), self.bias)


def conv1d_as_linear(layer: nn.Module) -> nn.Linear:
    """Return a linear layer on the meta device for a ``Conv1D``, whose weight is transposed."""
    in_features, out_features = cast(Tensor, layer.weight).shape
    with torch.device("meta"):
        return nn.Linear(in_features, out_features)
