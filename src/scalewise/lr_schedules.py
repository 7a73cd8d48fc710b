"""Learning-rate schedules: factors of the peak learning rate by optimizer step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, pi

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


@dataclass(frozen=True)
class ScheduleConfig(ABC):
    """A linear warm-up followed by a decay."""

    warmup_steps: int = 0
    """Length of the linear warm-up from 0 to the peak learning rate, in optimizer steps."""
    rewarmup_steps: int = 0
    """Length of the linear warm-up from 0 to the scheduled learning rate after a run resumes, in
    optimizer steps; 0: none."""

    decays = True
    """Whether the learning rate at the end is lower than the peak."""

    @abstractmethod
    def factor_after_warmup(self, progress: float) -> float:
        """Factor of the peak at ``progress``, in [0, 1], through the steps after the warm-up."""

    def lr_factor(self, step: int, steps: int) -> float:
        """Factor of the peak at ``step``, counted from 0, of ``steps``."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return self.factor_after_warmup(
            min(1.0, (step - self.warmup_steps) / self._steps_after_warmup(steps))
        )

    def rewarmup_factor(self, step: int, resume_step: int | None) -> float:
        """Factor of the scheduled learning rate at ``step``, in a warm-up since ``resume_step``."""
        if resume_step is None or step >= resume_step + self.rewarmup_steps:
            return 1.0
        return (step - resume_step + 1) / (self.rewarmup_steps + 1)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each value out of range."""
        for key in ("warmup_steps", "rewarmup_steps"):
            if (steps := getattr(self, key)) < 0:
                yield ConfigIssue(f"schedule.{key}", steps, "must be 0 or more")
        for key in ("final", "decay"):
            value = getattr(self, key, 0.0)
            if not 0 <= value <= 1:
                yield ConfigIssue(f"schedule.{key}", value, "must be a fraction in [0, 1]")

    def _steps_after_warmup(self, steps: int) -> int:
        return max(1, steps - 1 - self.warmup_steps)  # the last step is number steps - 1


@register_option("schedule", "constant")
@dataclass(frozen=True)
class ConstantConfig(ScheduleConfig):
    """Constant learning rate after the warm-up."""

    decays = False

    def factor_after_warmup(self, progress: float) -> float:
        """1.0."""
        return 1.0


@register_option("schedule", "cosine")
@dataclass(frozen=True)
class CosineConfig(ScheduleConfig):
    """Cosine decay from the peak to ``final`` (Loshchilov and Hutter, 2017)."""

    final: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""

    def factor_after_warmup(self, progress: float) -> float:
        """Half a period of a cosine, from 1 to ``final``."""
        return self.final + (1 - self.final) * 0.5 * (1 + cos(pi * progress))


@register_option("schedule", "linear")
@dataclass(frozen=True)
class LinearConfig(ScheduleConfig):
    """Linear decay from the peak to ``final``."""

    final: float = 0.0
    """Learning rate at the last step, as a fraction of the peak."""

    def factor_after_warmup(self, progress: float) -> float:
        """Line from 1 to ``final``."""
        return 1 - (1 - self.final) * progress


@register_option("schedule", "wsd")
@dataclass(frozen=True)
class WarmupStableDecayConfig(ScheduleConfig):
    """Warm-up, constant peak, then linear decay at the end (MiniCPM; Hu et al., 2024)."""

    decay: float = 0.2
    """Fraction of the steps after the warm-up that the decay takes."""
    final: float = 0.0
    """Learning rate at the last step, as a fraction of the peak."""

    def factor_after_warmup(self, progress: float) -> float:
        """1 until the decay starts, then a line to ``final``."""
        start = 1 - self.decay
        if progress <= start:
            return 1.0
        return 1 - (1 - self.final) * (progress - start) / self.decay
