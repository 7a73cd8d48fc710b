"""Image captioning."""

from __future__ import annotations

from dataclasses import dataclass

from scalewise.objectives.seq2seq import Seq2Seq
from scalewise.registry import register_option


@register_option("objective", "captioning")
@dataclass(frozen=True)
class Captioning(Seq2Seq):
    """Prediction of each caption token from the image: cross-entropy, in nats.

    Labels follow transformers' ``Blip2ForConditionalGeneration``: none on image tokens, nor on the
    token that starts the text.
    """

    reads_images = True
    model_kind = "vision-language models"
