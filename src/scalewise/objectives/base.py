"""Base class of training objectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from scalewise.errors import ConfigIssue

if TYPE_CHECKING:
    pass

IGNORED = -100
"""Label of positions without a loss."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Config of a training objective.

    An objective computes sums over a batch: the loss and its ``extra_metrics``. They are divided by
    the number of targets of the global batch.
    """

    loss_chunk: int | None = None
    """Chunk size of the loss: logits of at most this many positions exist at once, in tokens;
    null: all."""

    implementation: ClassVar[str] = ""
    """Module that registers functions of ``objectives.losses``; empty: that one itself."""
    pairs: ClassVar[bool] = False
    """Whether a sample is a pair of sequences, the first of which is preferred."""
    extra_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that are computed with the loss, as suffixes of metric keys."""
    is_user_defined: ClassVar[bool] = False
    """Whether a user-defined module replaces model, data, optimizer and schedule."""
    needs_encoder_decoder: ClassVar[bool] = False
    """Whether the model must be an encoder-decoder model."""
    reads_images: ClassVar[bool] = False
    """Whether the model inputs are images."""
    is_scalar: ClassVar[bool] = False
    """Whether ``sum_over_tokens`` returns a scalar."""
    trace_only: ClassVar[bool] = False
    """Whether only a trace can plan the run, not the analytic memory and time models."""
    model_kind: ClassVar[str] = ""
    """Kind of models of the objective, for messages."""

    @property
    def rollouts_per_sample(self) -> int:
        """Number of answers that the model samples for each sample; 0: it samples none."""
        return 0

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Suffixes of the metric keys of the loss and its extra metrics."""
        return ("loss", *self.extra_metrics)

    def validate(self) -> Iterator[ConfigIssue]:
        """Issues of values out of range."""
        if self.loss_chunk is not None and self.loss_chunk < 1:
            yield ConfigIssue("objective.loss_chunk", self.loss_chunk, "must be 1 or more, or null")

    @property
    def reference_objective(self) -> ObjectiveConfig | None:
        """Objective that the reference model evaluates; None: there is no reference model."""
        return None

    @property
    def unregularized(self) -> ObjectiveConfig:
        """Objective of validation, without regularization."""
        return self
