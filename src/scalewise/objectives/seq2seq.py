"""Sequence-to-sequence training of encoder-decoder models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.errors import ConfigIssue
from scalewise.objectives.causal_lm import CausalLM
from scalewise.registry import register_option


@register_option("objective", "seq2seq")
@dataclass(frozen=True)
class Seq2Seq(CausalLM):
    """Prediction of each answer token from the question: cross-entropy, in nats.

    The decoder input is the answer shifted right behind the model's start token, as in
    transformers' ``...ForConditionalGeneration``.
    """

    needs_encoder_decoder = True
    trace_only = True
    model_kind = "encoder-decoder models"

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range, and of a chunked loss."""
        yield from super().validate()
        if self.loss_chunk is not None:
            reason = f"is not supported for {self.model_kind}"
            fix = "set objective.loss_chunk=null"
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, reason, fix)
