"""Text classification."""

from __future__ import annotations

from dataclasses import dataclass

from scalewise.objectives.causal_lm import CausalLM
from scalewise.registry import register_option


@register_option("objective", "classification")
@dataclass(frozen=True)
class Classification(CausalLM):
    """Classification of a text from its last token: cross-entropy, in nats.

    Only the head differs from a language model: it has one output per class, as in transformers'
    ``...ForSequenceClassification``.
    """

    extra_metrics = ("accuracy",)
    is_scalar = False
