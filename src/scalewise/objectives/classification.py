"""Which of some classes a text is of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import option_name, register_option
from scalewise.errors import ConfigIssue
from scalewise.objectives.causal_lm import CausalLM

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.run_config import RunConfig


@register_option("objective", "classification")
@dataclass(frozen=True)
class Classification(CausalLM):
    """Classification of a text from its last token: cross-entropy, in nats.

    Only the head differs from a language model: it has one output per class, as in transformers'
    ``...ForSequenceClassification``.
    """

    extra_metrics = ("accuracy",)
    is_scalar = False

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields data without classes, a head that has not one for each, or one that is frozen."""
        if not (number := len(run.data.classes)):
            chosen = run.choices.get("data", option_name(run.data))
            reason, fix = "has no classes", "set data=corpus_classes, or objective=causal_lm"
            yield ConfigIssue("data", chosen, reason, fix)
        elif run.model.classes != number:
            named = ", ".join(run.data.classes)
            reason = f"and data.classes are {number}: {named}"
            fix = f"set model.classes={number} model.tied=false"
            if not run.model.has_key("classes"):
                fix = f"set model=decoder_nano {fix[4:]}, or with another decoder of the suite"
            yield ConfigIssue("model.classes", run.model.classes, reason, fix)
        elif not any(w.trainable for w in run.adapter.weights(run.model) if w.role == "head"):
            reason = "leaves the head of classes as it was drawn"
            trains = "trained" in vars(run.adapter)
            head = "'adapter.trained=[head]'"
            fix = f"set {head}" if trains else f"set adapter=lora {head}"
            yield ConfigIssue("adapter", run.choices.get("adapter"), reason, fix)

    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Returns the cross-entropy of all labels, and how many are the likeliest class."""
        import torch

        right = (logits_BTV.detach().argmax(-1) == labels_BT).sum()
        return torch.stack([super().sum_over_tokens(logits_BTV, labels_BT), right])
