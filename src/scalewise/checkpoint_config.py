"""Config of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


@register_option("checkpoint", "checkpoint")
@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints under ``checkpoints/``: the latest, the best and the last."""

    every: int | None = None
    """Interval between checkpoints, in optimizer steps; null: only at the end or when the run is
    stopped."""
    keep: int = 2
    """Number of latest checkpoints that are kept; 0: all."""
    best: bool = True
    """Whether the checkpoint with the lowest validation loss is kept as well."""
    at_end: bool = True
    """Whether the last step is saved."""

    background: bool = False
    """Whether a thread writes while training continues; takes one more copy of the state in
    memory."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        if self.every is not None and self.every < 1:
            yield ConfigIssue("checkpoint.every", self.every, "must be 1 or more, or null")
        if self.keep < 0:
            yield ConfigIssue("checkpoint.keep", self.keep, "must be 0 (all) or more")
