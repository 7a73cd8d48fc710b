"""What a picture shows, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import option_name, register_option
from scalewise.errors import ConfigIssue
from scalewise.objectives.seq2seq import Seq2Seq

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


@register_option("objective", "captioning")
@dataclass(frozen=True)
class Captioning(Seq2Seq):
    """Prediction of each caption token from the image: cross-entropy, in nats.

    Labels follow transformers' ``Blip2ForConditionalGeneration``: none on image tokens, nor on the
    token that starts the text.
    """

    reads_images = True
    model_kind = "a model that reads pictures"

    def validate_kind(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields a model or data without pictures, or with those of another size."""
        reads, shows = run.model.image_size, run.data.image_size
        if not reads:
            chosen = run.choices.get("model", option_name(run.model))
            fix = "set model=hf model.path=FOLDER of a model as BLIP-2, or objective=causal_lm"
            yield ConfigIssue("model", chosen, "reads no pictures", fix)
        if not shows:
            chosen = run.choices.get("data", option_name(run.data))
            fix = "set data=captions 'data.paths=[my/*.jsonl]', or data=shapes"
            yield ConfigIssue("data", chosen, "has no pictures", fix)
        if reads and shows and reads != shows:
            reason = f"is not the side of the pictures that the model reads, {reads}"
            yield ConfigIssue("data.image_size", shows, reason, f"set data.image_size={reads}")
