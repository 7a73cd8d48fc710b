"""Configuration of the training loop: length, batch sizes, validation and logging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option

AUTO = "auto"
MICRO_BATCH_KEY = "trainer.micro_batch"


@register_option("trainer", "trainer")
@dataclass(frozen=True)
class TrainerConfig:
    """The training loop. Set exactly one of ``max_steps``, ``max_tokens`` and ``max_epochs``."""

    max_steps: int | None = 1000
    """Training length, in optimizer steps."""
    max_tokens: int | None = None
    """Training length, in tokens; rounded up to whole steps; requires ``max_steps=null``."""
    max_epochs: float | None = None
    """Training length, in epochs; rounded up to whole steps; requires ``max_steps=null``."""
    micro_batch: int | str = 8
    """Micro-batch size of one forward pass on one rank, in samples; auto: the largest that fits in
    memory."""
    global_batch: int | None = None
    """Global batch size of one optimizer step over all ranks, in samples; null: one micro-batch
    per rank."""
    clip_norm: float | None = 1.0
    """Maximum gradient norm over all parameters; null: no clipping."""
    clip_percentile: float | None = None
    """Percentile of the gradient norms of the last ``rolling_window`` steps to which gradients are
    clipped; ``clip_norm`` applies until there are as many; null: ``clip_norm`` always applies."""
    skip_sigma: float | None = None
    """Number of standard deviations by which the loss or gradient norm of a skipped step is above
    the mean of the last ``rolling_window`` steps; null: no step is skipped."""
    max_skipped_steps: int = 10
    """Number of consecutive skipped steps that stops the run, in optimizer steps."""
    rolling_window: int = 128
    """Length of the history for ``clip_percentile`` and ``skip_sigma``, in optimizer steps."""
    validate_every: int | None = 100
    """Interval between validations, in optimizer steps; null: no validation."""
    validate_first: bool = False
    """Whether the model is also validated before the first step."""
    validation_rows: int = 64
    """Largest size of the validation set, in samples."""
    log_every: int = 10
    """Interval between two status lines, in optimizer steps; metrics are recorded at every step."""

    def num_steps(self, tokens_per_step: int, samples_per_step: int, samples: int) -> int:
        """Number of optimizer steps over a training split of ``samples`` samples."""
        if self.max_steps is not None:
            return self.max_steps
        if self.max_tokens is not None:
            return ceil(self.max_tokens / tokens_per_step)
        assert self.max_epochs is not None
        return ceil(self.max_epochs * samples / samples_per_step)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues for the training length, batch sizes and intervals."""
        lengths = ("max_steps", "max_tokens", "max_epochs")
        set_lengths = [key for key in lengths if getattr(self, key) is not None]
        if not set_lengths:
            reason = f"exactly one of {', '.join(lengths)} is required"
            yield ConfigIssue("trainer.max_steps", None, reason, "set trainer.max_steps=1000")
        elif len(set_lengths) > 1:
            *others, chosen = set_lengths
            reason = (
                f"exactly one of {', '.join(lengths)} is required, not {' and '.join(set_lengths)}"
            )
            fix = f"to use {chosen}, set " + " ".join(f"trainer.{key}=null" for key in others)
            yield ConfigIssue(f"trainer.{others[0]}", getattr(self, others[0]), reason, fix)
        if self.validate_first and self.validate_every is None:
            fix = "set trainer.validate_every=100"
            yield ConfigIssue("trainer.validate_first", True, "requires validation", fix)
        size = self.micro_batch
        if size != AUTO and not (isinstance(size, int) and size >= 1):
            yield ConfigIssue(MICRO_BATCH_KEY, size, "must be positive, or auto")
        positive = (*set_lengths, "log_every", "validation_rows", "max_skipped_steps")
        if not (self.clip_percentile is None or 0 < self.clip_percentile <= 100):
            reason, fix = "must be in (0, 100], or null", "set trainer.clip_percentile=90"
            yield ConfigIssue("trainer.clip_percentile", self.clip_percentile, reason, fix)
        if self.rolling_window < 2:
            reason, fix = "must be 2 or more", "set trainer.rolling_window=128"
            yield ConfigIssue("trainer.rolling_window", self.rolling_window, reason, fix)
        optional = ("global_batch", "clip_norm", "validate_every", "skip_sigma")
        for key in (*positive, *(k for k in optional if getattr(self, k) is not None)):
            if not getattr(self, key) > 0:
                yield ConfigIssue(f"trainer.{key}", getattr(self, key), "must be positive")
