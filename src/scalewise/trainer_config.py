"""Configuration of the training loop: length, batch sizes, validation and logging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option
from scalewise.step_counts import StepCounts

AUTO = "auto"
MICRO_BATCH_KEY = "trainer.micro_batch"


@dataclass(frozen=True)
class BatchStage:
    """Part of training, from the end of the stage before it, with another global batch size."""

    until_step: int = 0
    """Last step of the stage, in optimizer steps."""
    global_batch: int = 0
    """Global batch size of each step of the stage over all ranks, in samples."""


@dataclass(frozen=True)
class SequenceStage:
    """Part of training, from the end of the stage before it, with another sequence length."""

    until_step: int = 0
    """Last step of the stage, in optimizer steps."""
    sequence: int = 0
    """Sequence length of each step of the stage, in tokens."""


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
    batch_warmup: Mapping[str, BatchStage] = field(default_factory=dict, hash=False)
    """Stages at the start of training with other global batch sizes, by name, such as a smaller
    batch until step 1000; ``global_batch`` is the one after the last stage. The micro-batch size
    stays the same."""
    sequence_warmup: Mapping[str, SequenceStage] = field(default_factory=dict, hash=False)
    """Stages at the start of training with shorter sequences, by name, such as 256 tokens until
    step 1000; ``data.sequence`` is the length after the last stage. Training samples are truncated
    at the end."""
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

    @property
    def sorted_batch_stages(self) -> list[tuple[str, BatchStage]]:
        """Stages of ``batch_warmup`` with their names, in order of steps."""
        return sorted(self.batch_warmup.items(), key=lambda item: item[1].until_step)

    @property
    def sorted_sequence_stages(self) -> list[tuple[str, SequenceStage]]:
        """Stages of ``sequence_warmup`` with their names, in order of steps."""
        return sorted(self.sequence_warmup.items(), key=lambda item: item[1].until_step)

    def samples_per_step(self, global_batch: int) -> StepCounts:
        """Global batch size of each step; ``global_batch`` is the one after the last stage."""
        stages = [(stage.until_step, stage.global_batch) for _, stage in self.sorted_batch_stages]
        return StepCounts(global_batch, tuple(stages))

    def sequence_per_step(self, sequence: int) -> StepCounts:
        """Sequence length of each step; ``sequence`` is the one after the last stage."""
        stages = [(stage.until_step, stage.sequence) for _, stage in self.sorted_sequence_stages]
        return StepCounts(sequence, tuple(stages))

    def num_steps(self, tokens_per_step: StepCounts, global_batch: int, samples: int) -> int:
        """Number of optimizer steps over a training split of ``samples`` samples."""
        if self.max_steps is not None:
            return self.max_steps
        if self.max_tokens is not None:
            return tokens_per_step.steps_for(self.max_tokens)
        assert self.max_epochs is not None
        return self.samples_per_step(global_batch).steps_for(self.max_epochs * samples)

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
        yield from self._batch_stage_issues()
        yield from _stage_issues(
            [
                (f"trainer.sequence_warmup.{name}", stage.until_step, stage.sequence)
                for name, stage in self.sorted_sequence_stages
            ],
            "sequence",
        )

    def _batch_stage_issues(self) -> Iterator[ConfigIssue]:
        """Yield issues of the stages of ``batch_warmup``, and of an unset batch after them."""
        if not self.batch_warmup:
            return
        if self.global_batch is None:
            reason = "requires trainer.global_batch, the batch after the last stage"
            fix = "set trainer.global_batch=64"
            yield ConfigIssue("trainer.batch_warmup", [*self.batch_warmup], reason, fix)
        stages = [
            (f"trainer.batch_warmup.{name}", stage.until_step, stage.global_batch)
            for name, stage in self.sorted_batch_stages
        ]
        yield from _stage_issues(
            stages, "global_batch", ("trainer.global_batch", self.global_batch)
        )


def _stage_issues(
    stages: Sequence[tuple[str, int, int]], field_name: str, *after: tuple[str, int | None]
) -> Iterator[ConfigIssue]:
    """Yield issues of the stages of a warm-up: positive, in order, growing.

    Args:
        stages: Key, last step and value of each stage, in order of steps.
        field_name: Name of the field of the value.
        after: Key and value after the last stage, if it is known.
    """
    for key, *values in stages:
        for name, value in zip(("until_step", field_name), values, strict=True):
            if value < 1:
                fix = f"set {key}.{name}=8"
                yield ConfigIssue(f"{key}.{name}", value, "must be positive", fix)
    for (before, until_step, _), (key, following, _) in pairwise(stages):
        if following == until_step:
            reason = f"is that of {before} too, so that the stage has no step"
            fix = f"set {key}.until_step={until_step + 1}"
            yield ConfigIssue(f"{key}.until_step", following, reason, fix)
    sizes = [(f"{key}.{field_name}", size) for key, _, size in stages]
    for (key, size), (larger_key, larger) in pairwise([*sizes, *after]):
        if size is not None and larger is not None and size >= larger:
            reason = f"must be below that of the steps after it, {larger_key}={larger}"
            fix = f"set {key}={max(1, larger // 2)}, or a larger {larger_key}"
            yield ConfigIssue(key, size, reason, fix)
