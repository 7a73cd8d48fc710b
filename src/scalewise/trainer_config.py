"""How long a run trains, on how many rows at a time, and how often it looks up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import AutoCheckpointing
from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue
from scalewise.planner.config import PlanSearch

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

AUTO = "auto"
SIZE = "trainer.micro_batch"


@register_option("trainer", "trainer")
@dataclass(frozen=True)
class TrainerConfig:
    """The training loop. Set exactly one of ``max_steps``, ``max_tokens`` and ``max_epochs``."""

    max_steps: int | None = 1000
    """Training length, in optimizer steps."""
    max_tokens: int | None = None
    """Training length, in tokens; rounded up to whole steps."""
    max_epochs: float | None = None
    """Training length, in epochs; rounded up to whole steps."""
    micro_batch: int | str = 8
    """Micro-batch size of one forward pass on one rank, in samples; auto: the largest that fits in
    memory."""
    global_batch: int | None = None
    """Global batch size of one optimizer step over all ranks, in samples; null: one micro-batch
    per rank."""
    clip_norm: float | None = 1.0
    """Maximum gradient norm over all parameters; null: no clipping."""
    validate_every: int | None = 100
    """Interval between validations, in optimizer steps; null: no validation."""
    validate_first: bool = False
    """Whether the model is also validated before the first step."""
    validation_rows: int = 64
    """Largest size of the validation set, in samples."""
    log_every: int = 10
    """Interval between two status lines, in optimizer steps; metrics are recorded at every step."""

    def num_steps(self, tokens_per_step: int, samples_per_step: int, samples: int) -> int:
        """Returns the optimizer steps of the run over a training split of ``samples`` rows."""
        if self.max_steps is not None:
            return self.max_steps
        if self.max_tokens is not None:
            return ceil(self.max_tokens / tokens_per_step)
        assert self.max_epochs is not None
        return ceil(self.max_epochs * samples / samples_per_step)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields lengths and batches that are no training."""
        lengths = ("max_steps", "max_tokens", "max_epochs")
        given = [key for key in lengths if getattr(self, key) is not None]
        if not given:
            reason = f"exactly one of {', '.join(lengths)} is needed"
            yield ConfigIssue("trainer.max_steps", None, reason, "set trainer.max_steps=1000")
        elif len(given) > 1:
            *others, asked = given
            reason = f"exactly one of {', '.join(lengths)} is needed, not {' and '.join(given)}"
            fix = f"to go by {asked}, set " + " ".join(f"trainer.{key}=null" for key in others)
            yield ConfigIssue(f"trainer.{others[0]}", getattr(self, others[0]), reason, fix)
        if self.validate_first and self.validate_every is None:
            fix = "set trainer.validate_every=100"
            yield ConfigIssue("trainer.validate_first", True, "nothing is validated", fix)
        size = self.micro_batch
        if size != AUTO and not (isinstance(size, int) and size >= 1):
            yield ConfigIssue(SIZE, size, "must be positive, or auto")
        positive = (*given, "log_every", "validation_rows")
        optional = ("global_batch", "clip_norm", "validate_every")
        for key in (*positive, *(k for k in optional if getattr(self, k) is not None)):
            if not getattr(self, key) > 0:
                yield ConfigIssue(f"trainer.{key}", getattr(self, key), "must be positive")

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields steps that ``micro_batch=auto`` cannot share out, and who else would choose it."""
        if self.micro_batch != AUTO:
            return
        rows, ranks = self.global_batch, run.parallelism.data_parallel_size
        if rows is None:
            reason = "the rows of a step would depend on the device"
            yield ConfigIssue(SIZE, AUTO, reason, "set trainer.global_batch=64")
        elif rows % ranks:
            reason = f"does not go evenly into the {ranks} ranks that read rows, for {SIZE}=auto"
            fix = f"set trainer.global_batch={ceil(rows / ranks) * ranks}"
            yield ConfigIssue("trainer.global_batch", rows, reason, fix)
        if run.plan.search is not PlanSearch.none:
            reason = "is chosen by plan.search itself"
            yield ConfigIssue(SIZE, AUTO, reason, "leave it out")
        if isinstance(run.memory, AutoCheckpointing):
            reason = "memory=auto goes by what a given micro batch leaves"
            both = f"plan.search=memory plan.fit=auto memory=none {SIZE}=1"
            fix = f"set {SIZE}=8, or have a search choose both: {both}"
            yield ConfigIssue(SIZE, AUTO, reason, fix)
