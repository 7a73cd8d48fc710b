"""Text classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.objectives.causal_lm import CausalLM
from scalewise.registry import register_option

if TYPE_CHECKING:
    from torch import Tensor


@register_option("objective", "classification")
@dataclass(frozen=True)
class Classification(CausalLM):
    """Classification of a text from its last token: cross-entropy, in nats.

    Only the head differs from a language model: it has one output per class, as in transformers'
    ``...ForSequenceClassification``.
    """

    extra_metrics = ("accuracy",)
    is_scalar = False

    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Summed cross-entropy and number of correct predictions, a vector."""
        import torch

        num_correct = (logits_BTV.detach().argmax(-1) == labels_BT).sum()
        return torch.stack([super().sum_over_tokens(logits_BTV, labels_BT), num_correct])
