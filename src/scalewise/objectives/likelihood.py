"""Per-token and per-sequence log-probabilities, and logits of one position; not for training."""

from __future__ import annotations

from dataclasses import dataclass

from scalewise.objectives.base import ObjectiveConfig


@dataclass(frozen=True)
class TokenLogProbabilities(ObjectiveConfig):
    """Log-probability of each token."""


@dataclass(frozen=True)
class LogProbabilities(TokenLogProbabilities):
    """Log-probability of each sequence."""


@dataclass(frozen=True)
class NextToken(ObjectiveConfig):
    """Logits of the token that follows one position of each sequence."""

    position: int = 0
    """Position in the sequence."""
