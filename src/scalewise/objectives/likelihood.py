"""Per-token and per-sequence log-probabilities, and logits of one position; not for training.

Shape suffixes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.objectives.base import IGNORED, ObjectiveConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenLogProbabilities(ObjectiveConfig):
    """Log-probability of each token."""

    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Log-probability of each label, ``logp_BT``; 0 at ignored positions."""
        from torch.nn import functional as F

        losses_N = F.cross_entropy(
            logits_BTV.flatten(0, 1).float(),
            labels_BT.flatten(),
            ignore_index=IGNORED,
            reduction="none",
        )
        return -losses_N.view(labels_BT.shape)


@dataclass(frozen=True)
class LogProbabilities(TokenLogProbabilities):
    """Log-probability of each sequence."""

    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Log-probability of the labels of each sequence, ``logp_B``."""
        return super().sum_over_tokens(logits_BTV, labels_BT).sum(1)


@dataclass(frozen=True)
class NextToken(ObjectiveConfig):
    """Logits of the token that follows one position of each sequence."""

    position: int = 0
    """Position in the sequence."""

    def sum_over_tokens(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Logits of the position, ``logits_BV``."""
        return logits_BTV[:, self.position].float()
