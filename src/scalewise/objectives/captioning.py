"""Image captioning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.errors import ConfigIssue
from scalewise.objectives.seq2seq import Seq2Seq
from scalewise.registry import option_name, register_option

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
    model_kind = "vision-language models"

    def validate_kind(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Issues of a model or data set without images, or of different image sizes."""
        model_size, data_size = run.model.image_size, run.data.image_size
        if not model_size:
            chosen = run.choices.get("model", option_name(run.model))
            fix = "set model=hf model.path=FOLDER of a model such as BLIP-2, "
            fix += "or objective=causal_lm"
            yield ConfigIssue("model", chosen, "does not accept images", fix)
        if not data_size:
            chosen = run.choices.get("data", option_name(run.data))
            fix = "set data=captions 'data.paths=[my/*.jsonl]', or data=shapes"
            yield ConfigIssue("data", chosen, "contains no images", fix)
        if model_size and data_size and model_size != data_size:
            reason = f"differs from the image size of the model, {model_size}"
            fix = f"set data.image_size={model_size}"
            yield ConfigIssue("data.image_size", data_size, reason, fix)
