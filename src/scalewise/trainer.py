"""How long a run trains, on how many rows at a time, and how often it looks up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from scalewise.config.registry import option
from scalewise.errors import Complaint


@option("trainer", "trainer")
@dataclass(frozen=True)
class Trainer:
    """The loop. Exactly one of ``max_steps``, ``max_tokens`` and ``max_epochs`` is given."""

    max_steps: int | None = 1000
    """Optimizer steps."""
    max_tokens: int | None = None
    """Tokens to train on; rounded up to whole steps."""
    max_epochs: float | None = None
    """Passes over the training rows; rounded up to whole steps."""
    micro_batch: int = 8
    """Rows in one forward pass on one rank."""
    global_batch: int | None = None
    """Rows in one optimizer step over all ranks; None: one micro batch a rank."""
    clip_norm: float | None = 1.0
    """Largest norm of the whole gradient; None: no clipping."""
    validate_every: int | None = 100
    """Steps between validations; None: never."""
    validate_first: bool = False
    """Whether held-out rows are read before the first step too: what training begins from."""
    validation_rows: int = 64
    """Held-out rows read at each validation, at the most."""
    log_every: int = 10
    """Steps between two status lines; measurements are kept for every step."""

    def steps(self, tokens_per_step: int, rows_per_step: int, rows: int) -> int:
        """Returns the optimizer steps of the run over a training split of ``rows`` rows."""
        if self.max_steps is not None:
            return self.max_steps
        if self.max_tokens is not None:
            return ceil(self.max_tokens / tokens_per_step)
        assert self.max_epochs is not None
        return ceil(self.max_epochs * rows / rows_per_step)

    def complaints(self) -> Iterator[Complaint]:
        """Yields lengths and batches that are no training."""
        lengths = ("max_steps", "max_tokens", "max_epochs")
        given = [key for key in lengths if getattr(self, key) is not None]
        if not given:
            reason = f"exactly one of {', '.join(lengths)} is needed"
            yield Complaint("trainer.max_steps", None, reason, "set trainer.max_steps=1000")
        elif len(given) > 1:
            *others, asked = given
            reason = f"exactly one of {', '.join(lengths)} is needed, not {' and '.join(given)}"
            cure = f"to go by {asked}, set " + " ".join(f"trainer.{key}=null" for key in others)
            yield Complaint(f"trainer.{others[0]}", getattr(self, others[0]), reason, cure)
        if self.validate_first and self.validate_every is None:
            cure = "set trainer.validate_every=100"
            yield Complaint("trainer.validate_first", True, "nothing is validated", cure)
        positive = (*given, "micro_batch", "log_every", "validation_rows")
        optional = ("global_batch", "clip_norm", "validate_every")
        for key in (*positive, *(k for k in optional if getattr(self, k) is not None)):
            if not getattr(self, key) > 0:
                yield Complaint(f"trainer.{key}", getattr(self, key), "must be positive")
