"""What is minimised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import option
from scalewise.errors import Complaint

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""A label that takes no part in the loss."""


@option("objective", "causal_lm")
@dataclass(frozen=True)
class CausalLM:
    """Predict the next token: cross-entropy in nats."""

    label_smoothing: float = 0.0
    """Share of the target probability spread over the whole vocabulary."""

    def complaints(self) -> Iterator[Complaint]:
        """Yields a share out of range."""
        if not 0 <= self.label_smoothing < 1:
            yield Complaint(
                "objective.label_smoothing", self.label_smoothing, "is a share, in [0, 1)"
            )

    def loss(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Returns the sum over all labels that are not ``IGNORED``, a scalar in fp32."""
        from torch.nn import functional as F

        return F.cross_entropy(
            logits_BTV.flatten(0, 1).float(),
            labels_BT.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
