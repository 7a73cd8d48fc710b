"""Text classification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.errors import ConfigIssue
from scalewise.objectives.causal_lm import CausalLM
from scalewise.registry import option_name, register_option

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
        """Issues of a data set without classes, and of a head of another size or a frozen one."""
        if not (num_classes := len(run.data.classes)):
            chosen = run.choices.get("data", option_name(run.data))
            reason = "contains no class labels"
            fix = "set data=corpus_classes, or objective=causal_lm"
            yield ConfigIssue("data", chosen, reason, fix)
        elif run.model.classes != num_classes:
            class_names = ", ".join(run.data.classes)
            reason = f"differs from the {num_classes} classes of data.classes: {class_names}"
            fix = f"set model.classes={num_classes} model.tied=false"
            if not run.model.has_key("classes"):
                fix = f"set model=decoder_nano {fix[4:]}, or choose another decoder of scalewise"
            yield ConfigIssue("model.classes", run.model.classes, reason, fix)
        elif not any(w.trainable for w in run.adapter.weights(run.model) if w.role == "head"):
            reason = "freezes the randomly initialized classification head"
            has_option = "trained" in vars(run.adapter)
            override = "'adapter.trained=[head]'"
            fix = f"set {override}" if has_option else f"set adapter=lora {override}"
            yield ConfigIssue("adapter", run.choices.get("adapter"), reason, fix)

    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Summed cross-entropy and number of correct predictions, a vector."""
        import torch

        num_correct = (logits_BTV.detach().argmax(-1) == labels_BT).sum()
        return torch.stack([super().sum_over_tokens(logits_BTV, labels_BT), num_correct])
